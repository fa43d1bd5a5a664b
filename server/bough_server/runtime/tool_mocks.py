"""Mocks of a run: what answers calls of ordinary tools in a case of an evaluation instead of the tools themselves."""

import json
from collections.abc import Iterator
from typing import Final

from bough.v1 import error_pb2, eval_set_pb2, message_pb2
from bough_server.engine.input_requests import outcome_mistakes, result_of, value_mistakes
from bough_server.errors import RunError
from bough_server.matching.values import check_matcher, mismatch
from bough_server.matching.work import TooMuchWork, limit_work
from bough_server.tools.builtin import RESERVED
from bough_server.tools.output import result_parts
from bough_server.truncation import truncate_text

MAX_MOCKS_BYTES: Final = 1024 * 1024
"""The most bytes of all mocks of a run: an event has to hold them beside the input and the session's values."""

_MAX_STEPS: Final = 10_000_000
"""The most steps to find the mock that answers a call; half a second."""

_SHOWN_BYTES: Final = 512
"""The most bytes of a call's arguments in an error's message."""


def find_mock(mocks: eval_set_pb2.ToolMocks, call: message_pb2.ToolCall, *, agent: str) -> eval_set_pb2.ToolMock | None:
    """Return the first mock that answers an agent's call of an ordinary tool, or None if the tool is to run.

    Raises RunError TOOL_NOT_MOCKED if there is none and the mocks are strict, or if it takes too long to find one.
    """
    shown = truncate_text(call.arguments_json or "{}", _SHOWN_BYTES)
    try:
        with limit_work(_MAX_STEPS):
            index = find_mock_index(mocks, call.name, call.arguments_json, agent=agent)
        if index is not None:
            return mocks.tools[index]
    except TooMuchWork:
        raise RunError(
            f"The call of {call.name!r} by {agent!r} with the arguments {shown} cannot be compared with all mocks of "
            "this case, which takes too long: the tool did not run. Use fewer or simpler mocks.",
            reason=error_pb2.ERROR_REASON_TOOL_NOT_MOCKED,
        ) from None
    if not mocks.strict:
        return None
    raise RunError(
        f"No mock answers the call of {call.name!r} by {agent!r} with the arguments {shown}, and the mocks of this "
        "case are strict: the tool did not run. Add a mock for the call, or set mocks.strict to false.",
        reason=error_pb2.ERROR_REASON_TOOL_NOT_MOCKED,
    )


def find_mock_index(mocks: eval_set_pb2.ToolMocks, name: str, arguments_json: str, *, agent: str) -> int | None:
    """Return which mock answers an agent's call of a tool, by its number. Raises TooMuchWork."""
    for index, mock in enumerate(mocks.tools):
        if mock.name == name and mock.agent in ("", agent) and _matches(mock, arguments_json):
            return index
    return None


def is_replaced(mocks: eval_set_pb2.ToolMocks | None, call: message_pb2.ToolCall, *, agent: str) -> bool:
    """True if an agent's call of an ordinary tool does not run the tool: a mock answers it, or it fails without one."""
    if mocks is None or mocks.strict:
        return mocks is not None
    try:
        return find_mock(mocks, call, agent=agent) is not None
    except RunError:
        return True


def _matches(mock: eval_set_pb2.ToolMock, arguments_json: str) -> bool:
    # A model may leave out the arguments of a tool that has none.
    return not mock.HasField("arguments_match") or not mismatch(mock.arguments_match, arguments_json or "{}")


def build_mock_result(mock: eval_set_pb2.ToolMock, call: message_pb2.ToolCall) -> message_pb2.ToolResult:
    """Return the result that a mock has for a call, bounded as that of a tool.

    A JSON string is a text and null an empty text, as what a tool in Python returns. Raises RunError OUTPUT_TOO_LARGE.
    """
    if mock.HasField("outcome"):
        result = result_of(mock.outcome, call)
        fitted = result_parts(list(result.parts)) if result.parts else []
        del result.parts[:]
        result.parts.extend(fitted)
        return result
    value: object = json.loads(mock.result_json)
    is_text = value is None or isinstance(value, str)
    # JSON is kept as it is written: numbers keep their digits, and members their order.
    return message_pb2.ToolResult(
        call=call, parts=result_parts(value if is_text else message_pb2.Part(data_json=mock.result_json))
    )


def mock_mistakes(mocks: eval_set_pb2.ToolMocks) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with mocks: the path of each wrong field in them, empty for the whole, and a sentence."""
    if (size := mocks.ByteSize()) > MAX_MOCKS_BYTES:
        yield "", f"The mocks have {size:,} bytes; those of a run may have {MAX_MOCKS_BYTES:,}. Remove or shorten some."
    for index, mock in enumerate(mocks.tools):
        for field, sentence in _mistakes_of(mock):
            yield f"tools[{index}].{field}", sentence


def _mistakes_of(mock: eval_set_pb2.ToolMock) -> Iterator[tuple[str, str]]:
    if mock.name in RESERVED:
        yield "name", f"{mock.name} is a built-in tool, and its calls cannot be mocked."
    if mock.HasField("arguments_match") and (problem := check_matcher(mock.arguments_match)):
        yield "arguments_match", problem
    answer = mock.WhichOneof("answer")
    if answer is None:
        yield "result_json", "A mock needs an answer: set result_json or outcome."
    elif answer == "outcome":
        yield from (("outcome", mistake) for mistake in outcome_mistakes(mock.outcome))
    else:
        yield from (("result_json", mistake) for mistake in value_mistakes(mock.result_json, "", "result_json"))
