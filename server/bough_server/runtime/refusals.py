"""Children that are never begun, and tools that are not begun again: how a refusal reads; whom to refuse is others'.

Of a model's call a refusal is a failed result, of code's a value that is an error.
"""

from bough.v1 import error_pb2, event_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.runtime.dispatches import Dispatch, Ended
from bough_server.runtime.frame import Frame


def refusal_event(caller: Frame, work: Dispatch, digest: str, refusal: RunError) -> event_pb2.AgentEvent:
    """The event that is the result of a refused dispatch."""
    error = refusal.to_agent_error(agent=caller.name, invocation_id=caller.invocation_id)
    event = caller.event(work.key)
    event.effect_digest = digest
    if work.call is None:
        event.value_recorded.kind = event_pb2.VALUE_KIND_STEP
        event.value_recorded.error.CopyFrom(error)
    else:
        caller.opened.in_step(event, work.step_index)
        result = event.tool_failed.result
        result.agent, result.invocation_id = caller.name, caller.invocation_id
        result.call.CopyFrom(work.call)
        result.error.CopyFrom(error)
    return event


def refusal_of(recorded: event_pb2.AgentEvent) -> Ended:
    """What the caller gets of a refusal, recorded now or before."""
    result = recorded.tool_failed.result
    if recorded.HasField("value_recorded"):
        result = message_pb2.ToolResult(error=recorded.value_recorded.error)
    return Ended(result=result, error=RunError.of(result.error))


def lost(name: str) -> RunError:
    """The refusal to run a tool again that was running when its server was lost."""
    return RunError(
        f"The server was lost while the tool {name!r} ran, and it must not simply be run again: nobody knows whether "
        "it did its work.",
        reason=error_pb2.ERROR_REASON_TOOL_FAILED,
    )
