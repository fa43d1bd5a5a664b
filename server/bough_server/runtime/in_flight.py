"""An effect of a lane while it is in flight: who may begin one, and what becomes of one that its code gives up."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Final

from bough.v1 import error_pb2
from bough_server.errors import NonDeterministic, RunError

if TYPE_CHECKING:
    from bough_server.runtime.lane import Lane

MOST_REFUSALS: Final = 100
"""How often code that was ended may try to begin an effect and hear of its end; then it waits for good."""


class InFlight:
    """Holds a lane while an effect is in flight."""

    __slots__ = ("_key", "_lane")

    def __init__(self, lane: "Lane", key: str) -> None:
        self._lane = lane
        self._key = key

    async def __aenter__(self) -> None:
        lane, execution = self._lane, self._lane.execution
        if execution.is_refused(lane.frame.invocation_id, self._key):
            await self._refuse()
        if lane.in_flight:
            raise RunError(
                f"The effect {self._key} began while {lane.in_flight} was in flight. Run effects one after another, or "
                "at once with ctx.gather(lambda lane: lane.dispatch(...), ...), using each lane's own context.",
                reason=error_pb2.ERROR_REASON_CONCURRENT_EFFECTS,
            )
        lane.in_flight = self._key
        try:
            await lane.record_state()
        except BaseException:
            lane.in_flight = ""
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._lane.in_flight = ""
        if kind is asyncio.CancelledError and self._lane.execution.tasks.is_cancelled_by_code():
            self._lane.execution.stop(
                NonDeterministic(
                    f"The code of {self._lane.frame.name!r} gave up its effect {self._key} while it was in flight, as "
                    "asyncio.timeout does; no log could say when. Give ctx.ask `expires`, and links and tools limits "
                    "of their own; a step may time out inside of its own work."
                )
            )

    async def _refuse(self) -> None:
        """Ends code that tries an effect after its end; `except Exception` does not catch it.

        Others get a turn first, and code that will not hear of it for ever gets no answer: it may do so in a loop.
        """
        self._lane.refusals += 1
        if self._lane.refusals <= MOST_REFUSALS:
            await asyncio.sleep(0)
            raise asyncio.CancelledError
        await self._lane.execution.tasks.abandoned()
