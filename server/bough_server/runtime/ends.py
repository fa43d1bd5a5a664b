"""How an invocation ends: its outcome or its error, its open steps, its own end; who waits for it is not here."""

import asyncio

from bough.v1 import error_pb2, event_pb2, message_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.execution import Execution, as_run_error
from bough_server.engine.open_invocations import OpenInvocation
from bough_server.engine.scheduler import STOP_SECONDS
from bough_server.errors import RunError
from bough_server.runtime.agent import Outcome
from bough_server.runtime.frame import Frame


def outcome_of(task: "asyncio.Task[Outcome]", frame: Frame) -> tuple[Outcome | None, RunError | None]:
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
    execution: Execution, frame: Frame, outcome: Outcome | None, error: RunError | None
) -> list[event_pb2.AgentEvent]:
    """What ends an invocation: its open steps, then itself. Its answer is said and given its place in the session."""
    now, opened = execution.clock.now_ns(), frame.opened
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
        output.message_id = ids.message_id(execution.facts.key_root, frame.scope, kind)
    if is_new:
        frame.transcript.say(output)
    end = execution.invocations.succeeded(opened, output, outcome.end_reason, now, action=outcome.action)
    return [*steps, end]


def _last_step(opened: OpenInvocation, steps: list[event_pb2.AgentEvent]) -> None:
    if steps:
        opened.last_step_id = steps[-1].step_id


def close_span(execution: Execution, frame: Frame, outcome: Outcome | None, error: RunError | None) -> None:
    """Ends an invocation's span."""
    traced = execution.spans.pop(frame.scope, None)
    if traced is not None:
        traced.end(
            error=error.to_agent_error() if error else None,
            input=[frame.told],
            output=[outcome.output] if outcome is not None else None,
        )


async def end_leftovers(execution: Execution, frame: Frame) -> None:
    """Ends what an agent's code left running when it ended itself, so that no child outlives its caller."""
    for lane in frame.lanes:
        execution.tasks.cancel(lane)
    if frame.lanes:
        await asyncio.wait(frame.lanes, timeout=STOP_SECONDS)
    left = [*execution.invocations.children_of(frame.invocation_id), *frame.opened.effects]
    for key in dict.fromkeys(left):
        await end_effect(execution, frame, key)


async def end_others(execution: Execution, frame: Frame, key: str, error: RunError) -> None:
    """Ends everything of an invocation but one effect, where it is that one's failure that aborts it."""
    if error is not frame.abort:
        return
    lanes = {scope: lane for lane, scope in frame.lanes.items() if not keys.covers(scope, key)}
    others = [*lanes, *execution.invocations.children_of(frame.invocation_id), *frame.opened.effects]
    doomed = [other for other in dict.fromkeys(others) if other != key]
    cancelling = execution.cancelling
    # All are sealed before the first is waited for: one that fails meanwhile would end this one halfway.
    ending = [
        other
        for other in doomed
        if cancelling.wish(other, caller=frame.invocation_id, reason=event_pb2.CANCEL_REASON_ABORT)
        or cancelling.is_ending(other)
    ]
    for lane in lanes.values():
        execution.tasks.cancel(lane)
    left = _left_behind()
    for other in ending:
        await cancelling.end(other, left, left)


async def end_effect(execution: Execution, frame: Frame, key: str) -> None:
    """Ends an effect of an invocation that its code no longer waits for."""
    error = _left_behind()
    await execution.cancelling.cancel(
        key, caller=frame.invocation_id, reason=event_pb2.CANCEL_REASON_ABORT, error=error, below=error
    )


def _left_behind() -> error_pb2.AgentError:
    return RunError("Its caller went on without it.", reason=error_pb2.ERROR_REASON_CANCELLED).to_agent_error()
