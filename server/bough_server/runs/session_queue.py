"""The queues of sessions: start the next run of a session when the one before it has ended, here or elsewhere."""

from contextlib import aclosing
from functools import partial
from typing import cast

from bough_server.errors import Fenced, NotFound, RunParked, ServerStopping, StorageFailed
from bough_server.identity import Principal
from bough_server.ownership.background import INITIAL_BACKOFF, Background, retry_until_stored
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.follow import Pages
from bough_server.runs.last_speaker import find_first_member
from bough_server.runs.registry import RunRegistry
from bough_server.store.ports.runs import RunRow


class SessionQueue:
    """Starts the runs of this worker that wait for their session.

    It watches sessions that they wait for while runs of other workers hold them.
    """

    def __init__(self, dependencies: RunDependencies, live_runs: RunRegistry, background: Background) -> None:
        self._dependencies, self._live_runs, self._background = dependencies, live_runs, background
        self._watched: set[tuple[str, str]] = set()
        self.is_draining = False
        """True if no queued run is started any more: other servers continue them."""

    async def call_next(self, principal: Principal, session_id: str) -> None:
        """Start the queued run that now holds a session, if it is live here; retry later if storage fails."""
        try:
            await self._call_next(principal, session_id)
        except ServerStopping:
            return  # it stays queued until another server continues it
        except StorageFailed:
            again = partial(self._call_next, principal, session_id)
            self._background.spawn(retry_until_stored(self._dependencies.clock, again))

    def call_next_soon(self, principal: Principal, session_id: str) -> None:
        """Start the queued run that now holds a session in a background task, if any may wait for it here."""
        if self._live_runs.has_waiting(principal, session_id):
            self._background.spawn(self.call_next(principal, session_id))

    async def _call_next(self, principal: Principal, session_id: str) -> None:
        holder = await self._dependencies.store.runs.holder(principal, session_id)
        if holder is None or self.is_draining:
            return
        live = self._live_runs.get_live(holder.run.run_id)
        if live is None and self._may_end_elsewhere(holder) and self._live_runs.has_waiting(principal, session_id):
            self._watch_soon(holder)
        if live is None or not live.is_waiting:
            return
        cut = await self._dependencies.store.sessions.read_position(principal, session_id)
        session = await self._dependencies.read_session_history(principal, session_id, through=cut.position)
        starts_with = await find_first_member(self._dependencies.store.log, live.definition, session.stored)
        live.begin(cut, session, starts_with=starts_with)

    def _may_end_elsewhere(self, holder: RunRow) -> bool:
        """Return True if this server may not notice the end of a run that is not live here.

        Another server may also end a run that this worker owns and that waits for input: when its request has expired.
        """
        return self._dependencies.store.leases.is_shared or holder.owner != self._dependencies.worker

    def _watch_soon(self, holder: RunRow) -> None:
        """Wait for the end of a run in a background task, one per session."""
        watched = holder.principal.tenant_id, holder.run.session_id
        if watched not in self._watched:
            self._watched.add(watched)
            self._background.spawn(self._watch(holder))

    async def _watch(self, holder: RunRow) -> None:
        try:
            while not await self._is_over(holder):
                await self._dependencies.clock.sleep(INITIAL_BACKOFF)
        except (NotFound, ServerStopping):
            return  # the session was deleted, or the server stops and the next one continues the queued runs
        finally:
            self._watched.discard((holder.principal.tenant_id, holder.run.session_id))
        await self.call_next(holder.principal, holder.run.session_id)

    async def _is_over(self, holder: RunRow) -> bool:
        """Wait for the end of a run; return False if its log failed, was fenced or parked before that."""
        tail = cast(Pages, self._dependencies.store.log.tail(holder.run.run_id, after=holder.run.last_sequence))
        try:
            async with aclosing(tail):
                async for _ in tail:
                    pass
        except (StorageFailed, Fenced, RunParked):
            return False
        return True
