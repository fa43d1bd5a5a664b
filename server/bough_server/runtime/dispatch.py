"""A child to be run, the result of running it, and the timeout of its own that it may have."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server import events, ids
from bough_server.engine.execution import Execution
from bough_server.errors import RunError
from bough_server.history.transcript import Transcript
from bough_server.models.model import ToolSpec
from bough_server.runtime.agent import Outcome
from bough_server.runtime.running_agent import RunningAgent
from bough_server.runtime.state import LaneState
from bough_server.tools.arguments import parse_arguments
from bough_server.truncation import MAX_TEXT_BYTES, fits


class Abort(RunError):
    """A sub-agent failed whose failure fails its caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Who hands over to an agent, and by which call: its caller, or another member of its caller's swarm."""

    by: str
    from_invocation_id: str
    """The invocation that hands over."""
    call_id: str = ""
    """Empty where code does."""
    path: tuple[str, ...] = ()
    """The agents that handed over to one another before it."""
    comes_back: bool = False
    """Whether its caller goes on when it has ended, although it handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A child to be run: `call` and `step_index` where a model called it, `input` where code did.

    Without either it goes on with what its caller was told.
    """

    key: str
    agent: str
    link: agent_pb2.AgentLink
    call: message_pb2.ToolCall | None = None
    step_index: int = 0
    input: message_pb2.Message | None = None
    trigger: execution_pb2.InvocationTrigger.ValueType = execution_pb2.INVOCATION_TRIGGER_WORKFLOW
    """What makes it run; where a model called it that is TOOL."""
    path: tuple[str, ...] | None = None
    """Who has spoken before it; None for its caller's path."""
    handover: Handover | None = None
    """How it came to be handed over to, where it was."""
    state: LaneState | None = None
    """The session's values as it sees them; None for those of its caller's lane."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What its caller knows beside that, for an input builder: `plan`, `step`, `executed_steps`."""
    closing: Sequence[ToolSpec] = ()
    """The tools by one of which it has to end; empty where it ends as it likes."""
    iteration: int | None = None
    """The iteration of its caller, from 0; None if that is no loop and no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchResult:
    """How a child ended: its outcome or its error, the result of the call that made it run, and what it said."""

    result: message_pb2.ToolResult
    outcome: Outcome | None = None
    author: str = ""
    """Who wrote the outcome's output."""
    path: tuple[str, ...] = ()
    """Who has spoken until its end."""
    error: RunError | None = None
    transcript: Transcript | None = None


def child_input(execution: Execution, work: Dispatch, caller: RunningAgent) -> message_pb2.Message:
    """What a child is told, as it is stored in the session. Raises RunError BAD_ARGUMENTS."""
    key_root = execution.facts.key_root
    told = message_pb2.Message()
    if work.input is not None:
        told.CopyFrom(work.input)
        if any(part.WhichOneof("content") in ("tool_call", "tool_result") for part in told.parts):
            raise RunError(
                f"The message to {work.agent!r} has a call or a result, which nobody is told; write it as text.",
                reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
            )
    elif work.call is not None:
        told.parts.add(text=said_by(work.call, caller))
    else:
        # It is in the histories as it was told to the caller: it has no place of its own in the session.
        told.role, told.author = caller.told.role, caller.told.author
        told.parts.extend(caller.told.parts)
        told.invocation_id = ids.invocation_id(key_root, work.key)
        return told
    if not fits(told):
        raise RunError(
            f"The message to {work.agent!r} is too large: a text may have {MAX_TEXT_BYTES // 1024} KiB.",
            reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
        )
    told.role, told.kind = message_pb2.ROLE_USER, message_pb2.MESSAGE_KIND_SUB_AGENT_USER
    told.author = work.handover.by if work.handover is not None else caller.name
    told.invocation_id = ids.invocation_id(key_root, work.key)
    told.message_id = execution.message_id(work.key, events.SUB_AGENT_STARTED, "SUB_AGENT_USER")
    return told


def said_by(call: message_pb2.ToolCall, caller: RunningAgent) -> str:
    """What a model's call tells a linked agent. Raises RunError BAD_ARGUMENTS."""
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
    frame: RunningAgent,
    work: Dispatch,
    task: "asyncio.Task[Outcome]",
    fail: Callable[[], Awaitable[None]],
) -> bool:
    """Waits for a child; gives whether it was cut short because its own time was up.

    `fail` does to others what its failure does, before its end is recorded as with any other failure.
    """
    bounds = [work.link.limits, frame.agent.definition.limits]
    seconds = [bound.wall_duration.ToTimedelta().total_seconds() for bound in bounds if bound.HasField("wall_duration")]
    if not seconds:
        await execution.tasks.join(task)
        return False
    cut = execution.cancelling.cut(work.key)
    timer = None
    if not execution.writer.is_offline:
        cutting = _cut_after(execution, frame, work, min(seconds), partial(_cut, asyncio.current_task(), fail))
        timer = execution.tasks.spawn(f"{work.key}.timer", cutting)
    await execution.tasks.join(task, cut, first=True)
    # Where it had ended when its time was up, the log says which of the two came first.
    is_cut = not task.done() or execution.cancelling.is_sealed(work.key) or execution.journal.is_cut_short(work.key)
    if is_cut:
        await execution.tasks.join(cut)
    if timer is not None and not timer.done():
        execution.tasks.cancel(timer)
    if is_cut and cut.result():
        await fail()
        execution.cancelling.close(work.key, *_cut_errors(work.agent))  # what a lost server did not come to
    return is_cut


async def _cut_after(
    execution: Execution,
    frame: RunningAgent,
    work: Dispatch,
    seconds: float,
    cut: Callable[[Execution, Dispatch], Awaitable[None]],
) -> None:
    await execution.tasks.aside(execution.pump.lived.wait())
    cancelling = execution.cancelling
    if work.key in execution.journal.ends:
        return  # something else ended it, and is to end who waits for it
    if not cancelling.is_sealed(work.key):
        spent = execution.journal.running_ns(frame.record.start_ns, execution.clock.now_ns()) / 1e9
        await execution.tasks.aside(execution.clock.sleep(max(0.0, seconds - spent)))
    caller = frame.parent.invocation_id if frame.parent else frame.invocation_id
    request = event_pb2.CancelRequested(effect_scope=work.key, reason=execution_pb2.CANCEL_REASON_LIMIT)
    is_wished = cancelling.wish(request, caller=caller)
    if is_wished or cancelling.is_ending(work.key):
        await cut(execution, work)


async def _cut(
    waiter: "asyncio.Task[Any] | None", fail: Callable[[], Awaitable[None]], execution: Execution, work: Dispatch
) -> None:
    """Ends a child that is sealed, but not who waits for it and goes on.

    Where several run out of time at once, who ends the others because of the first records their ends: a replay takes
    the first end that says so for the failure that ended the others.
    """
    await execution.tasks.stop(work.key, spared=waiter)
    await execution.writer.committed()
    execution.cancelling.refuse_sealed_above(work.key)  # then whoever ends its caller ends it too
    if execution.cancelling.is_claimed(work.key):
        return
    await fail()
    execution.cancelling.close(work.key, *_cut_errors(work.agent))
    cut = execution.cancelling.cut(work.key)
    if not cut.done():
        cut.set_result(False)


def child_timeout(agent: str) -> RunError:
    """The error of a sub-agent whose own time was up."""
    return RunError(
        f"The agent {agent!r} took longer than its wall_duration.", reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    )


def _cut_errors(agent: str) -> tuple[error_pb2.AgentError, error_pb2.AgentError]:
    below = RunError("The time of an agent above was up.", reason=error_pb2.ERROR_REASON_CANCELLED)
    return child_timeout(agent).to_agent_error(), below.to_agent_error()
