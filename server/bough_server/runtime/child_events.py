"""Start and end events of a child invocation, each appended atomically with the tool call that dispatched it."""

import asyncio

from bough.v1 import error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server import events, ids
from bough_server.engine import keys
from bough_server.engine.cancellation import failure_of_child
from bough_server.engine.execution import Execution, as_run_error
from bough_server.engine.open_invocations import OpenInvocation, duration
from bough_server.engine.scheduler import STOP_SECONDS
from bough_server.errors import RunError
from bough_server.runtime.agent import Agent, Outcome
from bough_server.runtime.dispatch import Dispatch, Handover
from bough_server.runtime.lane import Lane
from bough_server.runtime.running_agent import CallSite, RunningAgent, branch_below, run_path_below
from bough_server.telemetry import Traced


def outcome_of(task: "asyncio.Task[Outcome]", frame: RunningAgent) -> tuple[Outcome | None, RunError | None]:
    """An agent's outcome or error, whatever its code raised; what aborted it, whatever its code made of that."""
    raised = None if task.cancelled() else task.exception()
    if frame.abort is not None:
        return None, frame.abort
    if task.cancelled():
        return None, RunError("The agent's code cancelled itself.", reason=error_pb2.ERROR_REASON_CANCELLED)
    if raised is not None:
        return None, as_run_error(raised)
    return task.result(), None


def finish(
    execution: Execution, frame: RunningAgent, outcome: Outcome | None, error: RunError | None
) -> list[event_pb2.AgentEvent]:
    """What ends an invocation: its open steps, then itself. Its answer is said and given its place in the session."""
    now, opened = execution.clock.now_ns(), frame.record
    if error is not None:
        failure = error.to_agent_error(agent=frame.name, invocation_id=frame.invocation_id)
        steps = list(execution.invocations.failing_step(opened, failure, now))
        _last_step(opened, steps)
        return [*steps, execution.invocations.failed(opened, failure, now)]
    assert outcome is not None, "an invocation without an error has an answer"
    output = message_pb2.Message()
    output.CopyFrom(outcome.output)
    steps = list(execution.invocations.completing_steps(opened, now))
    _last_step(opened, steps)
    is_root = frame.parent is None
    kind = "ASSISTANT" if is_root else "SUB_AGENT_ASSISTANT"
    output.role, output.invocation_id = message_pb2.ROLE_ASSISTANT, frame.invocation_id
    output.author = outcome.author or frame.name
    is_new = not outcome.author and not outcome.is_said
    if is_root or is_new:  # a session is to hold what its user was answered, whoever wrote it
        output.kind = message_pb2.MessageKind.Value(f"MESSAGE_KIND_{kind}")
        recorded_by = events.RUN_COMPLETED if is_root else events.SUB_AGENT_COMPLETED
        output.message_id = execution.message_id(frame.scope, recorded_by, kind)
    if is_new:
        frame.transcript.say(output)
    end = execution.invocations.succeeded(opened, output, outcome.end_reason, now, action=outcome.action)
    return [*steps, end]


def _last_step(opened: OpenInvocation, steps: list[event_pb2.AgentEvent]) -> None:
    if steps:
        opened.last_step_id = steps[-1].step_id


def close_span(execution: Execution, frame: RunningAgent, outcome: Outcome | None, error: RunError | None) -> None:
    """Ends an invocation's span."""
    traced = execution.spans.pop(frame.scope, None)
    if traced is not None:
        traced.end(
            error=error.to_agent_error() if error else None,
            input=[frame.told],
            output=[outcome.output] if outcome is not None else None,
        )


async def cancel_remaining(execution: Execution, frame: RunningAgent) -> None:
    """Ends what an agent's code left running when it ended itself, so that no child outlives its caller."""
    for lane in frame.lanes:
        execution.tasks.cancel(lane)
    if frame.lanes:
        await asyncio.wait(frame.lanes, timeout=STOP_SECONDS)
    left = [*execution.invocations.children_of(frame.invocation_id), *frame.record.effects]
    for key in dict.fromkeys(left):
        await end_effect(execution, frame, key)


async def end_others(execution: Execution, frame: RunningAgent, key: str, error: RunError) -> None:
    """Ends everything of an invocation but one effect, where it is that one's failure that aborts it."""
    if error is not frame.abort:
        return
    lanes = {scope: lane for lane, scope in frame.lanes.items() if not keys.covers(scope, key)}
    others = [*lanes, *execution.invocations.children_of(frame.invocation_id), *frame.record.effects]
    doomed = [other for other in dict.fromkeys(others) if other != key]
    cancelling = execution.cancelling
    # All are sealed before the first is waited for: one that fails meanwhile would end this one halfway.
    ending = [
        other
        for other in doomed
        if cancelling.wish(
            event_pb2.CancelRequested(effect_scope=other, reason=execution_pb2.CANCEL_REASON_ABORT),
            caller=frame.invocation_id,
        )
        or cancelling.is_ending(other)
    ]
    for lane in lanes.values():
        execution.tasks.cancel(lane)
    left = _left_behind()
    for other in ending:
        await cancelling.end(other, left, left)


async def end_effect(execution: Execution, frame: RunningAgent, key: str) -> None:
    """Ends an effect of an invocation that its code no longer waits for."""
    error = _left_behind()
    await execution.cancelling.cancel(
        key, caller=frame.invocation_id, reason=execution_pb2.CANCEL_REASON_ABORT, error=error, below=error
    )


def _left_behind() -> error_pb2.AgentError:
    return RunError("Its caller went on without it.", reason=error_pb2.ERROR_REASON_CANCELLED).to_agent_error()


def begin(lane: Lane, work: Dispatch, agent: Agent, told: message_pb2.Message, digest: str) -> RunningAgent:
    """Records the start of a child, with the call that made it run in the same append, and gives its frame."""
    execution, caller = lane.execution, lane.frame
    started = _started(lane, work, agent, told)
    started.effect_digest = digest
    traced = _traced(lane, work, agent, started)
    started.trace_id, started.span_id = traced.trace_id, traced.span_id
    batch: list[event_pb2.AgentEvent] = []
    if work.call is not None:
        batch.append(_called(lane, work, work.call, traced))
        batch[-1].effect_digest = digest
    if work.handover is not None:
        batch.append(_transferred(caller, work.handover, started, traced))
    execution.emit(*batch, started)
    place = _place(lane, work, agent, told)
    record = execution.invocations[started.invocation_id]
    return caller.child(execution, place, record=record, traced=traced)


def _started(lane: Lane, work: Dispatch, agent: Agent, told: message_pb2.Message) -> event_pb2.AgentEvent:
    caller = lane.frame
    started = event_pb2.AgentEvent(
        invocation_id=ids.invocation_id(lane.execution.facts.key_root, work.key),
        parent_invocation_id=caller.invocation_id,
        agent=work.agent,
        branch=branch_below(caller.branch, work.agent),
        depth=caller.depth + 1,
        effect_key=work.key,
    )
    begun = started.sub_agent_started
    begun.kind, begun.description = agent.kind, agent.definition.description
    begun.trigger = execution_pb2.INVOCATION_TRIGGER_TOOL if work.call is not None else work.trigger
    if work.call is not None:
        begun.call_id = work.call.call_id
    elif work.handover is not None:
        begun.call_id = work.handover.call_id
    begun.run_path.extend(run_path_below(_path(caller, work), work.agent))
    begun.input.CopyFrom(told)
    begun.revision = _revision(lane, work, agent)
    if work.handover is not None:
        begun.from_invocation_id = work.handover.from_invocation_id
    if work.iteration is not None:
        begun.iteration = work.iteration
    return started


def _revision(lane: Lane, work: Dispatch, agent: Agent) -> str:
    """The revision that a child started with: a fork may have changed its definition after that."""
    recorded = lane.execution.journal.recorded.get((work.key, events.SUB_AGENT_STARTED, 0))
    if recorded is not None:
        return recorded.sub_agent_started.revision
    return agent.revision if agent.definition.WhichOneof("kind") else ""


def _traced(lane: Lane, work: Dispatch, agent: Agent, started: event_pb2.AgentEvent) -> Traced:
    execution, facts = lane.execution, lane.execution.facts
    traced = execution.tracing.invoke_agent(
        agent=work.agent,
        description=agent.definition.description,
        invocation_id=started.invocation_id,
        run_id=facts.run_id,
        session_id=facts.session_id,
        branch=started.branch,
        depth=started.depth,
        parent=lane.frame.traced.below,
        is_over=work.key in execution.journal.ends,
    )
    execution.spans[work.key] = traced
    return traced


def _called(lane: Lane, work: Dispatch, call: message_pb2.ToolCall, traced: Traced) -> event_pb2.AgentEvent:
    execution, caller = lane.execution, lane.frame
    called = caller.record.in_step(caller.event(work.key, traced=traced), work.step_index)
    called.attempt = 1
    called.tool_started.call.CopyFrom(call)
    earlier = execution.journal.started.get(work.key)
    called.tool_started.idempotency_key = (
        earlier.tool_started.idempotency_key if earlier else ids.derived_id(execution.facts.run_id, work.key)
    )
    return called


def _path(caller: RunningAgent, work: Dispatch) -> tuple[str, ...]:
    return caller.run_path if work.path is None else work.path


def _place(lane: Lane, work: Dispatch, agent: Agent, told: message_pb2.Message) -> CallSite:
    caller, handover = lane.frame, work.handover
    return CallSite(
        agent=agent,
        link=work.link,
        above=lane.transcript,
        state=work.state or lane.lane_state,
        told=told,
        path=_path(caller, work),
        is_handed_over=handover is not None and handover.by == caller.name,
        comes_back=handover is not None and handover.comes_back,
        closing=work.closing,
    )


def _transferred(
    caller: RunningAgent, handover: Handover, started: event_pb2.AgentEvent, traced: Traced
) -> event_pb2.AgentEvent:
    event = caller.event(started.effect_key, traced=traced)
    moved = event.agent_transferred
    moved.from_agent, moved.to_agent = handover.by, started.agent
    moved.call_id, moved.to_invocation_id = handover.call_id, started.invocation_id
    return event


def result_of(
    work: Dispatch, caller: RunningAgent, frame: RunningAgent, outcome: Outcome | None, error: RunError | None
) -> message_pb2.ToolResult:
    """What the call that made a child run gives; where nobody called, what its end would be as a call's."""
    result = message_pb2.ToolResult(
        agent=caller.name, invocation_id=caller.invocation_id, child_invocation_id=frame.invocation_id
    )
    if work.call is not None:
        result.call.CopyFrom(work.call)
    result.start_time.FromNanoseconds(frame.record.start_ns)
    if outcome is not None:
        result.parts.extend(outcome.output.parts)
    if error is not None:
        result.error.CopyFrom(failure_of_child(work.agent, frame.invocation_id, error.message))
    return result


def end(
    execution: Execution,
    caller: RunningAgent,
    frame: RunningAgent,
    work: Dispatch,
    outcome: Outcome | None,
    error: RunError | None,
    result: message_pb2.ToolResult,
) -> None:
    """Records the end of a child, with that of the call that made it run in the same append."""
    batch = finish(execution, frame, outcome, error)
    if work.call is not None:
        result.duration.CopyFrom(duration(execution.clock.now_ns() - frame.record.start_ns))
        ended = caller.record.in_step(caller.event(work.key, traced=frame.traced), work.step_index)
        ended.attempt = 1
        (ended.tool_failed if error else ended.tool_completed).result.CopyFrom(result)
        batch.append(ended)
    execution.emit(*batch)
    close_span(execution, frame, outcome, error)
