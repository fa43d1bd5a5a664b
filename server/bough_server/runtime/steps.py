"""Which steps a lane makes and which calls of its last one still wait to be run; it runs none of them."""

from collections.abc import Mapping, Sequence

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError


class StepNumbers:
    """Numbers of steps: of a lane every `stride`-th, so that parallel lanes never share one, in whatever order."""

    def __init__(self, first: int = 0, stride: int = 1) -> None:
        self._next = first
        self._stride = stride

    def take(self) -> int:
        """The next number."""
        taken, self._next = self._next, self._next + self._stride
        return taken

    def split(self, lanes: int) -> "list[StepNumbers]":
        """Numbers for lanes that run at once."""
        return [StepNumbers(self._next + lane * self._stride, self._stride * lanes) for lane in range(lanes)]

    def pass_over(self, lanes: "Sequence[StepNumbers]") -> None:
        """Goes on after lanes: beyond every number that any of them took."""
        self._next = max((lane._next for lane in lanes), default=self._next)


class WaitingCalls:
    """The calls of a model's answer that nobody has run yet; each may be taken once.

    It has copies: code that is given the answer may change what it holds.
    """

    def __init__(self, calls: Sequence[message_pb2.ToolCall]) -> None:
        self._waiting = {call.call_id: (position, _copied(call)) for position, call in enumerate(calls)}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, calls: Sequence[message_pb2.ToolCall]) -> Mapping[int, message_pb2.ToolCall]:
        """The same calls by their positions in the answer, in the order given; they wait no longer.

        Raises RunError BAD_ARGUMENTS, and takes none, where one does not wait or is not as the model made it.
        """
        taken: dict[int, message_pb2.ToolCall] = {}
        for call in calls:
            position, made = self._waiting.get(call.call_id, (-1, None))
            if made is None or made != call or position in taken:
                raise RunError(
                    f"The call {call.call_id!r} of {call.name!r} is not one that waits for its result. Give ctx.tools "
                    "calls of the last answer of ctx.model in the same lane, each once and as the model made it. "
                    "What code decides by itself goes through ctx.dispatch or ctx.step.",
                    reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
                )
            taken[position] = made
        for call in calls:
            del self._waiting[call.call_id]
        return taken


def _copied(call: message_pb2.ToolCall) -> message_pb2.ToolCall:
    copy = message_pb2.ToolCall()
    copy.CopyFrom(call)
    return copy
