"""Answers as they are typed, in the words of the schema; whether one is accepted is the server's to say."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

from pydantic import JsonValue

from bough.v1 import error_pb2, input_pb2, message_pb2
from bough_server.cli.render.questions import headline, takes_text
from bough_server.errors import ConfigurationError

_SHORTEST: Final = 6
_APPROVAL_KEYS: Final = frozenset({"approved", "arguments", "note"})


def answers_of(texts: Iterable[str], requests: Sequence[input_pb2.InputRequest]) -> list[input_pb2.InputAnswer]:
    """The answers of `--answer REQUEST_ID=JSON`, each to another request of these.

    Raises ConfigurationError for one that cannot be read, fits no request, or answers what another one answered.
    """
    answers: dict[str, input_pb2.InputAnswer] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--answer {text!r} has no value: write REQUEST_ID=JSON.")
        request = request_named(name.strip(), requests)
        if request.request_id in answers:
            raise ConfigurationError(f"Request {request.request_id} has two answers: give it one.")
        answers[request.request_id] = answer_of(request, value)
    return list(answers.values())


def request_named(name: str, requests: Sequence[input_pb2.InputRequest]) -> input_pb2.InputRequest:
    """The request of a full id, or of a beginning or an end that only it has. Raises ConfigurationError."""
    name = name.lower()
    found = [request for request in requests if request.request_id == name]
    if not found and len(name) < _SHORTEST:
        raise ConfigurationError(f"{name!r} is too short for a request: use its id, or 6 characters of either end.")
    found = found or [each for each in requests if each.request_id.startswith(name) or each.request_id.endswith(name)]
    if not found:
        known = ", ".join(request.request_id for request in requests) or "none"
        raise ConfigurationError(f"No request of the run is {name!r}; it asked {known}.")
    if len(found) > 1:
        both = " and ".join(request.request_id for request in found[:2])
        raise ConfigurationError(f"{len(found)} requests are {name!r}, such as {both}: say more.")
    return found[0]


def answer_of(request: input_pb2.InputRequest, text: str) -> input_pb2.InputAnswer:
    """The answer that a JSON text is to a request. Raises ConfigurationError where it cannot be one."""
    value = json_of(text, what=f"The answer to {request.request_id}")
    answer = input_pb2.InputAnswer(request_id=request.request_id)
    match request.reason:
        case input_pb2.INPUT_REASON_APPROVAL:
            answer.approval.CopyFrom(_approval(request, value))
        case input_pb2.INPUT_REASON_CLIENT_TOOL:
            answer.tool_result.CopyFrom(result_of(text))
        case input_pb2.INPUT_REASON_RECOVERY if isinstance(value, dict) and value.keys() in ({"result"}, {"error"}):
            given = text if "error" in value else json.dumps(value.get("result"), ensure_ascii=False)
            answer.tool_result.CopyFrom(result_of(given))
        case input_pb2.INPUT_REASON_RECOVERY:
            answer.approval.CopyFrom(_approval(request, value))
        case _:
            answer.value_json = text.strip()
    return answer


def result_of(text: str) -> message_pb2.ToolResult:
    """A tool's result from JSON: a text is text, {"error": "…"} an error, anything else data.

    Raises ConfigurationError for what is no JSON.
    """
    value = json_of(text, what="A result")
    if isinstance(value, dict) and value.keys() == {"error"} and isinstance(value["error"], str):
        return failed(value["error"])
    if isinstance(value, str):
        return message_pb2.ToolResult(parts=[message_pb2.Part(text=value)])
    return message_pb2.ToolResult(parts=[message_pb2.Part(data_json=text.strip())])


def failed(message: str) -> message_pb2.ToolResult:
    """A tool's result that is an error."""
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_TOOL_FAILED, message=message)
    return message_pb2.ToolResult(error=error)


def json_of(text: str, *, what: str) -> JsonValue:
    """The value of a JSON text. Raises ConfigurationError; `what` it is of begins the sentence."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        # A message holds Unicode only: no halves of surrogate pairs, be they written out or escaped.
        json.dumps([text, value], ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is not JSON ({error}): a text needs quotes, such as '\"yes\"'.") from None
    return value


def _approval(request: input_pb2.InputRequest, value: JsonValue) -> input_pb2.Approval:
    if isinstance(value, bool):
        return input_pb2.Approval(approved=value)
    if isinstance(value, dict) and value.keys() <= _APPROVAL_KEYS:
        approved, note, arguments = value.get("approved"), value.get("note", ""), value.get("arguments")
        if isinstance(approved, bool) and isinstance(note, str) and isinstance(arguments, dict | None):
            arguments_json = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
            return input_pb2.Approval(approved=approved, arguments_json=arguments_json, note=note)
    raise ConfigurationError(f"{headline(request)}; that takes {takes_text(request)}.")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
