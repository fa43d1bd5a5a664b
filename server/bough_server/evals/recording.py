"""Make mocks of the tool results that a run recorded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import error_pb2, eval_set_pb2, execution_pb2, invocation_pb2, message_pb2
from bough_server.tools.builtin import RESERVED
from bough_server.truncation import cut_text

_SHOWN_BYTES: Final = 200
"""The most bytes of a call's arguments in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMocks:
    """Mocks of a recorded run's tool calls."""

    tools: Sequence[eval_set_pb2.ToolMock]
    """In the order of the calls."""
    dropped: Sequence[str]
    """A sentence for each call whose outcome no mock has: it contradicts an earlier one, or was not recorded whole."""


def mocks_of(invocation: invocation_pb2.Invocation) -> list[eval_set_pb2.ToolMock]:
    """Return the mocks of recorded_mocks."""
    return list(recorded_mocks(invocation).tools)


def recorded_mocks(invocation: invocation_pb2.Invocation) -> RecordedMocks:
    """Return a mock for each outcome of an ordinary tool in a run, whichever agent called it.

    Each answers calls with equal arguments. Of calls with equal arguments the first counts. Calls of agents and of
    built-in tools have none, nor have calls that were refused, cancelled or have not ended. The record has texts for
    files, and so have its mocks.
    """
    first: dict[tuple[str, str], eval_set_pb2.ToolMock] = {}
    dropped: list[str] = []
    for call in invocation.tools:
        if not _has_outcome(call):
            continue
        arguments, answer = _canonical(call.arguments_json or "{}"), _mock(call)
        if arguments is None or answer is None:
            dropped.append(f"{_named(call)} was not recorded whole, so no mock can stand for it.")
        elif not _equal(first.setdefault((call.name, arguments), answer), answer):
            dropped.append(
                f"{_named(call)} had another outcome than an earlier call with equal arguments, which is kept."
            )
    return RecordedMocks(tools=list(first.values()), dropped=dropped)


def _has_outcome(call: invocation_pb2.ToolInvocation) -> bool:
    """True if an ordinary tool returned a result or failed; refused calls have not started."""
    if call.child_invocation_id or call.name in RESERVED:
        return False
    # A tool that the client runs has no start; its failures have one reason.
    has_run = call.HasField("start_time") or call.error.reason == error_pb2.ERROR_REASON_TOOL_FAILED
    is_failure = call.state == execution_pb2.EXECUTION_STATE_FAILED and has_run
    return is_failure or call.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


def _mock(call: invocation_pb2.ToolInvocation) -> eval_set_pb2.ToolMock | None:
    """Return a mock with the outcome of a call; None if its result is no whole JSON."""
    mock = eval_set_pb2.ToolMock(name=call.name)
    mock.arguments_match.equals_json = call.arguments_json or "{}"
    if call.state == execution_pb2.EXECUTION_STATE_FAILED:
        error, failure = call.error, mock.outcome.failure
        failure.message, failure.retryable, failure.details_json = error.message, error.retryable, error.details_json
    elif (result := _canonical(call.result_json)) is None:
        return None
    elif result == "null":  # as `result_json` it would stand for an empty text
        mock.outcome.parts.append(message_pb2.Part(data_json=result))
    else:
        mock.result_json = call.result_json
    return mock


def _equal(one: eval_set_pb2.ToolMock, other: eval_set_pb2.ToolMock) -> bool:
    if one.WhichOneof("answer") == other.WhichOneof("answer") == "result_json":
        return _canonical(one.result_json) == _canonical(other.result_json)
    return one.WhichOneof("answer") == other.WhichOneof("answer") and one.outcome == other.outcome


def _canonical(text: str) -> str | None:
    """Return a JSON text in one form for equal values; None if it is no JSON."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _named(call: invocation_pb2.ToolInvocation) -> str:
    shown = cut_text(call.arguments_json, _SHOWN_BYTES)
    return f"The call {call.call_id!r} of {call.name!r} by {call.agent!r} with the arguments {shown}"
