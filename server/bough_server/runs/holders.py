"""Waits for runs of other workers to give up their sessions; whose turn comes then it does not decide."""

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, cast

from bough_server.errors import Fenced, NotFound, RunParked, ServerStopping, StorageFailed
from bough_server.runs.equipment import Equipment
from bough_server.runs.following import Pages
from bough_server.runs.patience import FIRST_PATIENCE
from bough_server.store.ports import RunRecord


class Holders:
    """The sessions that runs of this worker wait for and others hold: `on_end` is told of each that is given up."""

    def __init__(
        self,
        equipment: Equipment,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_end: Callable[[str], Awaitable[None]],
    ) -> None:
        self._equipment = equipment
        self._spawn = spawn
        self._on_end = on_end
        self._watched: set[str] = set()

    def watch(self, holder: RunRecord) -> None:
        """Waits for the end of a run in a task of its own, one for each session."""
        if holder.run.session_id not in self._watched:
            self._watched.add(holder.run.session_id)
            self._spawn(self._watch(holder))

    async def _watch(self, holder: RunRecord) -> None:
        try:
            while not await self._is_over(holder):
                await self._equipment.clock.sleep(FIRST_PATIENCE)
        except (NotFound, ServerStopping):
            return  # its session was deleted, or who waits for it waits on where it is taken up
        finally:
            self._watched.discard(holder.run.session_id)
        await self._on_end(holder.run.session_id)

    async def _is_over(self, holder: RunRecord) -> bool:
        """Waits for the end of a log; gives whether it came: it does not while nobody can write it."""
        tail = cast(Pages, self._equipment.log.tail(holder.run.run_id, after=holder.run.last_sequence))
        try:
            async with aclosing(tail):
                async for _ in tail:
                    pass
        except (StorageFailed, Fenced, RunParked):
            return False
        return True
