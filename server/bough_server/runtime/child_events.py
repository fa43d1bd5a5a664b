"""Start and end events of a child invocation, each appended atomically with the tool call that dispatched it."""

import asyncio

from bough.v1 import error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.cancellation import failure_of_child
from bough_server.engine.execution import Execution, to_run_error
from bough_server.engine.open_invocations import OpenInvocation, to_duration
from bough_server.engine.scheduler import STOP_SECONDS
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.messages import copy_of
from bough_server.observability.tracing import Traced
from bough_server.runtime.agent import Agent, Outcome
from bough_server.runtime.dispatch import Dispatch, Transfer
from bough_server.runtime.failure_log import log_failure
from bough_server.runtime.lane import Lane
from bough_server.runtime.running_agent import CallSite, RunningAgent, branch_below, run_path_below


def outcome_of(
    execution: Execution, task: "asyncio.Task[Outcome]", running: RunningAgent
) -> tuple[Outcome | None, RunError | None]:
    """Return an agent's outcome or its error. An exception of its code is logged, but not again in a replay."""
    raised = None if task.cancelled() else task.exception()
    if running.abort is not None:  # its code may have caught the Abort, but cannot undo it
        return None, running.abort
    if task.cancelled():
        # A cancellation that was asked for is recorded by the one who asked, and never comes here.
        return None, RunError("The agent's code cancelled itself.", reason=error_pb2.ERROR_REASON_INTERNAL)
    if raised is not None:
        if running.scope not in execution.journal.ends:
            names = {"agent": running.name, "invocation_id": running.invocation_id}
            log_failure("agent failed", raised, run_id=execution.facts.run_id, **names)
        return None, to_run_error(raised)
    return task.result(), None


def build_invocation_end(
    execution: Execution, running: RunningAgent, outcome: Outcome | None, error: RunError | None
) -> list[event_pb2.AgentEvent]:
    """Return the end events of an invocation: of its open steps, then its own.

    A new answer is added to its transcript and gets a message id, which gives it a place in the session.
    """
    now, opened = execution.clock.now_ns(), running.open_invocation
    if error is not None:
        failure = error.to_agent_error(agent=running.name, invocation_id=running.invocation_id)
        steps = list(execution.invocations.build_step_failures(opened, failure, now))
        _set_last_step(opened, steps)
        return [*steps, execution.invocations.build_failure_end(opened, failure, now)]
    assert outcome is not None, "an invocation without an error has an answer"
    output = copy_of(outcome.output)
    steps = list(execution.invocations.build_step_ends(opened, now))
    _set_last_step(opened, steps)
    is_root = running.parent is None
    kind = "ASSISTANT" if is_root else "SUB_AGENT_ASSISTANT"
    output.role, output.invocation_id = message_pb2.ROLE_ASSISTANT, running.invocation_id
    output.author = outcome.author or running.name
    is_new = not outcome.author and not outcome.is_in_transcript
    if is_root or is_new:  # the session must hold the answer to its user, whichever agent wrote it
        output.kind = message_pb2.MessageKind.Value(f"MESSAGE_KIND_{kind}")
        recorded_by = events.RUN_COMPLETED if is_root else events.SUB_AGENT_COMPLETED
        output.message_id = execution.message_id(running.scope, recorded_by, kind)
    if is_new:
        running.transcript.add_message(output)
    end = execution.invocations.build_success_end(opened, output, outcome.end_reason, now, action=outcome.action)
    return [*steps, end]


def _set_last_step(opened: OpenInvocation, steps: list[event_pb2.AgentEvent]) -> None:
    if steps:
        opened.last_step_id = steps[-1].step_id


def close_span(execution: Execution, running: RunningAgent, outcome: Outcome | None, error: RunError | None) -> None:
    """End an invocation's span."""
    traced = execution.spans.pop(running.scope, None)
    if traced is not None:
        traced.end(
            error=error.to_agent_error() if error else None,
            input=[running.input],
            output=[outcome.output] if outcome is not None else None,
        )


async def cancel_remaining(execution: Execution, running: RunningAgent) -> None:
    """Cancel what an agent's code left running when it returned, so that no child outlives its caller."""
    for lane in running.lanes:
        execution.scheduler.cancel(lane)
    if running.lanes:
        await asyncio.wait(running.lanes, timeout=STOP_SECONDS)
    left = [*execution.invocations.children_of(running.invocation_id), *running.open_invocation.effects]
    for key in dict.fromkeys(left):
        await cancel_effect(execution, running, key)


async def cancel_others(execution: Execution, running: RunningAgent, key: str, error: RunError) -> None:
    """Cancel all other effects of an invocation if `error` is the abort that the failure of effect `key` caused."""
    if error is not running.abort:
        return
    lanes = {scope: lane for lane, scope in running.lanes.items() if not keys.covers(scope, key)}
    others = [*lanes, *execution.invocations.children_of(running.invocation_id), *running.open_invocation.effects]
    doomed = [other for other in dict.fromkeys(others) if other != key]
    cancellation = execution.cancellation
    # Close all before awaiting the first: one that fails meanwhile would cancel this coroutine halfway.
    ending = [
        other
        for other in doomed
        if cancellation.request_cancel(
            event_pb2.CancelRequested(effect_scope=other, reason=execution_pb2.CANCEL_REASON_ABORT),
            caller=running.invocation_id,
        )
        or cancellation.is_ending(other)
    ]
    for lane in lanes.values():
        execution.scheduler.cancel(lane)
    abandoned = _build_abandon_error()
    for other in ending:
        await cancellation.end(other, abandoned, abandoned)


async def cancel_effect(execution: Execution, running: RunningAgent, key: str) -> None:
    """Cancel an effect of an invocation that its code no longer waits for."""
    error = _build_abandon_error()
    await execution.cancellation.cancel(
        key, caller=running.invocation_id, reason=execution_pb2.CANCEL_REASON_ABORT, error=error, below=error
    )


def _build_abandon_error() -> error_pb2.AgentError:
    return RunError("Its caller continued without it.", reason=error_pb2.ERROR_REASON_CANCELLED).to_agent_error()


def record_child_start(
    lane: Lane, work: Dispatch, agent: Agent, *, input: message_pb2.Message, digest: str
) -> RunningAgent:
    """Record the start of a child, in one append with the call that dispatched it, and return the child."""
    execution, caller = lane.execution, lane.running
    started = _build_start(lane, work, agent, input)
    started.effect_digest = digest
    traced = _start_span(lane, work, agent, started)
    started.trace_id, started.span_id = traced.trace_id, traced.span_id
    batch: list[event_pb2.AgentEvent] = []
    if work.call is not None:
        batch.append(_build_call_start(lane, work, work.call, traced))
        batch[-1].effect_digest = digest
    if work.transfer is not None:
        batch.append(_build_transfer(caller, work.transfer, started, traced))
    execution.emit(*batch, started)
    call_site = _call_site(lane, work, agent, input)
    record = execution.invocations[started.invocation_id]
    return caller.child(execution, call_site, open_invocation=record, traced=traced)


def _build_start(lane: Lane, work: Dispatch, agent: Agent, input: message_pb2.Message) -> event_pb2.AgentEvent:
    caller = lane.running
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
    elif work.transfer is not None:
        begun.call_id = work.transfer.call_id
    begun.run_path.extend(run_path_below(_path(caller, work), work.agent))
    begun.input.CopyFrom(input)
    begun.revision = _revision(lane, work, agent)
    if work.transfer is not None:
        begun.from_invocation_id = work.transfer.from_invocation_id
    if work.iteration is not None:
        begun.iteration = work.iteration
    return started


def _revision(lane: Lane, work: Dispatch, agent: Agent) -> str:
    """Return the revision that a child started with; a fork may have changed its definition since."""
    recorded = lane.execution.journal.recorded.get((work.key, events.SUB_AGENT_STARTED, 0))
    if recorded is not None:
        return recorded.sub_agent_started.revision
    return agent.revision if agent.definition.WhichOneof("kind") else ""


def _start_span(lane: Lane, work: Dispatch, agent: Agent, started: event_pb2.AgentEvent) -> Traced:
    execution, facts = lane.execution, lane.execution.facts
    traced = execution.tracing.invoke_agent(
        agent=work.agent,
        description=agent.definition.description,
        invocation_id=started.invocation_id,
        run_id=facts.run_id,
        session_id=facts.session_id,
        branch=started.branch,
        depth=started.depth,
        parent=lane.running.traced.below,
        is_over=work.key in execution.journal.ends,
    )
    execution.spans[work.key] = traced
    return traced


def _build_call_start(lane: Lane, work: Dispatch, call: message_pb2.ToolCall, traced: Traced) -> event_pb2.AgentEvent:
    execution, caller = lane.execution, lane.running
    called = caller.open_invocation.set_step(caller.event(work.key, traced=traced), work.step_index)
    called.attempt = 1
    called.tool_started.call.CopyFrom(call)
    # After a crash or in a fork the recorded key is kept: this start is compared with the recorded one.
    earlier = execution.journal.started.get(work.key)
    called.tool_started.idempotency_key = (
        earlier.tool_started.idempotency_key if earlier else ids.derive_id(execution.facts.run_id, work.key)
    )
    return called


def _path(caller: RunningAgent, work: Dispatch) -> tuple[str, ...]:
    return caller.run_path if work.path is None else work.path


def _call_site(lane: Lane, work: Dispatch, agent: Agent, input: message_pb2.Message) -> CallSite:
    caller, transfer = lane.running, work.transfer
    return CallSite(
        agent=agent,
        link=work.link,
        above=lane.transcript,
        state=work.state or lane.lane_state,
        input=input,
        path=_path(caller, work),
        is_transferred=transfer is not None and transfer.by == caller.name,
        comes_back=transfer is not None and transfer.comes_back,
        closing=work.closing,
    )


def _build_transfer(
    caller: RunningAgent, transfer: Transfer, started: event_pb2.AgentEvent, traced: Traced
) -> event_pb2.AgentEvent:
    event = caller.event(started.effect_key, traced=traced)
    transferred = event.agent_transferred
    transferred.from_agent, transferred.to_agent = transfer.by, started.agent
    transferred.call_id, transferred.to_invocation_id = transfer.call_id, started.invocation_id
    return event


def build_result(
    work: Dispatch, caller: RunningAgent, running: RunningAgent, *, outcome: Outcome | None, error: RunError | None
) -> message_pb2.ToolResult:
    """Return the result of the call that dispatched a child; if code dispatched it, its end in the form of a result."""
    result = message_pb2.ToolResult(
        agent=caller.name, invocation_id=caller.invocation_id, child_invocation_id=running.invocation_id
    )
    if work.call is not None:
        result.call.CopyFrom(work.call)
    result.start_time.FromNanoseconds(running.open_invocation.own_start_ns)
    if outcome is not None:
        result.parts.extend(outcome.output.parts)
    if error is not None:
        result.error.CopyFrom(failure_of_child(work.agent, running.invocation_id, error.message))
    return result


def record_child_end(
    execution: Execution,
    caller: RunningAgent,
    running: RunningAgent,
    work: Dispatch,
    *,
    outcome: Outcome | None,
    error: RunError | None,
    result: message_pb2.ToolResult,
) -> None:
    """Record the end of a child, in one append with the end of the call that dispatched it."""
    batch = build_invocation_end(execution, running, outcome, error)
    if work.call is not None:
        result.duration.CopyFrom(to_duration(execution.clock.now_ns() - running.open_invocation.own_start_ns))
        ended = caller.open_invocation.set_step(caller.event(work.key, traced=running.traced), work.step_index)
        ended.attempt = 1
        (ended.tool_failed if error else ended.tool_completed).result.CopyFrom(result)
        batch.append(ended)
    execution.emit(*batch)
    close_span(execution, running, outcome, error)
