"""What begins and ends a child in the log, each in one append with the call that made it run; it runs none."""

from typing import TYPE_CHECKING

from google.protobuf import duration_pb2

from bough.v1 import event_pb2, message_pb2
from bough_server import ids
from bough_server.errors import RunError
from bough_server.runtime.agent import Agent, Outcome
from bough_server.runtime.closing import failure_of_child
from bough_server.runtime.dispatches import Dispatch, Handover
from bough_server.runtime.ends import close_span, finish
from bough_server.runtime.execution import Execution
from bough_server.runtime.frame import Frame, Place, branch_below, child_frame, run_path_below
from bough_server.telemetry import Traced

if TYPE_CHECKING:
    from bough_server.runtime.context import Context


def begin(ctx: "Context", work: Dispatch, agent: Agent, told: message_pb2.Message, digest: str) -> Frame:
    """Records the start of a child, with the call that made it run in the same append, and gives its frame."""
    execution, caller = ctx.execution, ctx.frame
    facts = execution.facts
    child_id = ids.invocation_id(facts.key_root, work.key)
    branch = branch_below(caller.branch, work.agent)
    traced = execution.tracing.invoke_agent(
        agent=work.agent,
        description=agent.definition.description,
        invocation_id=child_id,
        run_id=facts.run_id,
        session_id=facts.session_id,
        branch=branch,
        depth=caller.depth + 1,
        parent=caller.traced.below,
        is_over=work.key in execution.journal.ends,
    )
    execution.spans[work.key] = traced
    batch: list[event_pb2.AgentEvent] = []
    if work.call is not None:
        called = caller.opened.in_step(caller.event(work.key, traced=traced), work.step_index)
        called.effect_digest, called.attempt = digest, 1
        called.tool_started.call.CopyFrom(work.call)
        earlier = execution.journal.started.get(work.key)
        called.tool_started.idempotency_key = (
            earlier.tool_started.idempotency_key if earlier else ids.derived_id(facts.run_id, work.key)
        )
        batch.append(called)
    started = event_pb2.AgentEvent(
        invocation_id=child_id,
        parent_invocation_id=caller.invocation_id,
        agent=work.agent,
        branch=branch,
        depth=caller.depth + 1,
        effect_key=work.key,
        effect_digest=digest,
        trace_id=traced.trace_id,
        span_id=traced.span_id,
    )
    begun = started.sub_agent_started
    begun.kind, begun.description = agent.kind, agent.definition.description
    begun.trigger = event_pb2.TRIGGER_TOOL if work.call is not None else work.trigger
    handover = work.handover
    if work.call is not None:
        begun.call_id = work.call.call_id
    elif handover is not None:
        begun.call_id = handover.call_id
    path = caller.run_path if work.path is None else work.path
    begun.run_path.extend(run_path_below(path, work.agent))
    begun.input.CopyFrom(told)
    if handover is not None:
        batch.append(_transferred(caller, handover, started, traced))
    batch.append(started)
    execution.emit(*batch)
    return child_frame(
        execution,
        caller,
        Place(
            agent=agent,
            link=work.link,
            scope=work.key,
            above=ctx.transcript,
            state=work.state or ctx.lane_state,
            told=told,
            path=path,
            is_handed_over=handover is not None and handover.by == caller.name,
            comes_back=handover is not None and handover.comes_back,
            closing=work.closing,
        ),
        opened=execution.invocations[child_id],
        traced=traced,
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
        latency = duration_pb2.Duration()
        latency.FromNanoseconds(max(0, execution.clock.now_ns() - frame.opened.start_ns))
        result.latency.CopyFrom(latency)
        ended = caller.opened.in_step(caller.event(work.key, traced=frame.traced), work.step_index)
        ended.attempt = 1
        (ended.tool_failed if error else ended.tool_completed).result.CopyFrom(result)
        batch.append(ended)
    execution.emit(*batch)
    close_span(execution, frame, outcome, error)
