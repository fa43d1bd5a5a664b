"""Dispatcher, the one way to run an agent: a run's root, a linked agent that a model calls, a child that code calls.

It checks the caller's links and limits, derives ids, opens the span, records the start, runs the agent in its own task,
and records exactly one end, whatever happened.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from bough.v1 import error_pb2, event_pb2, message_pb2, policy_pb2
from bough_server.engine import keys
from bough_server.engine.execution import Execution, to_run_error
from bough_server.engine.limits import check_hops
from bough_server.errors import RunError
from bough_server.log.blobs import data_size
from bough_server.messages import constant_in, text_of
from bough_server.runtime.agent import Agent, Context, Outcome, Resolver, value_of
from bough_server.runtime.child_events import (
    build_invocation_end,
    build_result,
    cancel_remaining,
    close_span,
    outcome_of,
    record_child_end,
    record_child_start,
)
from bough_server.runtime.child_input import build_child_input
from bough_server.runtime.dispatch import (
    Abort,
    Dispatch,
    DispatchResult,
    build_input_message,
    build_timeout_error,
    wait_for_child,
)
from bough_server.runtime.failure_log import bind_invocation
from bough_server.runtime.lane import Lane
from bough_server.runtime.running_agent import RunningAgent
from bough_server.truncation import MAX_TEXT_BYTES, fits


def refusal_event(caller: RunningAgent, work: Dispatch, digest: str, refusal: RunError) -> event_pb2.AgentEvent:
    """Return the event that is the result of a refused dispatch."""
    error = refusal.to_agent_error(agent=caller.name, invocation_id=caller.invocation_id)
    event = caller.event(work.key)
    event.effect_digest = digest
    if work.call is None:
        event.value_recorded.kind = event_pb2.VALUE_KIND_STEP
        event.value_recorded.error.CopyFrom(error)
    else:
        caller.open_invocation.set_step(event, work.step_index)
        result = event.tool_failed.result
        result.agent, result.invocation_id = caller.name, caller.invocation_id
        result.call.CopyFrom(work.call)
        result.error.CopyFrom(error)
    return event


def refusal_of(recorded: event_pb2.AgentEvent) -> DispatchResult:
    """Return the dispatch's result for a refusal, recorded now or read from the log."""
    result = recorded.tool_failed.result
    if recorded.HasField("value_recorded"):
        result = message_pb2.ToolResult(error=recorded.value_recorded.error)
    return DispatchResult(result=result, error=RunError.of(result.error))


OnFailure = Callable[[RunError], Awaitable[None]]


async def dispatch(lane: Lane, work: Dispatch, *, on_failure: OnFailure) -> DispatchResult:
    """Run a child of an invocation to its end. Raises Abort if its failure aborts the caller.

    `on_failure` is awaited with the child's error, or with that Abort, before the child's end is recorded.
    """
    execution, caller = lane.execution, lane.running
    request = work.call.arguments_json if work.call else text_of(work.input) if work.input is not None else ""
    digest = keys.digest("dispatch", work.agent, request)
    # A child that the log shows as started is run again at once, also during a replay: its effects are replayed.
    if work.key in execution.journal.dispatched:
        execution.writer.check(work.key, digest)
    elif (replayed := await lane.replay_result(work.key, digest)) is not None:
        return await _report_refusal(refusal_of(replayed), on_failure)
    else:
        await lane.go_live(work.key)
    try:
        child, message = _admit(lane, work)
    except RunError as refusal:
        event = refusal_event(caller, work, digest, refusal)
        execution.emit(event)
        return await _report_refusal(refusal_of(event), on_failure)
    return await _run_child(lane, work, child, message=message, digest=digest, on_failure=on_failure)


async def _report_refusal(result: DispatchResult, on_failure: OnFailure) -> DispatchResult:
    if result.error is not None:
        await on_failure(result.error)
    return result


def _admit(lane: Lane, work: Dispatch) -> tuple[Agent, message_pb2.Message]:
    execution, caller = lane.execution, lane.running
    is_linked = any(link.agent == work.agent for link in caller.agent.definition.sub_agents)
    if not is_linked and not (work.transfer and work.agent in caller.toolset.targets):
        raise RunError(
            f"The agent {work.agent!r} is not linked to {caller.name!r}.", reason=error_pb2.ERROR_REASON_NOT_LINKED
        )
    message = build_input_message(execution, build_child_input(lane, work), caller)
    is_admitted = work.key in execution.journal.dispatched
    if not is_admitted:
        caller.budget.check_depth(caller.depth + 1)
    if work.call is not None:
        caller.budget.reserve_tool_call(work.key, caller.name, work.call, is_admitted=is_admitted)
    if work.transfer is not None:
        check_hops((*work.transfer.path, work.agent))
        caller.budget.reserve_transfer(is_admitted=is_admitted)
    return caller.resolver.agents[work.agent], message


async def _run_child(
    lane: Lane,
    work: Dispatch,
    agent: Agent,
    *,
    message: message_pb2.Message,
    digest: str,
    on_failure: OnFailure,
) -> DispatchResult:
    execution, caller = lane.execution, lane.running
    running = record_child_start(lane, work, agent, input=message, digest=digest)
    # A message without a kind is its caller's own input, which it sees in the history, unless it sees no history.
    if message.kind or running.history.scope == message_pb2.HISTORY_SCOPE_NONE:
        running.transcript.add_message(message)
    own = lane.child(running)
    task = execution.scheduler.spawn(running.scope, _run_agent(own, message))
    late = build_timeout_error(work.agent)

    async def on_timeout() -> None:
        with suppress(Abort):  # raised below, in the caller's own task
            await _fail(execution, work, caller, late, on_failure=on_failure)

    is_cut = await wait_for_child(execution, running, work, task=task, fail=on_timeout)
    running.state.join()  # if it was cancelled, its own code did not join its lanes
    if is_cut:
        if (abort := _build_abort(execution, work, caller, late)) is not None:
            raise abort
        result = build_result(work, caller, running, outcome=None, error=late)
        return DispatchResult(result=result, path=own.path, error=late, transcript=running.transcript)
    return await _end_child(lane, work, own, task, on_failure=on_failure)


async def _end_child(
    lane: Lane, work: Dispatch, own: Lane, task: asyncio.Task[Outcome], *, on_failure: OnFailure
) -> DispatchResult:
    """Record the end of a child whose code has ended; `own` is its lane, `task` its code."""
    execution, caller, running = lane.execution, lane.running, own.running
    await execution.reach_end(work.key)
    # Checked after each await: a cancellation of this scope from outside records the end, and there must be only one.
    execution.cancellation.raise_if_cancelled(work.key)
    await cancel_remaining(execution, running)
    execution.cancellation.raise_if_cancelled(work.key)
    outcome, error = outcome_of(execution, task, running)
    abort = None
    if error is not None:
        try:
            await _fail(execution, work, caller, error, on_failure=on_failure)
        except Abort as raised:
            abort = raised
    result = build_result(work, caller, running, outcome=outcome, error=error)
    record_child_end(execution, caller, running, work, outcome=outcome, error=error, result=result)
    if abort is not None:
        raise abort
    author = (outcome.author if outcome is not None else "") or running.name
    return DispatchResult(
        result=result, outcome=outcome, author=author, path=own.path, error=error, transcript=running.transcript
    )


async def _fail(
    execution: Execution, work: Dispatch, caller: RunningAgent, error: RunError, *, on_failure: OnFailure
) -> None:
    """Apply the consequences of a child's failure to its siblings and its caller. Raises Abort if it aborts that."""
    abort = _build_abort(execution, work, caller, error)
    if abort is None:
        await on_failure(error)
        return
    caller.abort = abort
    await on_failure(abort)
    raise abort


async def dispatch_root(execution: Execution, resolver: Resolver, context: Callable[[Lane], Context]) -> None:
    """Run the root of a run, whose start is recorded, and record its end; `context` makes the context of a lane."""
    facts = execution.facts
    begun = facts.started.run_started
    agent = resolver.agents[begun.agent]
    if execution.cancellation.is_closed(""):
        return  # cancelled before it started
    traced = execution.spans[""]
    running = RunningAgent.root(execution, resolver, agent, traced)
    running.transcript.add_message(execution.input)
    task = execution.scheduler.spawn("", _run_agent(Lane(execution, running, context), execution.input))
    await execution.scheduler.join(task)
    if not execution.cancellation.is_closed(""):
        await execution.reach_end("")
    if execution.cancellation.is_closed(""):
        return  # the cancellation that closed the run records its end
    await cancel_remaining(execution, running)
    if execution.cancellation.is_closed(""):
        return
    outcome, error = outcome_of(execution, task, running)
    execution.emit(*build_invocation_end(execution, running, outcome, error))
    close_span(execution, running, outcome, error)
    await execution.writer.wait_for_commit()


async def _run_agent(lane: Lane, message: message_pb2.Message) -> Outcome:
    running = lane.running
    bind_invocation(lane.run_id, running)
    with running.traced.attach():
        try:
            outcome = await lane.run_agent(message)
            if isinstance(outcome, Outcome) and data_size(outcome.output.parts):
                outcome = replace(outcome, output=lane.execution.keep_files(outcome.output))
            output_key = running.agent.definition.output_key
            if output_key and isinstance(outcome, Outcome) and fits(outcome.output) and not _is_transfer(outcome):
                lane.state.keep_text(output_key, value_of(outcome.output))
            await lane.settle()
        # asyncio would let them end the event loop, and every run of the server with it.
        except (KeyboardInterrupt, SystemExit) as error:
            raise to_run_error(error) from error
    if not isinstance(outcome, Outcome):
        raise RunError(
            f"The agent {running.name!r} returned {type(outcome).__name__}; it must return an Outcome.",
            reason=error_pb2.ERROR_REASON_INTERNAL,
        )
    if constant := next(filter(None, (constant_in(part.data_json) for part in outcome.output.parts)), ""):
        raise RunError(
            f"The answer of {running.name!r} has {constant} in its JSON, which has no such value. Use null or a text.",
            reason=error_pb2.ERROR_REASON_INVALID_OUTPUT,
        )
    if outcome.action is not None and _is_transfer(outcome):
        _check_peer(running, outcome.action.transfer.agent)
    if not fits(outcome.output):
        raise RunError(
            f"The answer of {running.name!r} is too large: a text may have {MAX_TEXT_BYTES // 1024} KiB. "
            "Return large content as a file.",
            reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        )
    return outcome


def _is_transfer(outcome: Outcome) -> bool:
    """True if the agent transfers to another member of its swarm, which answers instead."""
    return outcome.action is not None and outcome.action.HasField("transfer")


def _check_peer(running: RunningAgent, agent: str) -> None:
    if agent not in running.toolset.peers:
        members = (
            f"There are: {', '.join(sorted(running.toolset.peers))}." if running.toolset.peers else "There are none."
        )
        raise RunError(
            f"The agent {running.name!r} transferred to {agent!r}, which is no other member of its swarm. {members}",
            reason=error_pb2.ERROR_REASON_UNKNOWN_AGENT,
        )


def _build_abort(execution: Execution, work: Dispatch, caller: RunningAgent, error: RunError) -> Abort | None:
    policy = (
        work.link.on_failure
        or caller.agent.definition.on_sub_agent_failure
        or execution.policy_of(work.key).on_sub_agent_failure
    )
    if policy != policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT:
        return None
    return Abort(
        f"The agent {work.agent!r} failed and its failure aborts {caller.name!r}: {error.message}",
        reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED,
        details_json=error.details_json,
    )
