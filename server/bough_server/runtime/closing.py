"""What ends everything that is open in a part of a run, leaf first; a fold of what is open, which records nothing."""

from bough.v1 import error_pb2, event_pb2
from bough_server import events
from bough_server.runtime import keys
from bough_server.runtime.invocations import Invocations
from bough_server.runtime.open_invocation import OpenInvocation, duration


def closing(
    invocations: Invocations, scope: str, error: error_pb2.AgentError, below: error_pb2.AgentError, now_ns: int
) -> list[event_pb2.AgentEvent]:
    """The ends of everything that is open in a scope, leaf first; the invocations stay as they are.

    `error` is that of the invocation whose scope it is (the run, for the empty scope), `below` that of everything under
    it.
    """
    made: list[event_pb2.AgentEvent] = []
    left = invocations.copy()
    for opened in left.by_depth():
        for key, started in list(opened.effects.items()):
            if keys.covers(scope, key):
                called, why = opened.called.get(key), error if key == scope else below
                child = called.invocation_id if called is not None else ""
                if called is not None and why.reason != error_pb2.ERROR_REASON_CANCELLED:
                    why = failure_of_child(called.agent, child, why.message)
                made.append(_effect_end(opened, key, started, why, child, now_ns))
                left.observe(made[-1])
        if keys.covers(scope, opened.key):
            mine = error if opened.key == scope else below
            made.extend(left.failing_step(opened, mine, now_ns))
            made.append(left.failed(opened, mine, now_ns))
            left.observe(made[-1])
    return made


def failure_of_child(name: str, invocation_id: str, why: str) -> error_pb2.AgentError:
    """The error of a call whose sub-agent failed, as its caller's model is shown it."""
    return error_pb2.AgentError(
        reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED,
        message=f"The agent {name!r} failed: {why}",
        agent=name,
        invocation_id=invocation_id,
    )


def _effect_end(
    opened: OpenInvocation,
    key: str,
    started: event_pb2.AgentEvent,
    error: error_pb2.AgentError,
    child: str,
    now_ns: int,
) -> event_pb2.AgentEvent:
    speaker = opened.template
    event = opened.event(key, traced=started)
    event.step_id, event.step_index = started.step_id, started.step_index
    event.attempt = opened.attempts.get(key, started.attempt)
    if events.kind_of(started) != events.LLM_STARTED:
        result = event.tool_failed.result
        if started.HasField("tool_started"):
            result.call.CopyFrom(started.tool_started.call)
            result.start_time.CopyFrom(started.time)
            result.latency.CopyFrom(duration(now_ns - started.time.ToNanoseconds()))
        else:
            result.call.CopyFrom(started.input_requested.request.call)
        result.agent, result.invocation_id, result.child_invocation_id = speaker.agent, speaker.invocation_id, child
        failure = result.error
    else:
        failure = event.llm_failed.error
        event.llm_failed.not_sent = key in opened.unsent
        if key in opened.lost:
            event.llm_failed.lost_usage.CopyFrom(opened.lost[key])
    failure.CopyFrom(error)
    if not failure.agent:
        failure.agent, failure.invocation_id = speaker.agent, speaker.invocation_id
    return event
