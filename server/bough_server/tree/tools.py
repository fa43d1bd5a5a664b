"""Tool calls of a run while its events are folded: arguments, results and the invocations they belong to."""

import json
from collections.abc import Sequence
from typing import Final

from bough.v1 import error_pb2, event_pb2, execution_pb2, invocation_pb2, message_pb2
from bough_server.log import events
from bough_server.log.blobs import file_text
from bough_server.log.run_state import CallKey
from bough_server.messages import copy_of
from bough_server.tree.bounds import Bounds, head

_STEP_TRUNCATION_BYTES: Final = 64 * 1024
"""Results up to this size are whole in the step's end; larger ones are truncated there."""


class ToolCalls:
    """Tool calls by invocation and call id, in the order of their first events.

    Texts are cut as they arrive, and calls beyond the bound are only counted, so memory is bounded.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.total = 0
        """Number of calls, including those beyond the bound."""
        self._calls: dict[CallKey, invocation_pb2.ToolInvocation | None] = {}
        self._ended: set[CallKey] = set()
        self._kept: list[invocation_pb2.ToolInvocation] = []
        self._written: dict[CallKey, int] = {}
        """The hash of the arguments that each kept call was opened with: the kept text may be cut."""
        self._results: dict[CallKey, message_pb2.ToolResult] = {}

    def start(self, event: event_pb2.AgentEvent, sequence: int) -> bool:
        """Apply a tool_started. Return False if its call id was used before, for a call that has ended."""
        call = event.tool_started.call
        is_new = self._expect(call, event, sequence)
        known = self._calls[event.invocation_id, call.call_id]
        if known is not None and not known.HasField("start_time") and event.HasField("record_time"):
            known.start_time.CopyFrom(event.record_time)
        # Of any attempt: a fork that brings mocks may answer a call that its origin's tool was to answer.
        if known is not None and event.tool_started.HasField("mock_index"):
            known.mock_index = event.tool_started.mock_index
        if known is not None:
            known.server = event.tool_started.server
        if known is not None and event.tool_started.HasField("fault_index"):
            known.fault_index = event.tool_started.fault_index
        return is_new

    def ask(self, event: event_pb2.AgentEvent, sequence: int) -> bool:
        """Apply an input_requested about a call, which may never start. Return False as `start` does."""
        request = event.input_requested.request
        call = message_pb2.ToolCall(
            call_id=request.call_id, name=request.call.name, arguments_json=request.call.arguments_json
        )
        return self._expect(call, event, sequence)

    def output(self, event: event_pb2.AgentEvent, sequence: int) -> None:
        """Apply a tool_output, which only shows that the call exists."""
        key = (event.invocation_id, event.tool_output.call_id)
        if key not in self._calls:
            self._open(key, message_pb2.ToolCall(call_id=key[1]), event, sequence)

    def end(self, event: event_pb2.AgentEvent, sequence: int) -> str:
        """Apply a tool_completed or tool_failed and return the call's id; the first end of a call wins."""
        result = events.tool_result_of(event)
        key = (event.invocation_id, result.call.call_id)
        if key not in self._calls:
            self._open(key, result.call, event, sequence)
        if self._bounds.include_steps and key not in self._results and result.ByteSize() > _STEP_TRUNCATION_BYTES:
            self._results[key] = copy_of(result)
        known = self._calls[key]
        if known is not None and key not in self._ended:
            self._finish(known, event, result)
        self._ended.add(key)
        return key[1]

    def _finish(
        self, known: invocation_pb2.ToolInvocation, event: event_pb2.AgentEvent, result: message_pb2.ToolResult
    ) -> None:
        if not known.name:
            self._describe(known, result.call)
        _end(known, event, result)
        if known.state == execution_pb2.EXECUTION_STATE_SUCCEEDED:
            known.result_json, is_cut = head(_result_json(result), self._bounds.max_tool_result_bytes)
            known.result_truncated = is_cut or result.truncated

    def whole(self, invocation_id: str, call_id: str) -> message_pb2.ToolResult | None:
        """Return the whole of a large result, from the call's own end; None unless the bounds include steps."""
        return self._results.get((invocation_id, call_id))

    def in_order(self) -> Sequence[invocation_pb2.ToolInvocation]:
        """Return the calls up to the bound, in the order of their first events."""
        return self._kept

    def _expect(self, call: message_pb2.ToolCall, event: event_pb2.AgentEvent, sequence: int) -> bool:
        """Open a call that is not open. Return False if its id was used before, for a call that has ended."""
        key = (event.invocation_id, call.call_id)
        is_reused = key in self._ended
        if is_reused or key not in self._calls:
            self._ended.discard(key)
            self._open(key, call, event, sequence)
        elif (known := self._calls[key]) is not None:
            self._update_arguments(known, key, call)
        return not is_reused

    def _open(self, key: CallKey, call: message_pb2.ToolCall, event: event_pb2.AgentEvent, sequence: int) -> None:
        self.total += 1
        if len(self._kept) >= self._bounds.max_tools:
            self._calls[key] = None
            return
        opened = invocation_pb2.ToolInvocation(
            call_id=key[1],
            state=execution_pb2.EXECUTION_STATE_RUNNING,
            invocation_id=key[0],
            step_index=event.step_index if event.step_id else None,
            step_id=event.step_id,
            sequence=sequence,
        )
        self._describe(opened, call)
        self._written[key] = hash(call.arguments_json)
        self._calls[key] = opened
        self._kept.append(opened)

    def _describe(self, opened: invocation_pb2.ToolInvocation, call: message_pb2.ToolCall) -> None:
        opened.name = call.name
        opened.arguments_json, opened.arguments_truncated = head(call.arguments_json, self._bounds.max_tool_args_bytes)

    def _update_arguments(self, known: invocation_pb2.ToolInvocation, key: CallKey, call: message_pb2.ToolCall) -> None:
        """Apply the arguments of a later event of a call: an approver may have edited those that the model wrote."""
        if not known.name:  # the call was first heard of by its output
            self._describe(known, call)
            self._written[key] = hash(call.arguments_json)
            return
        is_edited = self._written[key] != hash(call.arguments_json)
        text, is_cut = head(call.arguments_json, self._bounds.max_tool_args_bytes) if is_edited else ("", False)
        known.executed_arguments_json, known.executed_arguments_truncated = text, is_cut


def _end(known: invocation_pb2.ToolInvocation, event: event_pb2.AgentEvent, result: message_pb2.ToolResult) -> None:
    if event.HasField("record_time"):
        known.end_time.CopyFrom(event.record_time)
    if not known.HasField("start_time") and result.HasField("start_time"):
        known.start_time.CopyFrom(result.start_time)
    known.child_invocation_id = result.child_invocation_id
    if event.HasField("tool_completed"):
        known.state = execution_pb2.EXECUTION_STATE_SUCCEEDED
        return
    is_cancelled = result.error.reason == error_pb2.ERROR_REASON_CANCELLED
    known.state = execution_pb2.EXECUTION_STATE_CANCELLED if is_cancelled else execution_pb2.EXECUTION_STATE_FAILED
    known.error.CopyFrom(result.error)


def _result_json(result: message_pb2.ToolResult) -> str:
    """Return the tool's JSON, or its text as a JSON string."""
    parts = result.parts
    if len(parts) == 1 and parts[0].HasField("data_json"):
        return parts[0].data_json
    return json.dumps("".join(_readable(part) for part in parts), ensure_ascii=False)


def _readable(part: message_pb2.Part) -> str:
    """Return a part as text; for a blob, its URI, or its media type, file name and size."""
    if part.HasField("blob"):
        return part.blob.uri or file_text(part.blob)
    return part.text or part.data_json
