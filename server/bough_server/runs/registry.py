"""Live runs of this process by id, with those that it is about to take over."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bough_server.runs.live import LiveRun
from bough_server.store.ports import Principal


class RunRegistry:
    """Live runs by their ids. Whoever looks for one that is just being accepted or taken over waits for it."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRun] = {}
        self._arriving: dict[str, asyncio.Task[Any]] = {}
        self._followers: Counter[str] = Counter()
        self._waiting: Counter[tuple[str, str]] = Counter()

    def __iter__(self) -> Iterator[LiveRun]:
        return iter(list(self._live.values()))

    def arriving(self, run_id: str, work: "asyncio.Task[Any]") -> None:
        """Somebody makes the run live at this moment."""
        self._arriving[run_id] = work
        work.add_done_callback(lambda _: self._forget(run_id, work))

    def _forget(self, run_id: str, work: "asyncio.Task[Any]") -> None:
        if self._arriving.get(run_id) is work:
            del self._arriving[run_id]

    def add(self, live: LiveRun) -> None:
        """The run is live; who followed it before still does."""
        self._live[live.run_id] = live
        if live.has_waited:
            self._waiting[live.session_key] += 1
        if followers := self._followers[live.run_id]:
            live.followed_by(followers)

    def joined(self, run_id: str) -> None:
        """Somebody follows a run, live or not."""
        self._followers[run_id] += 1
        if (live := self._live.get(run_id)) is not None:
            live.followed_by(self._followers[run_id])

    def left(self, run_id: str) -> None:
        """Somebody follows a run no more."""
        self._followers[run_id] -= 1
        followers = self._followers[run_id]
        if not followers:
            del self._followers[run_id]
        if (live := self._live.get(run_id)) is not None:
            live.followed_by(followers)

    def remove(self, live: LiveRun) -> None:
        """It is no longer."""
        if self._live.get(live.run_id) is live:
            del self._live[live.run_id]
        if live.has_waited:
            self._waiting[live.session_key] -= 1
            if not self._waiting[live.session_key]:
                del self._waiting[live.session_key]

    def has_waiting(self, principal: Principal, session_id: str) -> bool:
        """Whether a run may wait for a session of the principal's tenant."""
        return (principal.tenant_id, session_id) in self._waiting

    def at_hand(self, run_id: str) -> LiveRun | None:
        """The live run of an id, without waiting."""
        return self._live.get(run_id)

    async def find(self, run_id: str) -> LiveRun | None:
        """A run while it goes here; one that is on disk and about to begin is waited for."""
        while (work := self._arriving.get(run_id)) is not None:
            await asyncio.wait({work})
            self._forget(run_id, work)
        return self._live.get(run_id)

    async def settle(self) -> None:
        """Waits for everything that is arriving."""
        while self._arriving:
            await asyncio.wait(self._arriving.values())

    def tasks(self) -> "set[asyncio.Task[None]]":
        """The tasks of the live runs."""
        return {live.task for live in self._live.values() if live.task is not None}
