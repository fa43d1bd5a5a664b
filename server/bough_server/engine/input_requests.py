"""Requests for input that a run waits for, and the answers: whether one fits, and the event that records it."""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from bough.v1 import event_pb2, input_pb2, message_pb2
from bough_server import events
from bough_server.engine.scheduler import Gate, Tasks
from bough_server.errors import RunError
from bough_server.tools.arguments import parse_arguments, schema_mistakes

_WANTED: Final = {
    input_pb2.INPUT_REASON_APPROVAL: ("approval",),
    input_pb2.INPUT_REASON_CLIENT_TOOL: ("tool_result",),
    input_pb2.INPUT_REASON_QUESTION: ("value_json",),
    input_pb2.INPUT_REASON_RECOVERY: ("approval", "tool_result"),
}


def mistakes(request: input_pb2.InputRequest, answer: input_pb2.InputAnswer) -> list[str]:
    """What of an answer does not fit its request, in sentences; empty where it fits."""
    given = answer.WhichOneof("answer") or ""
    wanted = _WANTED.get(request.reason, ())
    if given not in wanted:
        reason = input_pb2.InputReason.Name(request.reason).removeprefix("INPUT_REASON_")
        return [f"{reason} is answered with {' or '.join(wanted)}, not with {given or 'nothing'}."]
    if given == "approval":
        return _arguments(answer.approval.arguments_json, request.answer_schema_json)
    if given == "value_json":
        return _value(answer.value_json, request.answer_schema_json, "value_json")
    return result_mistakes(answer.tool_result)


def result_mistakes(result: message_pb2.ToolResult) -> list[str]:
    """What of a result that somebody else made is none, in sentences; empty where it is one."""
    parts = result.parts
    if any(part.HasField("tool_call") or part.HasField("tool_result") for part in parts):
        return ["The parts of a result hold no calls and no results."]
    if any(part.WhichOneof("content") is None for part in parts):
        return ["Each part of a result has some content; say an empty text for nothing."]
    if result.HasField("error") and parts:
        return ["A result has parts or an error, not both."]
    if not result.HasField("error") and not parts:
        return ["A result has parts or an error; say an empty text for nothing."]
    return [wrong for part in parts if part.HasField("data_json") for wrong in _value(part.data_json, "", "data_json")]


def _arguments(arguments_json: str, schema_json: str) -> list[str]:
    try:
        if arguments_json:
            parse_arguments(arguments_json, schema_json or "{}")
    except RunError as error:
        return [error.message]
    return []


def _value(value_json: str, schema_json: str, field: str) -> list[str]:
    try:
        value = json.loads(value_json, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # code cannot hand on halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        return [f"{field} is not JSON ({error})."]
    return schema_mistakes(value, schema_json) if schema_json else []


def _no_constant(name: str) -> None:
    # Python reads NaN and Infinity; JSON has neither.
    raise ValueError(f"{name} is not JSON")


def same_answer(one: input_pb2.InputAnswer, other: input_pb2.InputAnswer) -> bool:
    """Whether two answers say the same, whoever gave them."""
    return _bare(one) == _bare(other)


def _bare(answer: input_pb2.InputAnswer) -> input_pb2.InputAnswer:
    bare = input_pb2.InputAnswer()
    bare.CopyFrom(answer)
    bare.ClearField("source")
    bare.ClearField("answered_by")
    if bare.HasField("tool_result"):
        bare.tool_result.ClearField("call")
    elif bare.HasField("value_json"):
        bare.value_json = _plain(bare.value_json)
    elif bare.approval.arguments_json:
        bare.approval.arguments_json = _plain(bare.approval.arguments_json)
    return bare


def _plain(text: str) -> str:
    """A JSON value in one form, however it was written; what is none stays as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def expired(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    """The answer of a request that nobody answered in time: its default, or none."""
    answer = input_pb2.InputAnswer()
    answer.CopyFrom(request.default_answer)
    answer.request_id = request.request_id
    answer.source = input_pb2.ANSWER_SOURCE_EXPIRY
    return answer


def received(
    asked: event_pb2.AgentEvent,
    answer: input_pb2.InputAnswer,
    *,
    resume_request_id: str = "",
    resume_request_digest: str = "",
) -> event_pb2.AgentEvent:
    """The input_received of an answer, in the place of its input_requested."""
    event = events.in_place_of(asked)
    event.input_received.answer.CopyFrom(answer)
    event.input_received.resume_request_id = resume_request_id
    event.input_received.resume_request_digest = resume_request_digest
    return event


class Inputs:
    """The requests that somebody in a run waits for, in the order of asking; each by its input_requested.

    `asked` waits until a request is on disk, and raises CancelledError where what asks has ended by then.
    """

    def __init__(self, tasks: Tasks, asked: Callable[[event_pb2.AgentEvent], Awaitable[None]]) -> None:
        self._tasks = tasks
        self._asked = asked
        self._waiting: dict[str, tuple[event_pb2.AgentEvent, Gate[input_pb2.InputAnswer]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def requests(self) -> Iterator[input_pb2.InputRequest]:
        """What is asked, in the order of the log: who asks again after a crash may come in another one."""
        asked = sorted((asked for asked, _ in self._waiting.values()), key=lambda event: event.sequence)
        return (event.input_requested.request for event in asked)

    def asked(self, request_id: str) -> event_pb2.AgentEvent | None:
        """The input_requested of a request that somebody waits for."""
        return self._waiting[request_id][0] if request_id in self._waiting else None

    def take(self, request_id: str) -> Gate[input_pb2.InputAnswer] | None:
        """What lets go on who waits for a request; once: from then on nobody waits for it, though they wake later."""
        _, gate = self._waiting.pop(request_id, (None, None))
        return gate

    async def wait(self, asked: event_pb2.AgentEvent) -> input_pb2.InputAnswer:
        """Waits for the answer to a request that is recorded."""
        request_id = asked.input_requested.request.request_id
        gate: Gate[input_pb2.InputAnswer] = Gate(self._tasks)
        self._waiting[request_id] = asked, gate
        try:
            # Awake until then: code that begins another effect beside it is to hear of that before the run waits.
            await self._asked(asked)
            return await gate.wait()
        finally:
            self._waiting.pop(request_id, None)
