"""The one way to run an agent: the root of a run, a linked agent that a model calls, a child that code dispatches.

It resolves against the caller's linked list, checks limits, derives ids, opens the span, records the start, runs the
agent in a task of its own, and records exactly one end, whatever happened.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from google.protobuf import duration_pb2

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2, policy_pb2
from bough_server import ids
from bough_server.cutting import MAX_TEXT_BYTES, fits
from bough_server.errors import RunError
from bough_server.runtime import keys
from bough_server.runtime.agent import Agent, Outcome
from bough_server.runtime.closing import failure_of_child
from bough_server.runtime.dispatches import Abort, Dispatch, Ended, joined, overtime, told_to
from bough_server.runtime.ends import close_span, end_leftovers, finish, outcome_of
from bough_server.runtime.execution import Execution, as_run_error
from bough_server.runtime.frame import Frame, Place, branch_below, child_frame, root_frame, run_path_below
from bough_server.runtime.handoffs import check_hops
from bough_server.runtime.refusals import refusal_event, refusal_of
from bough_server.telemetry import Traced

if TYPE_CHECKING:
    from bough_server.runtime.context import Context


OnFailure = Callable[[RunError], Awaitable[None]]


async def dispatch(ctx: "Context", work: Dispatch, *, on_failure: OnFailure) -> Ended:
    """Runs a child of an invocation to its end. Raises Abort where its failure fails the caller.

    `on_failure` is awaited with what a child failed with, or with that Abort, before the child's end is recorded.
    """
    execution, caller = ctx.execution, ctx.frame
    asked = work.call.arguments_json if work.call else _text_of(work.input)
    digest = keys.digest("dispatch", work.agent, asked)
    execution.check(work.key, digest)
    if work.key in execution.journal.results and work.key not in execution.journal.dispatched:
        recorded = await execution.pump.result(work.key)
        execution.observe_recorded(work.key)
        return await _refused(refusal_of(recorded), on_failure)
    if work.key not in execution.journal.dispatched:
        await ctx.until_live(work.key)
        execution.cancelling.refuse_sealed(work.key)
    try:
        child, told = _admit(execution, caller, work)
    except RunError as refusal:
        event = refusal_event(caller, work, digest, refusal)
        execution.emit(event)
        return await _refused(refusal_of(event), on_failure)
    return await _run(ctx, work, child, told, digest, on_failure)


async def _refused(ended: Ended, on_failure: OnFailure) -> Ended:
    if ended.error is not None:
        await on_failure(ended.error)
    return ended


def _admit(execution: Execution, caller: Frame, work: Dispatch) -> tuple[Agent, message_pb2.Message]:
    is_linked = any(link.agent == work.agent for link in caller.agent.definition.sub_agents)
    if not is_linked and not (work.transfer_id and work.agent in caller.toolset.targets):
        raise RunError(
            f"The agent {work.agent!r} is not linked to {caller.name!r}.", reason=error_pb2.ERROR_REASON_NOT_LINKED
        )
    told = told_to(work, caller, execution.facts.key_root)
    caller.budget.check_depth(caller.depth + 1)
    if work.call is not None:
        caller.budget.reserve_tool_call()
    if work.transfer_id:
        if not work.comes_back:
            check_hops((*caller.hops, work.agent))
        caller.budget.reserve_handoff()
    return execution.resolver.agent(work.agent), told


async def _run(
    ctx: "Context",
    work: Dispatch,
    agent: Agent,
    told: message_pb2.Message,
    digest: str,
    on_failure: OnFailure,
) -> Ended:
    execution, caller = ctx.execution, ctx.frame
    frame = _start(ctx, work, agent, told, digest)
    if told.kind or frame.history == agent_pb2.HISTORY_SCOPE_NONE:
        frame.transcript.say(told)
    task = _spawn(execution, frame, told)
    cut = await joined(execution, frame, work, task)
    if cut:
        late = overtime(work.agent)
        await _fail(work, caller, late, on_failure)
        result = _result(work, caller, frame, None, late)
        return Ended(result=result, path=frame.run_path, error=late, transcript=frame.transcript)
    await execution.reach_end(work.key)
    execution.cancelling.refuse_sealed(work.key)
    await end_leftovers(execution, frame)
    execution.cancelling.refuse_sealed(work.key)
    outcome, error = outcome_of(task, frame)
    abort: Abort | None = None
    if error is not None:
        try:
            await _fail(work, caller, error, on_failure)
        except Abort as raised:
            abort = raised
    result = _result(work, caller, frame, outcome, error)
    _end(execution, caller, frame, work, outcome, error, result)
    if abort is not None:
        raise abort
    author = (outcome.author if outcome is not None else "") or frame.name
    return Ended(
        result=result, outcome=outcome, author=author, path=frame.run_path, error=error, transcript=frame.transcript
    )


async def _fail(work: Dispatch, caller: Frame, error: RunError, on_failure: OnFailure) -> None:
    """Does what a child's failure does to others. Raises Abort where it fails the caller."""
    abort = _abort_of(work, caller, error)
    if abort is None:
        await on_failure(error)
        return
    caller.abort = abort
    await on_failure(abort)
    raise abort


def _start(ctx: "Context", work: Dispatch, agent: Agent, told: message_pb2.Message, digest: str) -> Frame:
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
    begun.call_id = work.call.call_id if work.call is not None else work.transfer_id
    path = caller.run_path if work.path is None else work.path
    begun.run_path.extend(run_path_below(path, work.agent))
    begun.input.CopyFrom(told)
    if work.transfer_id:
        batch.append(_transferred(caller, work, child_id, traced))
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
            told=told,
            path=path,
            is_handed_over=bool(work.transfer_id),
            comes_back=work.comes_back,
        ),
        opened=execution.invocations[child_id],
        traced=traced,
    )


def _transferred(caller: Frame, work: Dispatch, child_id: str, traced: Traced) -> event_pb2.AgentEvent:
    event = caller.event(work.key, traced=traced)
    moved = event.agent_transferred
    moved.from_agent, moved.to_agent = caller.name, work.agent
    moved.call_id, moved.to_invocation_id = work.transfer_id, child_id
    return event


async def dispatch_root(execution: Execution) -> None:
    """Runs the root of a run, whose start is recorded, and records its end."""
    facts = execution.facts
    begun = facts.started.run_started
    agent = execution.resolver.agent(begun.agent)
    if execution.cancelling.is_sealed(""):
        return  # it was ended before it began
    traced = execution.spans[""]
    frame = root_frame(execution, agent, traced)
    frame.transcript.say(execution.told)
    task = execution.tasks.spawn("", _body(execution, frame, execution.told))
    await execution.tasks.join(task)
    if not execution.cancelling.is_sealed(""):
        await execution.reach_end("")
    if execution.cancelling.is_sealed(""):
        return  # whoever sealed the run records its end
    await end_leftovers(execution, frame)
    if execution.cancelling.is_sealed(""):
        return
    outcome, error = outcome_of(task, frame)
    execution.emit(*finish(execution, frame, outcome, error))
    close_span(execution, frame, outcome, error)
    await execution.committed()


def _spawn(execution: Execution, frame: Frame, told: message_pb2.Message) -> "asyncio.Task[Outcome]":
    task = execution.tasks.spawn(frame.scope, _body(execution, frame, told))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who reads it may be ended before
    return task


async def _body(execution: Execution, frame: Frame, told: message_pb2.Message) -> Outcome:
    from bough_server.runtime.context import Context

    ctx = Context(execution, frame)
    with frame.traced.attached():
        try:
            outcome = await frame.agent.run(ctx, told)
            await ctx.settle()
        except SystemExit as error:  # it would end the server's event loop, and every run with it
            raise as_run_error(error) from error
        finally:
            frame.run_path = ctx.path
    if not isinstance(outcome, Outcome):
        raise RunError(
            f"The agent {frame.name!r} gave back {type(outcome).__name__}; it must give an Outcome.",
            reason=error_pb2.ERROR_REASON_INTERNAL,
        )
    if not fits(outcome.output):
        raise RunError(
            f"The answer of {frame.name!r} is too large: a text may have {MAX_TEXT_BYTES // 1024} KiB. "
            "Give large content by reference (a blob's uri).",
            reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        )
    return outcome


def _abort_of(work: Dispatch, caller: Frame, error: RunError) -> Abort | None:
    policy = work.link.on_failure or caller.on_failure
    if policy != policy_pb2.ON_SUB_AGENT_FAILURE_ABORT:
        return None
    return Abort(
        f"The agent {work.agent!r} failed and its failure aborts {caller.name!r}: {error.message}",
        reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED,
        details_json=error.details_json,
    )


def _result(
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


def _end(
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


def _text_of(message: message_pb2.Message | None) -> str:
    return "".join(part.text or part.data_json for part in message.parts) if message is not None else ""
