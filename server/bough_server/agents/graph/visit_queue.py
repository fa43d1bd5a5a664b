"""The visits and items of a graph that run at a time: they begin in order, and their ends are applied one by one."""

import asyncio
from collections import deque
from collections.abc import Iterable

from bough_server.agents.graph.visit import Visit
from bough_server.engine.scheduler import Waiter
from bough_server.runtime.children import LaneGroup
from bough_server.runtime.lane import Lane


class VisitQueue:
    """Runs at most so many visits at a time; the items of a mapped visit are visits too, and run in its place."""

    def __init__(self, lane: Lane, *, most: int) -> None:
        self._lane, self._most = lane, most
        self._tasks = LaneGroup(lane, "")
        self._waiting: deque[Visit] = deque()
        self._running: dict[asyncio.Task[None], Visit] = {}
        self._places = 0
        self._open: dict[str, Visit] = {}
        """Visits whose items run or wait, by key."""
        self._parents: dict[str, Visit] = {}
        """Item to its visit, by key."""
        self._ended: deque[asyncio.Task[None]] = deque()
        self._waiter: Waiter[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True if anything runs, waits or is to be applied."""
        return bool(self._waiting or self._running or self._open)

    def add(self, visits: Iterable[Visit]) -> None:
        """Let visits begin in this order, after those that wait already."""
        self._waiting.extend(visits)

    def drop_waiting(self) -> None:
        """Let no other visit begin; the items of those that have begun still do."""
        self._waiting = deque(visit for visit in self._waiting if visit.item is not None)

    async def next_end(self) -> Visit:
        """Return the next visit that has ended, in the order of the log.

        Raises the Abort with which the failure of an agent aborts the graph.
        """
        # Two ends of one iteration of the event loop must not free two places at once: a replay delivers them one by
        # one, and another visit could begin first then.
        while True:
            await self._fill()
            while not self._ended:
                self._waiter = Waiter(self._lane.execution.scheduler)
                await self._waiter.wait()
            task = self._ended.popleft()
            visit = self._running.pop(task)
            await self._check(task)
            if (parent := self._parents.pop(visit.key, None)) is None:
                self._places -= not visit.is_mapped or visit.problem is not None
                return visit
            self._places -= 1
            self._count_item(parent)

    async def _check(self, task: asyncio.Task[None]) -> None:
        """Raise what ends the graph with a visit's task."""
        abort, scheduler = self._lane.running.abort, self._lane.execution.scheduler
        if abort is not None:
            await scheduler.join(*self._running)  # the others are cancelled, and the one that aborts records its end
            raise abort
        if task.cancelled():
            await scheduler.rest_forever()  # what ended the visit ends the graph as well
        if (error := task.exception()) is not None:
            raise error

    async def _fill(self) -> None:
        """Begin visits and items from the front while places are free."""
        while self._waiting and self._places < self._most:
            visit = self._waiting.popleft()
            if visit.is_mapped and visit.problem is None:
                await self._open_items(visit)
            else:
                self._places += 1
                self._start(visit)

    async def _open_items(self, visit: Visit) -> None:
        """Begin a visit whose items are its work: they are next."""
        await visit.start()
        self._open[visit.key] = visit
        if not visit.is_replaced:
            group = LaneGroup(visit.lane, f"{visit.key}.")
            visit.open_items(group)
        for item in reversed(visit.items):
            self._parents[item.key] = visit
            self._waiting.appendleft(item)
        visit.items_left = len(visit.items) + 1
        self._count_item(visit)

    def _count_item(self, visit: Visit) -> None:
        visit.items_left -= 1
        if not visit.items_left:
            del self._open[visit.key]
            self._start(visit)

    def _start(self, visit: Visit) -> None:
        task = self._tasks.start(visit.key, visit.run())
        self._running[task] = visit
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._ended.append(task)
        if self._waiter is not None:
            self._waiter.resolve(None)
