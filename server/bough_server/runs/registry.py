"""Registry of the live runs of this process, and of those being created or taken over."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bough_server.runs.live import LiveRun
from bough_server.store.ports.log import Principal


class RunRegistry:
    """Live runs by id. Finding a run that is just being created or taken over waits for it."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRun] = {}
        self._arriving: dict[str, asyncio.Task[Any]] = {}
        self._followers: Counter[str] = Counter()
        self._waiting: Counter[tuple[str, str]] = Counter()

    def __iter__(self) -> Iterator[LiveRun]:
        return iter(list(self._live.values()))  # a copy: runs end while callers iterate

    def executed(self) -> set[str]:
        """Return the live runs that do not wait for their session, and those that are about to be live."""
        return {live.run_id for live in self._live.values() if not live.is_waiting} | self._arriving.keys()

    def arriving(self, run_id: str, work: "asyncio.Task[Any]") -> None:
        """Register a task that is about to make a run live, or to end it."""
        self._arriving[run_id] = work
        work.add_done_callback(lambda _: self._forget(run_id, work))

    def _forget(self, run_id: str, work: "asyncio.Task[Any]") -> None:
        if self._arriving.get(run_id) is work:  # else a later task has replaced it
            del self._arriving[run_id]

    def add(self, live: LiveRun) -> None:
        """Add a live run, with the followers that it already has."""
        self._live[live.run_id] = live
        if live.has_waited:
            self._waiting[live.session_key] += 1
        if followers := self._followers[live.run_id]:
            live.followed_by(followers)

    def joined(self, run_id: str) -> None:
        """Count a follower of a run, live or not."""
        self._followers[run_id] += 1
        if (live := self._live.get(run_id)) is not None:
            live.followed_by(self._followers[run_id])

    def left(self, run_id: str) -> None:
        """Count a follower less."""
        self._followers[run_id] -= 1
        followers = self._followers[run_id]
        if not followers:
            del self._followers[run_id]
        if (live := self._live.get(run_id)) is not None:
            live.followed_by(followers)

    def followed_here(self) -> list[str]:
        """Return the followed runs that are not live."""
        return [run_id for run_id in self._followers if run_id not in self._live]

    def followed_elsewhere(self, run_id: str) -> None:
        """Note that a run is followed at another server; without an id, that any run may be."""
        if not run_id:
            for each in self:
                each.followed_elsewhere()
        elif (live := self._live.get(run_id)) is not None:
            live.followed_elsewhere()

    def remove(self, live: LiveRun) -> None:
        """Remove a run that is no longer live."""
        if self._live.get(live.run_id) is live:  # the run may be live again by now, as another LiveRun
            del self._live[live.run_id]
        if live.has_waited:
            self._waiting[live.session_key] -= 1
            if not self._waiting[live.session_key]:
                del self._waiting[live.session_key]

    def has_waiting(self, principal: Principal, session_id: str) -> bool:
        """True if a live run may be waiting for a session of the principal's tenant."""
        return (principal.tenant_id, session_id) in self._waiting

    def at_hand(self, run_id: str) -> LiveRun | None:
        """Return the live run with an id, or None, without waiting."""
        return self._live.get(run_id)

    async def find(self, run_id: str) -> LiveRun | None:
        """Return the live run with an id, or None, waiting first for one that is being created or taken over."""
        while (work := self._arriving.get(run_id)) is not None:
            await asyncio.wait({work})
            self._forget(run_id, work)  # a task that is done, but whose callback has not run yet, would loop here
        return self._live.get(run_id)

    async def arrived(self) -> None:
        """Wait for the runs that are being created, taken over or ended now, and for none that come after."""
        if self._arriving:
            await asyncio.wait(list(self._arriving.values()))

    async def settle(self) -> None:
        """Wait for all runs that are being created, taken over or ended."""
        while self._arriving:
            await asyncio.wait(self._arriving.values())

    def tasks(self) -> "set[asyncio.Task[None]]":
        """Return the tasks of the live runs."""
        return {live.task for live in self._live.values() if live.task is not None}
