"""Build answers to input requests from plain values, for the client's `resume`."""

from collections.abc import Iterable

from bough.arguments import build, wrong_type
from bough.messages import json_text
from bough.v1 import input_pb2, message_pb2


def approve(
    request: input_pb2.InputRequest | str, *, arguments_json: str = "", note: str = ""
) -> input_pb2.InputAnswer:
    """Approve a tool call. `arguments_json`, if not empty, replaces its arguments; the note is for the record."""
    approval = build(input_pb2.ApprovalDecision, approved=True, arguments_json=arguments_json, note=note)
    return input_pb2.InputAnswer(input_id=_id_of(request), approval=approval)


def refuse(request: input_pb2.InputRequest | str, *, note: str = "") -> input_pb2.InputAnswer:
    """Refuse a tool call. The model sees the refusal and the note."""
    approval = build(input_pb2.ApprovalDecision, approved=False, note=note)
    return input_pb2.InputAnswer(input_id=_id_of(request), approval=approval)


def tool_outcome(
    request: input_pb2.InputRequest | str,
    value: str | Iterable[message_pb2.Part] | message_pb2.ToolFailure | Exception,
    *,
    failure: message_pb2.ToolFailure | Exception | None = None,
) -> input_pb2.InputAnswer:
    """Answer with the outcome of a tool that the client ran: a text, parts, or a failure.

    The model sees the message of a failure. `failure` is for a tool that failed and returned content as well.
    """
    outcome = message_pb2.ToolOutcome()
    match value:
        case message_pb2.ToolFailure() | Exception():
            failure = value
        case str():
            outcome.parts.add(text=value)
        case _:
            outcome.parts.extend(value)
    if failure is not None:
        outcome.failure.CopyFrom(_failure(failure))
    return input_pb2.InputAnswer(input_id=_id_of(request), tool_outcome=outcome)


def _failure(error: message_pb2.ToolFailure | Exception) -> message_pb2.ToolFailure:
    if isinstance(error, message_pb2.ToolFailure):
        return error
    return message_pb2.ToolFailure(message=str(error) or type(error).__name__)


def reply(request: input_pb2.InputRequest | str, value: object) -> input_pb2.InputAnswer:
    """Answer a question with a JSON value. Raises TypeError or ValueError if JSON cannot represent it."""
    return input_pb2.InputAnswer(input_id=_id_of(request), value_json=json_text(value))


def _id_of(request: input_pb2.InputRequest | str) -> str:
    if isinstance(request, str):
        return request
    if not isinstance(request, input_pb2.InputRequest):
        raise wrong_type("request", "an InputRequest or its input_id", request)
    return request.input_id
