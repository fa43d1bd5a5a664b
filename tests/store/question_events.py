"""What runs ask, as events to put into a store."""

from bough.v1 import event_pb2, input_pb2, message_pb2
from bough_server import ids
from tests.store.logs import SECOND, START_NS, Made


def request(name: str, run: Made, *, call_id: str = "", scope: str = "", expires: int = 0) -> input_pb2.InputRequest:
    """A request of the root, or of the invocation of a scope; it expires so many seconds after the start."""
    asker = ids.invocation_id(run.run_id, scope)
    made = input_pb2.InputRequest(input_id=name, invocation_id=asker, call_id=call_id, prompt="May I?")
    if expires:
        made.expire_time.FromNanoseconds(START_NS + expires * SECOND)
    return made


def asked(asks: input_pb2.InputRequest) -> event_pb2.AgentEvent:
    """Its first event."""
    requested = event_pb2.InputRequested(request=asks)
    return event_pb2.AgentEvent(invocation_id=asks.invocation_id, input_requested=requested)


def answered(name: str) -> event_pb2.AgentEvent:
    """An answer to a request."""
    return event_pb2.AgentEvent(input_received=event_pb2.InputReceived(answer=input_pb2.InputAnswer(input_id=name)))


def interrupted(*requests: input_pb2.InputRequest) -> event_pb2.AgentEvent:
    """The run waits for these."""
    return event_pb2.AgentEvent(run_interrupted=event_pb2.RunInterrupted(requests=requests))


def tool_ended(call_id: str, *, failed: bool = False) -> event_pb2.AgentEvent:
    """The end of a call."""
    result = message_pb2.ToolResult(call=message_pb2.ToolCall(call_id=call_id))
    if failed:
        return event_pb2.AgentEvent(tool_failed=event_pb2.ToolFailed(result=result))
    return event_pb2.AgentEvent(tool_completed=event_pb2.ToolCompleted(result=result))
