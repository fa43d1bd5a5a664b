"""A child to run, the result of running it, and its timeout."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server import ids
from bough_server.engine.execution import Execution
from bough_server.errors import RunError
from bough_server.history.transcript import Transcript
from bough_server.log import events
from bough_server.models.model import ToolSpec
from bough_server.runtime.agent import Outcome
from bough_server.runtime.running_agent import RunningAgent
from bough_server.runtime.state import LaneState
from bough_server.tools.arguments import parse_arguments
from bough_server.truncation import MAX_TEXT_BYTES, fits


class Abort(RunError):
    """Failure of a sub-agent that aborts its caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The transfer to an agent: by its caller, or by another member of its caller's swarm."""

    by: str
    """The name of the agent that transfers."""
    from_invocation_id: str
    """The invocation that transfers."""
    call_id: str = ""
    """The transferring call; empty if code transfers."""
    path: tuple[str, ...] = ()
    """The agents that transferred to one another before it."""
    comes_back: bool = False
    """True if its caller continues after its end, although it transferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A child to run: `call` and `step_index` if a model called it, `input` if code did.

    Without either it runs with its caller's input.
    """

    key: str
    agent: str
    link: agent_pb2.AgentLink
    call: message_pb2.ToolCall | None = None
    step_index: int = 0
    input: message_pb2.Message | None = None
    trigger: execution_pb2.InvocationTrigger.ValueType = execution_pb2.INVOCATION_TRIGGER_WORKFLOW
    """What makes it run; TOOL if a model called it."""
    path: tuple[str, ...] | None = None
    """The agents that have spoken before it; None for its caller's path."""
    transfer: Transfer | None = None
    """The transfer that it results from, if any."""
    state: LaneState | None = None
    """The session state that it sees; None for that of its caller's lane."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further values for an input builder: `plan`, `step`, `executed_steps`."""
    closing: Sequence[ToolSpec] = ()
    """Tools of which it must call one to end; empty if it may end with any answer."""
    iteration: int | None = None
    """The iteration of its caller, from 0; None if its caller has no loop and no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchResult:
    """How a child ended: its outcome or error, the result of the call that dispatched it, and its transcript."""

    result: message_pb2.ToolResult
    outcome: Outcome | None = None
    author: str = ""
    """The agent that wrote the outcome's output."""
    path: tuple[str, ...] = ()
    """The agents that have spoken up to its end."""
    error: RunError | None = None
    transcript: Transcript | None = None


def build_input_message(execution: Execution, work: Dispatch, caller: RunningAgent) -> message_pb2.Message:
    """Return the input of a child as it is stored in the session. Raises RunError BAD_ARGUMENTS."""
    key_root = execution.facts.key_root
    message = message_pb2.Message()
    if work.input is not None:
        message.CopyFrom(execution.keep_files(work.input))
        if any(part.WhichOneof("content") in ("tool_call", "tool_result") for part in message.parts):
            raise RunError(
                f"The message to {work.agent!r} contains a tool call or a tool result; write it as text.",
                reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
            )
    elif work.call is not None:
        message.parts.add(text=parse_call_text(work.call, caller))
    else:
        # Histories contain it already as the caller's input, so it gets no kind and no place in the session.
        message.role, message.author = caller.input.role, caller.input.author
        message.parts.extend(caller.input.parts)
        message.invocation_id = ids.invocation_id(key_root, work.key)
        return message
    if not fits(message):
        raise RunError(
            f"The message to {work.agent!r} is too large: a text may have {MAX_TEXT_BYTES // 1024} KiB.",
            reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
        )
    message.role, message.kind = message_pb2.ROLE_USER, message_pb2.MESSAGE_KIND_SUB_AGENT_USER
    message.author = work.transfer.by if work.transfer is not None else caller.name
    message.invocation_id = ids.invocation_id(key_root, work.key)
    message.message_id = execution.message_id(work.key, events.SUB_AGENT_STARTED, "SUB_AGENT_USER")
    return message


def parse_call_text(call: message_pb2.ToolCall, caller: RunningAgent) -> str:
    """Return the text of a model's call to a linked agent: its `message`, or all arguments as JSON.

    Raises RunError BAD_ARGUMENTS.
    """
    offer = caller.toolset.offers[call.name]
    arguments = parse_arguments(call.arguments_json, offer.spec.input_schema_json)
    message = arguments.get("message")
    if set(arguments) == {"message"} and isinstance(message, str):
        if not message.strip():
            raise RunError("`message` must not be empty.", reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
        return message
    return call.arguments_json


async def wait_for_child(
    execution: Execution,
    running: RunningAgent,
    work: Dispatch,
    *,
    task: "asyncio.Task[Outcome]",
    fail: Callable[[], Awaitable[None]],
) -> bool:
    """Wait for a child; return True if it was cancelled by its own timeout.

    `fail` applies the consequences of its failure to others, before its end is recorded.
    """
    bounds = [work.link.limits, running.agent.definition.limits]
    seconds = [bound.wall_duration.ToTimedelta().total_seconds() for bound in bounds if bound.HasField("wall_duration")]
    if not seconds:
        await execution.scheduler.join(task)
        return False
    cut = execution.cancellation.timeout_end(work.key)
    timer = None
    # Offline, the log alone says whether it timed out.
    if not execution.writer.is_offline:
        cutting = _time_out_after(
            execution, running, work, seconds=min(seconds), time_out=partial(_time_out, asyncio.current_task(), fail)
        )
        # Within the child's scope, so that whatever ends the child ends its timer.
        timer = execution.scheduler.spawn(f"{work.key}.timer", cutting)
    await execution.scheduler.join(task, cut, first=True)
    # If the child's code had returned when its timeout fired, the log says which of the two came first.
    is_cut = not task.done() or execution.cancellation.is_closed(work.key) or execution.journal.is_timed_out(work.key)
    if is_cut:
        await execution.scheduler.join(cut)
    if timer is not None and not timer.done():
        execution.scheduler.cancel(timer)
    if is_cut and cut.result():
        await fail()
        # The log may end right after the child's end: record what is missing, such as the end of its call.
        execution.cancellation.record_ends(work.key, *_build_timeout_errors(work.agent))
    return is_cut


async def _time_out_after(
    execution: Execution,
    running: RunningAgent,
    work: Dispatch,
    *,
    seconds: float,
    time_out: Callable[[Execution, Dispatch], Awaitable[None]],
) -> None:
    # During a replay the log decides whether the child timed out; only then does the clock.
    await execution.scheduler.await_aside(execution.barrier.lived.wait())
    cancellation = execution.cancellation
    if work.key in execution.journal.ends:
        return  # something else ended it, and will end its caller too
    if not cancellation.is_closed(work.key):
        spent = execution.journal.running_ns(running.open_invocation.start_ns, execution.clock.now_ns()) / 1e9
        await execution.scheduler.await_aside(execution.clock.sleep(max(0.0, seconds - spent)))
    caller = running.parent.invocation_id if running.parent else running.invocation_id
    request = event_pb2.CancelRequested(effect_scope=work.key, reason=execution_pb2.CANCEL_REASON_LIMIT)
    is_requested = cancellation.request_cancel(request, caller=caller)
    if is_requested or cancellation.is_ending(work.key):
        await time_out(execution, work)


async def _time_out(
    waiter: "asyncio.Task[Any] | None", fail: Callable[[], Awaitable[None]], execution: Execution, work: Dispatch
) -> None:
    """End a child whose scope is closed, but not its caller, which continues.

    If several children time out at once and the first one's failure cancels the others, that cancellation records their
    ends: a replay takes the first end by a timeout for the failure that cancelled the others.
    """
    await execution.scheduler.stop(work.key, spared=waiter)
    await execution.writer.wait_for_commit()
    # Its caller may have been cancelled during the commit; that cancellation records the child's end too.
    execution.cancellation.raise_if_cancelled_above(work.key)
    if execution.cancellation.is_cancelled_by_other(work.key):
        return
    await fail()
    execution.cancellation.record_ends(work.key, *_build_timeout_errors(work.agent))
    cut = execution.cancellation.timeout_end(work.key)
    if not cut.done():
        cut.set_result(False)


def build_timeout_error(agent: str) -> RunError:
    """Return the error of a sub-agent that exceeded its wall_duration."""
    return RunError(
        f"The agent {agent!r} took longer than its wall_duration.", reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    )


def _build_timeout_errors(agent: str) -> tuple[error_pb2.AgentError, error_pb2.AgentError]:
    below = RunError("An agent above exceeded its wall_duration.", reason=error_pb2.ERROR_REASON_CANCELLED)
    return build_timeout_error(agent).to_agent_error(), below.to_agent_error()
