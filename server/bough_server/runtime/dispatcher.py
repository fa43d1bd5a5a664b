"""Dispatcher, the one way to run an agent: a run's root, a linked agent that a model calls, a child that code calls.

It checks the caller's links and limits, derives ids, opens the span, records the start, runs the agent in its own task,
and records exactly one end, whatever happened.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from bough.v1 import error_pb2, eval_set_pb2, event_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.engine import keys
from bough_server.engine.execution import Execution, to_run_error
from bough_server.engine.limits import check_hops
from bough_server.engine.scheduler import STOP_SECONDS
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.log.blobs import data_size
from bough_server.messages import constant_in, text_of
from bough_server.runtime.agent import Context, Outcome, Resolver, value_of
from bough_server.runtime.child_call import (
    ChildCall,
    Dispatch,
    DispatchResult,
    OnFailure,
    build_end_events,
    run_path_below,
)
from bough_server.runtime.child_input import build_child_input
from bough_server.runtime.failure_log import log_failure
from bough_server.runtime.lane import Lane
from bough_server.runtime.running_agent import RunningAgent
from bough_server.runtime.tool_mocks import MockedAgent, find_agent_mock
from bough_server.truncation import MAX_TEXT_BYTES, fits


async def dispatch(lane: Lane, work: Dispatch, *, on_failure: OnFailure) -> DispatchResult:
    """Run a child of an invocation to its end. Raises Abort if its failure aborts the caller.

    `on_failure` is awaited with the child's error, or with that Abort, before the child's end is recorded.
    """
    execution, key = lane.execution, work.key
    request = work.call.arguments_json if work.call else text_of(work.input) if work.input is not None else ""
    digest = keys.digest("dispatch", work.link.agent, request)
    # A child that the log shows as started is run again at once, also during a replay: its effects are replayed.
    if key in execution.journal.dispatched:
        execution.writer.check(key, digest)
    elif (refused := await lane.replay_result(key, digest)) is not None:
        return await _refuse(refused, on_failure)
    else:
        await lane.go_live(key)
    try:
        child = _admit(lane, work, digest, on_failure)
    except RunError as refusal:
        refused = _build_refusal(lane.running, work, digest, refusal)
        execution.emit(*work.beside_start, refused)
        return await _refuse(refused, on_failure)
    return await _run_child(child)


def _build_refusal(caller: RunningAgent, work: Dispatch, digest: str, refusal: RunError) -> event_pb2.AgentEvent:
    error, event = caller.error_of(refusal), caller.event(work.key, work.step_index)
    event.effect_digest = digest
    if work.call is None:
        event.value_recorded.kind = event_pb2.VALUE_KIND_STEP
        event.value_recorded.error.CopyFrom(error)
    else:
        result = event.tool_failed.result
        result.agent, result.invocation_id = caller.name, caller.invocation_id
        result.call.CopyFrom(work.call)
        result.error.CopyFrom(error)
    return event


async def _refuse(refused: event_pb2.AgentEvent, on_failure: OnFailure) -> DispatchResult:
    """Return the result of a refused dispatch, whose event was recorded now or read from the log."""
    result = refused.tool_failed.result
    if refused.HasField("value_recorded"):
        result = message_pb2.ToolResult(error=refused.value_recorded.error)
    error = RunError.of(result.error)
    await on_failure(error)
    return DispatchResult(result=result, error=error)


def _admit(lane: Lane, work: Dispatch, digest: str, on_failure: OnFailure) -> ChildCall:
    """Check a dispatch against the caller's links and limits. Raises RunError to refuse it."""
    execution, caller, name = lane.execution, lane.running, work.link.agent
    is_linked = any(link.agent == name for link in caller.agent.definition.sub_agents)
    if not is_linked and not (work.transfer and name in caller.toolset.targets):
        raise RunError(
            f"The agent {name!r} is not linked to {caller.name!r}.", reason=error_pb2.ERROR_REASON_NOT_LINKED
        )
    message = build_child_input(lane, work)
    # One that the log shows as started holds its part of the limits: it is not checked against that.
    is_admitted = work.key in execution.journal.dispatched
    if not is_admitted:
        caller.budget.check_depth(caller.depth + 1, (*caller.run_path, name))
    if work.call is not None:
        caller.budget.reserve_tool_call(work.key, caller.name, work.call, is_admitted=is_admitted)
    if work.transfer is not None:
        check_hops((*work.transfer.path, name))
        caller.budget.reserve_transfer(is_admitted=is_admitted)
    agent, (mock_index, mock) = caller.resolver.agents[name], _find_mock(lane, work, message)
    if mock is not None:
        agent = MockedAgent(agent, mock)
    limits = [each for each in (work.link.limits, agent.definition.limits) if each.HasField("wall_duration")]
    policy = (
        work.link.on_failure
        or caller.agent.definition.on_sub_agent_failure
        or execution.policy_of(work.key).on_sub_agent_failure
    )
    return ChildCall(
        lane=lane,
        work=work,
        agent=agent,
        message=message,
        digest=digest,
        # Lanes of composite agents collect who has spoken; calls of one step run at once, and see none of each other.
        path=run_path_below(lane.path if work.call is None else caller.run_path, name),
        timeout=min((each.wall_duration.ToTimedelta().total_seconds() for each in limits), default=None),
        mock_index=mock_index,
        aborts_caller=policy == policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT,
        on_failure=on_failure,
    )


def _find_mock(
    lane: Lane, work: Dispatch, message: message_pb2.Message
) -> tuple[int | None, eval_set_pb2.AgentMock | None]:
    """Return the mock that answers instead of a child, with its number, or None. Raises RunError TOOL_NOT_MOCKED."""
    execution, journal = lane.execution, lane.execution.journal
    mocks, recorded = execution.mocks, journal.recorded.get((work.key, events.SUB_AGENT_STARTED, 0))
    if mocks is None:
        return None, None
    if recorded is None:
        caller, uses = lane.running.name, journal.agent_mock_uses
        index = find_agent_mock(mocks, work.link.agent, message, caller=caller, uses=uses)
    else:
        # A child continues as it began, in a fork with other mocks too: its start is shared, and so may its end be.
        mocks = journal.forks.mocks(execution.facts.started.run_started, at_sequence=recorded.sequence)
        index = recorded.sub_agent_started.mock_index if recorded.sub_agent_started.HasField("mock_index") else None
    return index, (mocks.agents[index] if mocks is not None and index is not None else None)


async def _run_child(child: ChildCall) -> DispatchResult:
    execution, running = child.lane.execution, child.start()
    # A message without a kind is its caller's own input, which it sees in the history, unless it sees no history.
    if child.message.kind or running.history.scope == message_pb2.HISTORY_SCOPE_NONE:
        running.transcript.add_message(child.message)
    own = child.lane.child(running)
    task = execution.scheduler.spawn(running.scope, _run_agent(own, child.message))
    is_timed_out = await _wait(child, running, task)
    running.state.join()  # if it was cancelled, its own code did not join its lanes
    if not is_timed_out:
        return await _end(child, own, task)
    late = _build_timeout_error(child)
    if (abort := child.build_abort(late)) is not None:
        raise abort
    result = child.build_result(running, error=late)
    return DispatchResult(result=result, path=own.path, error=late, transcript=running.transcript)


async def _end(child: ChildCall, own: Lane, task: asyncio.Task[Outcome]) -> DispatchResult:
    """Record the end of a child whose code has ended; `own` is its lane, `task` its code."""
    execution, running = own.execution, own.running
    await execution.reach_end(running.scope)
    # Checked after each await: a cancellation of this scope from outside records the end, and there must be only one.
    execution.cancellation.raise_if_cancelled(running.scope)
    await _cancel_remaining(execution, running)
    execution.cancellation.raise_if_cancelled(running.scope)
    outcome, error = _outcome_of(execution, task, running)
    abort = await child.fail(error) if error is not None else None
    result = child.build_result(running, outcome=outcome, error=error)
    author = (outcome.author if outcome is not None else "") or running.name
    ended = DispatchResult(
        result=result, outcome=outcome, author=author, path=own.path, error=error, transcript=running.transcript
    )
    batch = child.build_end(running, result, outcome, error)
    if child.work.beside_end is not None:
        batch += child.work.beside_end(ended, abort)
    execution.emit(*batch)
    _close_span(execution, running, outcome, error)
    if abort is not None:
        raise abort
    return ended


async def _wait(child: ChildCall, running: RunningAgent, task: asyncio.Task[Outcome]) -> bool:
    """Wait for a child; return True if it was cancelled by its own timeout."""
    execution, key = child.lane.execution, child.work.key
    if child.timeout is None:
        await execution.scheduler.join(task)
        return False
    cut = execution.cancellation.timeout_end(key)
    timer = None
    # Offline, the log alone says whether it timed out.
    if not execution.writer.is_offline:
        # Within the child's scope, so that whatever ends the child ends its timer.
        timer = execution.scheduler.spawn(
            f"{key}.timer", _time_out(child, running, child.timeout, waiter=asyncio.current_task())
        )
    await execution.scheduler.join(task, cut, first=True)
    # If the child's code had returned when its timeout fired, the log says which of the two came first.
    is_cut = not task.done() or execution.cancellation.is_closed(key) or execution.journal.is_timed_out(key)
    if is_cut:
        await execution.scheduler.join(cut)
    if timer is not None and not timer.done():
        execution.scheduler.cancel(timer)
    if is_cut and cut.result():
        # The log may end right after the child's end: record what is missing, such as the end of its call.
        await _end_late(child)
    return is_cut


async def _time_out(
    child: ChildCall, running: RunningAgent, seconds: float, *, waiter: "asyncio.Task[Any] | None"
) -> None:
    """End a child when its time is over, but not its caller, which continues, nor the task that waits for it.

    If several children time out at once and the first one's failure cancels the others, that cancellation records their
    ends: a replay takes the first end by a timeout for the failure that cancelled the others.
    """
    execution, key, cancellation = child.lane.execution, child.work.key, child.lane.execution.cancellation
    # During a replay the log decides whether the child timed out; only then does the clock.
    await execution.scheduler.await_aside(execution.barrier.lived.wait())
    if key in execution.journal.ends:
        return  # something else ended it, and will end its caller too
    if not cancellation.is_closed(key):
        spent = execution.journal.running_ns(running.open_invocation.start_ns, execution.clock.now_ns()) / 1e9
        await execution.scheduler.await_aside(execution.clock.sleep(max(0.0, seconds - spent)))
    request = event_pb2.CancelRequested(effect_scope=key, reason=execution_pb2.CANCEL_REASON_LIMIT)
    is_requested = cancellation.request_cancel(request, caller=child.lane.running.invocation_id)
    if not is_requested and not cancellation.is_ending(key):
        return
    await execution.scheduler.stop(key, spared=waiter)
    await execution.writer.wait_for_commit()
    # Its caller may have been cancelled during the commit; that cancellation records the child's end too.
    cancellation.raise_if_cancelled_above(key)
    if cancellation.is_cancelled_by_other(key):
        return
    await _end_late(child)
    if not cancellation.timeout_end(key).done():
        cancellation.timeout_end(key).set_result(False)


async def _end_late(child: ChildCall) -> None:
    """Apply the failure of a child that has timed out, and record the ends of all that is open in it."""
    late = _build_timeout_error(child)
    await child.fail(late)  # an Abort is raised in the caller's own task
    below = RunError("An agent above exceeded its wall_duration.", reason=error_pb2.ERROR_REASON_CANCELLED)
    child.lane.execution.cancellation.record_ends(child.work.key, late.to_agent_error(), below.to_agent_error())


def _build_timeout_error(child: ChildCall) -> RunError:
    return RunError(
        f"The agent {child.work.link.agent!r} took longer than its wall_duration.",
        reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
    )


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
    await _cancel_remaining(execution, running)
    if execution.cancellation.is_closed(""):
        return
    outcome, error = _outcome_of(execution, task, running)
    execution.emit(*build_end_events(execution, running, outcome, error))
    _close_span(execution, running, outcome, error)
    await execution.writer.wait_for_commit()


async def _run_agent(lane: Lane, message: message_pb2.Message) -> Outcome:
    running = lane.running
    # On every line that this task, and each that it starts, will log.
    structlog.contextvars.bind_contextvars(
        run_id=lane.execution.facts.run_id, agent=running.name, invocation_id=running.invocation_id
    )
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


def _outcome_of(
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


def _close_span(execution: Execution, running: RunningAgent, outcome: Outcome | None, error: RunError | None) -> None:
    """End an invocation's span."""
    traced = execution.spans.pop(running.scope, None)
    if traced is not None:
        traced.end(
            error=error.to_agent_error() if error else None,
            input=[running.input],
            output=[outcome.output] if outcome is not None else None,
        )


async def _cancel_remaining(execution: Execution, running: RunningAgent) -> None:
    """Cancel what an agent's code left running when it returned, so that no child outlives its caller."""
    for lane in running.lanes:
        execution.scheduler.cancel(lane)
    if running.lanes:
        await asyncio.wait(running.lanes, timeout=STOP_SECONDS)
    left = [*execution.invocations.children_of(running.invocation_id), *running.open_invocation.effects]
    # What is in an open visit of a graph's node, or in an item of one, ends with it.
    for key in dict.fromkeys(
        key for key in left if not any(key != other and keys.covers(other, key) for other in left)
    ):
        await cancel_effect(execution, running, key)


async def cancel_others(execution: Execution, running: RunningAgent, key: str, error: RunError) -> None:
    """Cancel all other effects of an invocation if `error` is the abort that the failure of effect `key` caused."""
    if error is not running.abort:
        return
    lanes = {scope: lane for lane, scope in running.lanes.items() if not keys.covers(scope, key)}
    others = [*lanes, *execution.invocations.children_of(running.invocation_id), *running.open_invocation.effects]
    doomed = [other for other in dict.fromkeys(others) if not keys.covers(other, key)]
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
