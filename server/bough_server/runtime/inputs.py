"""What a run asks of the outside while it goes, and who waits for it; checking and recording answers is not here."""

from collections.abc import Awaitable, Callable, Iterator

from bough.v1 import event_pb2, input_pb2
from bough_server.runtime.tasks import Gate, Tasks


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
