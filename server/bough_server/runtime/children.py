"""Children of composite agents, in sequence and in parallel; iterations and plans."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from bough.v1 import action_pb2, error_pb2, event_pb2, execution_pb2, policy_pb2
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.runtime.child_call import MAX_RUN_PATH, Dispatch, DispatchResult, OnFailure, Transfer
from bough_server.runtime.dispatcher import cancel_others, dispatch
from bough_server.runtime.lane import Lane

T = TypeVar("T")


async def _ignore_failure(_: RunError) -> None:
    return None


async def run_child(lane: Lane, work: Dispatch, *, on_failure: OnFailure = _ignore_failure) -> DispatchResult:
    """Run a child to its end and append its messages to the lane's. Raises Abort if its failure aborts the caller.

    `on_failure` is awaited if it fails, before its end is recorded.
    """

    async def fail(error: RunError) -> None:
        await cancel_others(lane.execution, lane.running, work.key, error)
        await on_failure(error)

    async with lane.guard_effect(work.key):
        ended = await dispatch(lane, work, on_failure=fail)
    if ended.transcript is not None:
        lane.transcript.join(ended.transcript, by_call=False)
        lane.path = ended.path
    return ended


async def run_transfer(
    lane: Lane, transfer: action_pb2.TransferAction, call_id: str, *, member: int | None = None
) -> DispatchResult:
    """Run the agent to which a call of the last step transfers; `member` is its number if it runs as a member."""
    link = lane.running.toolset.targets[transfer.agent]
    work = Dispatch(
        key=lane.step_key("x") if member is None else lane.key(f"h{member}"),
        link=link,
        trigger=execution_pb2.INVOCATION_TRIGGER_TRANSFER,
        input=transfer.message if transfer.HasField("message") else None,
        transfer=Transfer(
            by=lane.running.name,
            from_invocation_id=lane.running.invocation_id,
            call_id=call_id,
            path=lane.running.hops if member is None else (),
            comes_back=member is not None,
        ),
    )
    return await run_child(lane, work)


async def begin_iteration(lane: Lane, number: int) -> None:
    """Record the start of an iteration of a loop, counted from 0."""
    key = lane.key(f"l{number}")
    async with lane.guard_effect(key):
        event = lane.running.event(key)
        event.loop_iteration_started.iteration = number
        await _record(lane, event)


async def record_plan(lane: Lane, number: int, steps: Iterable[str]) -> None:
    """Record the plan of an iteration: plan_made in the first, number 0, plan_revised in any other."""
    key = lane.key(f"p{number}")
    async with lane.guard_effect(key):
        event = lane.running.event(key)
        items = event.plan_revised.items if number else event.plan_made.items
        items.extend(event_pb2.PlanItem(text=step) for step in steps)
        await _record(lane, event)


async def _record(lane: Lane, event: event_pb2.AgentEvent) -> None:
    """Record an event that is not the result of an effect, so the replay does not deliver it."""
    execution, key = lane.execution, event.effect_key
    if not execution.journal.holds(key, events.kind_of(event)):
        # If the run was cancelled between two iterations, the replay must stop here and not emit the next one.
        await lane.go_live(key)
    execution.emit(event)


async def run_lanes(
    lane: Lane, children: Sequence[Dispatch], *, fails_fast: bool, at_once: int
) -> list[DispatchResult | None]:
    """Run children in parallel, at most `at_once` at a time; return their results, None for cancelled children.

    With `fails_fast` the first failure in log order cancels the others, unless the failed child's link says CONTINUE.
    Raises Abort if a failure aborts the caller.
    """
    async with lane.guard_effect(lane.key("g")):
        return await _Lanes(lane, children, fails_fast=fails_fast).run(at_once)


class LaneGroup:
    """Lanes of one caller that run beside one another; `prefix` is what their keys have before their numbers."""

    def __init__(self, lane: Lane, prefix: str) -> None:
        self._caller, self._prefix = lane, prefix
        self._lanes: dict[int, Lane] = {}

    def fork(self, number: int, *, is_scope: bool = False) -> Lane:
        """Return a lane that begins now; with `is_scope` its effects are below its own key."""
        scope = f"{self._prefix}{number}" if is_scope else None
        state = self._caller.lane_state.fork(self._prefix, number)
        lane = self._lanes[number] = self._caller.fork_lane(state, scope=scope)
        return lane

    def start(self, key: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start what runs in a lane, in a task that is cancelled with `key`."""
        running = self._caller.running
        task = self._caller.execution.scheduler.spawn(key, work)
        running.lanes[task] = key
        task.add_done_callback(lambda task: running.lanes.pop(task, None))
        return task

    def join_state(self) -> None:
        """Apply what the lanes wrote to the session state, in their order."""
        self._caller.lane_state.join()

    def join(self) -> None:
        """Append what was seen and said in the lanes to the caller's transcript and path, in their order."""
        caller, before = self._caller, self._caller.path
        for number in sorted(self._lanes):
            lane = self._lanes[number]
            caller.wake_ns = max(caller.wake_ns, lane.wake_ns)
            caller.transcript.entries.extend(lane.transcript.entries)
            # A path keeps its last names: if a lane's no longer begins with the common part, append all of it.
            is_whole = lane.path[: len(before)] == before
            caller.path = (*caller.path, *(lane.path[len(before) :] if is_whole else lane.path))[-MAX_RUN_PATH:]


class _Lanes:
    """Parallel children of one caller, a lane for each."""

    def __init__(self, lane: Lane, children: Sequence[Dispatch], *, fails_fast: bool) -> None:
        self._caller, self._execution, self._running = lane, lane.execution, lane.running
        self._children, self._fails_fast = children, fails_fast
        self._group = LaneGroup(lane, lane.key("g"))
        self._lanes = [self._group.fork(place) for place in range(len(children))]
        self._tasks: dict[int, asyncio.Task[DispatchResult]] = {}
        self._is_over = False

    async def run(self, at_once: int) -> list[DispatchResult | None]:
        waiting = iter(range(len(self._children)))
        results: list[DispatchResult | None] = [None] * len(self._children)
        for place in [next(waiting) for _ in range(min(at_once, len(self._children)))]:
            self._start(place)
        while self._tasks:
            await self._execution.scheduler.join(*self._tasks.values(), first=True)
            for place, task in [(each, task) for each, task in self._tasks.items() if task.done()]:
                del self._tasks[place]
                if not task.cancelled() and task.exception() is None:
                    results[place] = task.result()
                is_over = self._is_over or self._running.abort is not None
                following = None if is_over else next(waiting, None)
                if following is not None:
                    self._start(following)
        self._group.join_state()
        if self._running.abort is not None:
            raise self._running.abort
        self._group.join()
        return results

    def _start(self, place: int) -> None:
        self._tasks[place] = self._group.start(self._children[place].key, self._run(place))

    async def _run(self, place: int) -> DispatchResult:
        return await run_child(
            self._lanes[place], self._children[place], on_failure=lambda _: self._cancel_others(place)
        )

    async def _cancel_others(self, place: int) -> None:
        """Cancel the other lanes if the failure of this one is to end them."""
        is_tolerated = self._children[place].link.on_failure == policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE
        if self._is_over or self._running.abort is not None or not self._fails_fast or is_tolerated:
            return
        self._is_over = True
        error = RunError("A parallel child failed.", reason=error_pb2.ERROR_REASON_CANCELLED).to_agent_error()
        await self._execution.cancellation.cancel_siblings(
            [self._children[other].key for other in sorted(self._tasks.keys() - {place})],
            caller=self._running.invocation_id,
            reason=execution_pb2.CANCEL_REASON_FAIL_FAST,
            error=error,
        )
