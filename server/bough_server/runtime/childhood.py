"""What begins and ends a child in the log, each in one append with the call that made it run; it runs none."""

from bough.v1 import event_pb2, message_pb2
from bough_server import ids
from bough_server.engine.cancellation import failure_of_child
from bough_server.engine.execution import Execution
from bough_server.engine.open_invocations import duration
from bough_server.errors import RunError
from bough_server.runtime.agent import Agent, Outcome
from bough_server.runtime.dispatches import Dispatch, Handover
from bough_server.runtime.ends import close_span, finish
from bough_server.runtime.frame import Frame, Place, branch_below, child_frame, run_path_below
from bough_server.runtime.lane import Lane
from bough_server.telemetry import Traced


def begin(lane: Lane, work: Dispatch, agent: Agent, told: message_pb2.Message, digest: str) -> Frame:
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
    opened = execution.invocations[started.invocation_id]
    return child_frame(execution, caller, place, opened=opened, traced=traced)


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
    begun.trigger = event_pb2.TRIGGER_TOOL if work.call is not None else work.trigger
    if work.call is not None:
        begun.call_id = work.call.call_id
    elif work.handover is not None:
        begun.call_id = work.handover.call_id
    begun.run_path.extend(run_path_below(_path(caller, work), work.agent))
    begun.input.CopyFrom(told)
    return started


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
    called = caller.opened.in_step(caller.event(work.key, traced=traced), work.step_index)
    called.attempt = 1
    called.tool_started.call.CopyFrom(call)
    earlier = execution.journal.started.get(work.key)
    called.tool_started.idempotency_key = (
        earlier.tool_started.idempotency_key if earlier else ids.derived_id(execution.facts.run_id, work.key)
    )
    return called


def _path(caller: Frame, work: Dispatch) -> tuple[str, ...]:
    return caller.run_path if work.path is None else work.path


def _place(lane: Lane, work: Dispatch, agent: Agent, told: message_pb2.Message) -> Place:
    caller, handover = lane.frame, work.handover
    return Place(
        agent=agent,
        link=work.link,
        scope=work.key,
        above=lane.transcript,
        state=work.state or lane.lane_state,
        told=told,
        path=_path(caller, work),
        is_handed_over=handover is not None and handover.by == caller.name,
        comes_back=handover is not None and handover.comes_back,
        closing=work.closing,
    )


def _transferred(
    caller: Frame, handover: Handover, started: event_pb2.AgentEvent, traced: Traced
) -> event_pb2.AgentEvent:
    event = caller.event(started.effect_key, traced=traced)
    moved = event.agent_transferred
    moved.from_agent, moved.to_agent = handover.by, started.agent
    moved.call_id, moved.to_invocation_id = handover.call_id, started.invocation_id
    return event


def result_of(
    work: Dispatch, caller: Frame, frame: Frame, outcome: Outcome | None, error: RunError | None
) -> message_pb2.ToolResult:
    """What the call that made a child run gives; where nobody called, what its end would be as a call's."""
    result = message_pb2.ToolResult(
        agent=caller.name, invocation_id=caller.invocation_id, child_invocation_id=frame.invocation_id
    )
    if work.call is not None:
        result.call.CopyFrom(work.call)
    result.start_time.FromNanoseconds(frame.opened.start_ns)
    if outcome is not None:
        result.parts.extend(outcome.output.parts)
    if error is not None:
        result.error.CopyFrom(failure_of_child(work.agent, frame.invocation_id, error.message))
    return result


def end(
    execution: Execution,
    caller: Frame,
    frame: Frame,
    work: Dispatch,
    outcome: Outcome | None,
    error: RunError | None,
    result: message_pb2.ToolResult,
) -> None:
    """Records the end of a child, with that of the call that made it run in the same append."""
    batch = finish(execution, frame, outcome, error)
    if work.call is not None:
        result.latency.CopyFrom(duration(execution.clock.now_ns() - frame.opened.start_ns))
        ended = caller.opened.in_step(caller.event(work.key, traced=frame.traced), work.step_index)
        ended.attempt = 1
        (ended.tool_failed if error else ended.tool_completed).result.CopyFrom(result)
        batch.append(ended)
    execution.emit(*batch)
    close_span(execution, frame, outcome, error)
