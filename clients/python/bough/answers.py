"""Answers to what a run asks, made from plain values; sending them is the client's `resume`."""

import json
from collections.abc import Iterable

from bough.v1 import error_pb2, input_pb2, message_pb2


def approve(
    request: input_pb2.InputRequest | str, *, arguments_json: str = "", note: str = ""
) -> input_pb2.InputAnswer:
    """Lets a call run, with other arguments where they are given as JSON text; the note is for the record."""
    approval = input_pb2.Approval(approved=True, arguments_json=arguments_json, note=note)
    return input_pb2.InputAnswer(request_id=_id_of(request), approval=approval)


def refuse(request: input_pb2.InputRequest | str, *, note: str = "") -> input_pb2.InputAnswer:
    """Keeps a call from running; the model is told so, with the note."""
    approval = input_pb2.Approval(approved=False, note=note)
    return input_pb2.InputAnswer(request_id=_id_of(request), approval=approval)


def tool_result(
    request: input_pb2.InputRequest | str, value: str | Iterable[message_pb2.Part] | error_pb2.AgentError | Exception
) -> input_pb2.InputAnswer:
    """What a tool of the client gave: a text, parts, or an error, of which the model sees the message."""
    result = message_pb2.ToolResult()
    match value:
        case str():
            result.parts.add(text=value)
        case error_pb2.AgentError():
            result.error.CopyFrom(value)
        case Exception():
            message = str(value) or type(value).__name__
            result.error.CopyFrom(error_pb2.AgentError(reason=error_pb2.ERROR_REASON_TOOL_FAILED, message=message))
        case _:
            result.parts.extend(value)
    return input_pb2.InputAnswer(request_id=_id_of(request), tool_result=result)


def reply(request: input_pb2.InputRequest | str, value: object) -> input_pb2.InputAnswer:
    """Answers a question with anything that JSON can write. Raises TypeError or ValueError where it cannot."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return input_pb2.InputAnswer(request_id=_id_of(request), value_json=encoded)


def _id_of(request: input_pb2.InputRequest | str) -> str:
    return request if isinstance(request, str) else request.request_id
