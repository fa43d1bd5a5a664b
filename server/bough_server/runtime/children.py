"""The children of composite agents, one after another and in parallel; iterations and plans."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bough.v1 import action_pb2, agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server import events
from bough_server.engine import keys
from bough_server.errors import RunError
from bough_server.models.model import ToolSpec
from bough_server.runtime.child_events import end_others
from bough_server.runtime.dispatch import Dispatch, DispatchResult, Handover
from bough_server.runtime.dispatcher import OnFailure, dispatch
from bough_server.runtime.lane import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A linked agent to be run: by which link, and the name of its effect below its caller's scope.

    Without an input it goes on with what its caller was told.
    """

    link: agent_pb2.AgentLink
    name: str
    closing: Sequence[ToolSpec] = ()
    """The tools by one of which it has to end; empty where it ends as it likes."""
    trigger: execution_pb2.InvocationTrigger.ValueType = execution_pb2.INVOCATION_TRIGGER_WORKFLOW
    input: message_pb2.Message | None = None
    handover: Handover | None = None
    """How it came to be handed over to, where it was."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What an input builder is told beside the rest: `plan`, `step`, `executed_steps`."""
    iteration: int | None = None
    """The iteration of its caller, from 0; None if that is no loop and no plan."""


async def _nothing(_: RunError) -> None:
    return None


async def run_child(lane: Lane, child: Child, *, on_failure: OnFailure = _nothing) -> DispatchResult:
    """Runs a child to its end; its caller goes on after what it said. Raises Abort where it fails the caller.

    `on_failure` is awaited when it has failed, before its end is recorded.
    """
    key = keys.below(lane.scope, child.name)
    async with lane.effect(key):
        work = Dispatch(
            key=key,
            agent=child.link.agent,
            link=child.link,
            input=child.input,
            trigger=child.trigger,
            closing=child.closing,
            path=lane.path,
            handover=child.handover,
            facts=child.facts,
            iteration=child.iteration,
        )

        async def fail(error: RunError) -> None:
            await end_others(lane.execution, lane.frame, key, error)
            await on_failure(error)

        ended = await dispatch(lane, work, on_failure=fail)
    if ended.transcript is not None:
        lane.transcript.join(ended.transcript, by_call=False)
        lane.path = ended.path
    return ended


async def hand_over(
    lane: Lane, transfer: action_pb2.TransferAction, call_id: str, *, member: int | None = None
) -> DispatchResult:
    """Runs the agent that a call of the last step hands over to, in its caller's place; or as its n-th member."""
    link = lane.frame.toolset.targets[transfer.agent]
    child = Child(
        link=link,
        name=f"s{lane.step_index}.x" if member is None else f"h{member}",
        trigger=execution_pb2.INVOCATION_TRIGGER_TRANSFER,
        input=transfer.message if transfer.HasField("message") else None,
        handover=Handover(
            by=lane.frame.name,
            from_invocation_id=lane.frame.invocation_id,
            call_id=call_id,
            path=lane.frame.hops if member is None else (),
            comes_back=member is not None,
        ),
    )
    return await run_child(lane, child)


async def begin_iteration(lane: Lane, number: int) -> None:
    """Records that an iteration of a loop begins, from 0."""
    key = keys.below(lane.scope, f"l{number}")
    async with lane.effect(key):
        begun = lane.frame.event(key)
        begun.loop_iteration_started.iteration = number
        await _say(lane, begun)


async def begin_plan(lane: Lane, number: int, steps: Iterable[str]) -> None:
    """Records the plan that an iteration begins with, from 0: in the first it is made, in any other it is revised."""
    key = keys.below(lane.scope, f"p{number}")
    async with lane.effect(key):
        made = lane.frame.event(key)
        items = made.plan_revised.items if number else made.plan_made.items
        items.extend(event_pb2.PlanItem(text=step) for step in steps)
        await _say(lane, made)


async def _say(lane: Lane, event: event_pb2.AgentEvent) -> None:
    """Records an event that is no result: nobody waits for it."""
    execution, key = lane.execution, event.effect_key
    if not execution.journal.holds(key, events.kind_of(event)):
        # A run that was cancelled between two iterations is replayed to its end without the next one.
        await lane.go_live(key)
    execution.emit(event)


async def run_lanes(
    lane: Lane, children: Sequence[Child], *, fails_fast: bool, at_once: int
) -> list[DispatchResult | None]:
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
        self._running: dict[int, asyncio.Task[DispatchResult]] = {}
        self._is_over = False

    async def run(self, at_once: int) -> list[DispatchResult | None]:
        waiting = iter(range(len(self._children)))
        ended: list[DispatchResult | None] = [None] * len(self._children)
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

    async def _run(self, place: int) -> DispatchResult:
        return await run_child(self._lanes[place], self._children[place], on_failure=lambda _: self._fail(place))

    async def _fail(self, place: int) -> None:
        """Ends the other lanes where the failure of one is to."""
        is_tolerated = self._children[place].link.on_failure == policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE
        if self._is_over or self._frame.abort is not None or not self._fails_fast or is_tolerated:
            return
        self._is_over = True
        error = RunError("A child beside it failed.", reason=error_pb2.ERROR_REASON_CANCELLED).to_agent_error()
        await self._execution.cancelling.cancel_siblings(
            [self._key(other) for other in sorted(self._running.keys() - {place})],
            caller=self._frame.invocation_id,
            reason=execution_pb2.CANCEL_REASON_FAIL_FAST,
            error=error,
        )

    def _join(self) -> None:
        before = self._caller.path
        for lane in self._lanes:
            self._caller.transcript.entries.extend(lane.transcript.entries)
            is_whole = lane.path[: len(before)] == before
            self._caller.path += lane.path[len(before) :] if is_whole else lane.path
