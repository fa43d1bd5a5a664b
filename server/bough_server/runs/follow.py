"""Read and tail a log for a stream: which pages, from which sequence, until which end."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeAlias, cast

from bough.v1 import follow_pb2
from bough_server import events
from bough_server.errors import SequenceOutOfRange
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.registry import RunRegistry
from bough_server.store.ports import Principal, StoredEvent

Until: TypeAlias = follow_pb2.WatchUntil.ValueType
Pages = AsyncGenerator[Sequence[StoredEvent], None]


class LogFollower:
    """Reads logs for streams."""

    def __init__(self, equipment: RunDependencies, roster: RunRegistry) -> None:
        self._equipment = equipment
        self._roster = roster

    async def follow(self, principal: Principal, run_id: str, *, after: int, until: Until, past: int = 0) -> Pages:
        """The committed events of a run after a sequence, page by page, until where is asked.

        An interruption ends it only where it is past a sequence: an older one is part of what is told.
        Counts as a follower while it is open. Raises NotFound and SequenceOutOfRange at once, and what stopped the run
        unrecorded, after what is committed.
        """
        live = self._roster.at_hand(run_id)
        is_current = until == follow_pb2.WATCH_UNTIL_CURRENT
        is_known = live is not None and live.record.principal == principal and not after
        last = 0 if is_known and not is_current else await self._last_sequence(principal, run_id, after)
        if is_current:
            async with aclosing(self._up_to(run_id, after, last)) as pages:
                async for page in pages:
                    yield page
            return
        self._roster.joined(run_id)
        try:
            tail = cast(Pages, self._equipment.log.tail(run_id, after=after))
            async with aclosing(tail):
                async for page in tail:
                    end = _interruption(page, past) if until == follow_pb2.WATCH_UNTIL_INTERRUPTED else None
                    if end is not None:
                        yield page[: end + 1]
                        return
                    yield page
        finally:
            self._roster.left(run_id)

    async def _up_to(self, run_id: str, after: int, last: int) -> Pages:
        while after < last:
            page = await self._equipment.log.read(run_id, after=after, through=last)
            if not page:
                return  # its session was deleted meanwhile
            yield page
            after = page[-1].sequence

    async def _last_sequence(self, principal: Principal, run_id: str, after: int) -> int:
        await self._equipment.index.get(principal, run_id)
        last = await self._equipment.log.last_sequence(run_id)
        if after > last:
            raise SequenceOutOfRange(
                f"The log of this run ends at sequence {last}; there is nothing after {after}.",
                details={"last_sequence": str(last)},
            )
        return last


def _interruption(page: Sequence[StoredEvent], past: int) -> int | None:
    """Where in a page a run is interrupted first past a sequence; None for nowhere."""
    found = (
        place for place, stored in enumerate(page) if stored.kind == events.RUN_INTERRUPTED and stored.sequence > past
    )
    return next(found, None)
