"""Children at once: a lane for each, joined in order; a failing one may end the others. What they do is theirs."""

import asyncio
from collections.abc import Sequence

from bough.v1 import error_pb2, event_pb2, policy_pb2
from bough_server.engine import keys
from bough_server.errors import RunError
from bough_server.runtime.children import Child, run_child
from bough_server.runtime.dispatches import Ended
from bough_server.runtime.lane import Lane


async def run_lanes(lane: Lane, children: Sequence[Child], *, fails_fast: bool, at_once: int) -> list[Ended | None]:
    """How children ended that ran at once, at most so many at a time; None for those that another's failure ended.

    With `fails_fast` the first failure, in the order of the log, ends the others; not that of a child whose link says
    CONTINUE. Raises Abort where a failure fails the caller.
    """
    async with lane.effect(keys.below(lane.scope, "g")):
        return await _Lanes(lane, children, fails_fast=fails_fast).run(at_once)


class _Lanes:
    """The lanes of one caller."""

    def __init__(self, lane: Lane, children: Sequence[Child], *, fails_fast: bool) -> None:
        self._caller, self._execution, self._frame = lane, lane.execution, lane.frame
        self._children, self._fails_fast = children, fails_fast
        group = keys.below(lane.scope, "g")
        self._lanes = [lane.beside(lane.lane_state.fork(group, place)) for place in range(len(children))]
        self._running: dict[int, asyncio.Task[Ended]] = {}
        self._is_over = False

    async def run(self, at_once: int) -> list[Ended | None]:
        waiting = iter(range(len(self._children)))
        ended: list[Ended | None] = [None] * len(self._children)
        for place in [next(waiting) for _ in range(min(at_once, len(self._children)))]:
            self._start(place)
        while self._running:
            await self._execution.tasks.join(*self._running.values(), first=True)
            for place, task in [(each, task) for each, task in self._running.items() if task.done()]:
                del self._running[place]
                self._frame.lanes.pop(task, None)
                if not task.cancelled() and task.exception() is None:
                    ended[place] = task.result()
                is_over = self._is_over or self._frame.abort is not None
                following = None if is_over else next(waiting, None)
                if following is not None:
                    self._start(following)
        self._caller.lane_state.join()
        if self._frame.abort is not None:
            raise self._frame.abort
        self._join()
        return ended

    def _key(self, place: int) -> str:
        return keys.below(self._caller.scope, self._children[place].name)

    def _start(self, place: int) -> None:
        task = self._execution.tasks.spawn(self._key(place), self._run(place))
        self._running[place] = task
        self._frame.lanes[task] = self._key(place)

    async def _run(self, place: int) -> Ended:
        return await run_child(self._lanes[place], self._children[place], on_failure=lambda _: self._fail(place))

    async def _fail(self, place: int) -> None:
        """Ends the other lanes where the failure of one is to."""
        is_tolerated = self._children[place].link.on_failure == policy_pb2.ON_SUB_AGENT_FAILURE_CONTINUE
        if self._is_over or self._frame.abort is not None or not self._fails_fast or is_tolerated:
            return
        self._is_over = True
        error = RunError("A child beside it failed.", reason=error_pb2.ERROR_REASON_CANCELLED).to_agent_error()
        await self._execution.cancelling.cancel_siblings(
            [self._key(other) for other in sorted(self._running.keys() - {place})],
            caller=self._frame.invocation_id,
            reason=event_pb2.CANCEL_REASON_FAIL_FAST,
            error=error,
        )

    def _join(self) -> None:
        before = self._caller.path
        for lane in self._lanes:
            self._caller.transcript.entries.extend(lane.transcript.entries)
            is_whole = lane.path[: len(before)] == before
            self._caller.path += lane.path[len(before) :] if is_whole else lane.path
