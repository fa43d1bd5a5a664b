"""Registry of the live runs of this process, and of those being created or taken over."""

import asyncio
from collections import Counter
from collections.abc import Collection

from bough_server.clock import Clock
from bough_server.identity import Principal
from bough_server.ownership.arrivals import Arrivals
from bough_server.ownership.background import Background
from bough_server.ownership.worker import Worker
from bough_server.runs.live import LiveRun


class RunRegistry(Arrivals[LiveRun]):
    """Live runs by id, the followers of runs, and the sessions that live runs wait for."""

    def __init__(self, worker: Worker, background: Background, clock: Clock) -> None:
        super().__init__(worker, background, clock)
        self._followers: Counter[str] = Counter()
        self._waiting: Counter[tuple[str, str]] = Counter()

    def list_executing(self) -> Collection[str]:
        """Return the runs that take up room: not those that wait for their session, perhaps for one without room."""
        return {live.run_id for live in self if not live.is_waiting} | self.coming()

    def add(self, live: LiveRun) -> None:
        """Add a live run, with the followers that it already has."""
        self.put(live.run_id, live)
        if live.has_waited:
            self._waiting[live.session_key] += 1
        if followers := self._followers[live.run_id]:
            live.set_followers(followers)

    def add_follower(self, run_id: str) -> None:
        """Count a follower of a run, live or not."""
        self._followers[run_id] += 1
        if (live := self.get_live(run_id)) is not None:
            live.set_followers(self._followers[run_id])

    def remove_follower(self, run_id: str) -> None:
        """Count a follower less."""
        self._followers[run_id] -= 1
        followers = self._followers[run_id]
        if not followers:
            del self._followers[run_id]
        if (live := self.get_live(run_id)) is not None:
            live.set_followers(followers)

    def list_followed_runs(self) -> "set[asyncio.Task[None]]":
        """Return the tasks of the live runs that have a follower here."""
        return {live.task for live in self if live.task is not None and self._followers[live.run_id]}

    def list_runs_to_report(self) -> list[str]:
        """Return the followed runs that are not live."""
        return [run_id for run_id in self._followers if self.get_live(run_id) is None]

    def count_remote_follower(self, run_id: str) -> None:
        """Note that a run is followed at another server; without an id, that any run may be."""
        if not run_id:
            for each in self:
                each.count_remote_follower()
        elif (live := self.get_live(run_id)) is not None:
            live.count_remote_follower()

    def remove(self, live: LiveRun) -> None:
        """Remove a run that is no longer live."""
        self.discard(live.run_id, live)
        if live.has_waited:
            self._waiting[live.session_key] -= 1
            if not self._waiting[live.session_key]:
                del self._waiting[live.session_key]

    def has_waiting(self, principal: Principal, session_id: str) -> bool:
        """True if a live run may be waiting for a session of the principal's tenant."""
        return (principal.tenant_id, session_id) in self._waiting

    def tasks(self) -> "set[asyncio.Task[None]]":
        """Return the tasks of the live runs."""
        return {live.task for live in self if live.task is not None}
