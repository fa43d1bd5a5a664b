"""Read a log for a stream, from a sequence until a chosen end."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeAlias, cast

from bough.v1 import follow_pb2
from bough_server.errors import SequenceOutOfRange
from bough_server.identity import Scope, includes
from bough_server.log import events
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.registry import RunRegistry
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.workers import Topic

Until: TypeAlias = follow_pb2.WatchUntil.ValueType
# EventLog promises only an iterator, but a reader that stops early has to close the generator behind it.
Pages = AsyncGenerator[Sequence[StoredEvent], None]

REPORT_SECONDS: Final = 5.0
"""Seconds between two reports of the runs that are followed here."""


class LogFollower:
    """Reads logs for streams."""

    def __init__(self, dependencies: RunDependencies, live_runs: RunRegistry) -> None:
        self._dependencies = dependencies
        self._live_runs = live_runs

    async def follow(self, scope: Scope, run_id: str, *, after: int, until: Until, past: int = 0) -> Pages:
        """Yield pages of a run's committed events after a sequence, up to the end that `until` names.

        With WATCH_UNTIL_INTERRUPTED, interruptions up to the sequence `past` do not end it: the run has been resumed
        since. While open, the iterator counts as a follower, except with WATCH_UNTIL_CURRENT. Raises NotFound and
        SequenceOutOfRange before the first page, and the error that stopped the run, if it was not recorded, after the
        last.
        """
        live = self._live_runs.get_live(run_id)
        is_current = until == follow_pb2.WATCH_UNTIL_CURRENT
        # A client that follows the run it has just started needs no look at the disk: it exists, and is in scope.
        is_known = live is not None and includes(scope, live.run_row.principal) and not after
        last = 0 if is_known and not is_current else await self._last_sequence(scope, run_id, after)
        if is_current:
            async with aclosing(self._read_up_to(run_id, after, last)) as pages:
                async for page in pages:
                    yield page
            return
        self._live_runs.add_follower(run_id)
        self._report(run_id)
        try:
            tail = cast(Pages, self._dependencies.store.log.tail(run_id, after=after))
            async with aclosing(tail):
                async for page in tail:
                    end = _find_interruption(page, past) if until == follow_pb2.WATCH_UNTIL_INTERRUPTED else None
                    if end is not None:
                        yield page[: end + 1]
                        return
                    yield page
        finally:
            self._live_runs.remove_follower(run_id)

    def _report(self, run_id: str) -> None:
        """Report a new follower of another server's run at once: the run may end soon without one."""
        store = self._dependencies.store
        if store.leases.is_shared and self._live_runs.get_live(run_id) is None:
            store.notifier.publish(Topic.FOLLOWED, run_id)

    async def _read_up_to(self, run_id: str, after: int, last: int) -> Pages:
        while after < last:
            page = await self._dependencies.store.log.read(run_id, after=after, through=last)
            if not page:
                return  # its session was deleted meanwhile
            yield page
            after = page[-1].sequence

    async def _last_sequence(self, scope: Scope, run_id: str, after: int) -> int:
        await self._dependencies.store.runs.get(scope, run_id)
        last = await self._dependencies.store.log.last_sequence(run_id)
        if after > last:
            raise SequenceOutOfRange(
                f"The log of this run ends at sequence {last}; there is nothing after {after}.",
                details={"last_sequence": str(last)},
            )
        return last


class RemoteFollowers:
    """Tells the servers that execute runs of the clients that follow these here, and hears of those elsewhere.

    Else a run that is cancelled when no client follows it would be, because its own server sees none.
    """

    def __init__(self, dependencies: RunDependencies, live_runs: RunRegistry) -> None:
        self._dependencies, self._live_runs = dependencies, live_runs
        self._notifier = dependencies.store.notifier

    async def report(self) -> None:
        """Report the runs of other servers that are followed here, until cancelled."""
        self._notifier.subscribe(Topic.FOLLOWED, self._live_runs.count_remote_follower)
        while True:
            if not self._notifier.is_connected:
                self._live_runs.count_remote_follower("")  # perhaps: nothing is heard of the others
            for run_id in self._live_runs.list_runs_to_report():
                self._notifier.publish(Topic.FOLLOWED, run_id)
            await self._dependencies.clock.sleep(REPORT_SECONDS)


def _find_interruption(page: Sequence[StoredEvent], past: int) -> int | None:
    """Return the index of a page's first interruption with a sequence over `past`, or None."""
    found = (
        place for place, stored in enumerate(page) if stored.kind == events.RUN_INTERRUPTED and stored.sequence > past
    )
    return next(found, None)
