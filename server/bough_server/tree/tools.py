"""The tool calls of a fold: what each was asked and gave, and whose it is; it reads no events of models or runs."""

import json
from collections.abc import Sequence
from typing import Final

from bough.v1 import error_pb2, event_pb2, execution_pb2, invocation_pb2, message_pb2
from bough_server import events
from bough_server.tree.bounds import Bounds, head
from bough_server.tree.nodes import copied
from bough_server.tree.run import CallKey

_CUT_IN_STEPS: Final = 64 * 1024
"""A step's end has results up to this size whole."""


class ToolCalls:
    """Tool calls by invocation and call id, in the order of their first events.

    Texts are cut as they come, and calls beyond the bound are only counted, so what it holds is bounded.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.total = 0
        """How many calls there are, those beyond the bound included."""
        self._calls: dict[CallKey, invocation_pb2.ToolInvocation | None] = {}
        self._ended: set[CallKey] = set()
        self._kept: list[invocation_pb2.ToolInvocation] = []
        self._results: dict[CallKey, message_pb2.ToolResult] = {}

    def start(self, event: event_pb2.AgentEvent, sequence: int) -> bool:
        """Takes in a tool_started; False where its call id had been used for a call that has ended."""
        call = event.tool_started.call
        is_new = self._expect(call, event, sequence)
        known = self._calls[event.invocation_id, call.call_id]
        if known is not None and not known.HasField("start_time") and event.HasField("record_time"):
            known.start_time.CopyFrom(event.record_time)
        return is_new

    def ask(self, event: event_pb2.AgentEvent, sequence: int) -> bool:
        """Takes in an input_requested about a call, which may never start; False as for `start`."""
        request = event.input_requested.request
        call = message_pb2.ToolCall(
            call_id=request.call_id, name=request.call.name, arguments_json=request.call.arguments_json
        )
        return self._expect(call, event, sequence)

    def output(self, event: event_pb2.AgentEvent, sequence: int) -> None:
        """Takes in a tool_output, which only says that there is a call."""
        key = (event.invocation_id, event.tool_output.call_id)
        if key not in self._calls:
            self._open(key, message_pb2.ToolCall(call_id=key[1]), event, sequence)

    def end(self, event: event_pb2.AgentEvent, sequence: int) -> str:
        """Takes in a tool_completed or tool_failed and gives the call's id; the first end of a call counts."""
        result = events.tool_result_of(event)
        key = (event.invocation_id, result.call.call_id)
        if key not in self._calls:
            self._open(key, result.call, event, sequence)
        if self._bounds.include_steps and key not in self._results and result.ByteSize() > _CUT_IN_STEPS:
            self._results[key] = copied(result)
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
        """A large result as the call's own end has it, where steps are wanted."""
        return self._results.get((invocation_id, call_id))

    def in_order(self) -> Sequence[invocation_pb2.ToolInvocation]:
        """The calls up to the bound, by their first events."""
        return self._kept

    def _expect(self, call: message_pb2.ToolCall, event: event_pb2.AgentEvent, sequence: int) -> bool:
        """Opens a call that is not open; False where its id had been used for one that has ended."""
        key = (event.invocation_id, call.call_id)
        is_reused = key in self._ended
        if is_reused or key not in self._calls:
            self._ended.discard(key)
            self._open(key, call, event, sequence)
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
        self._calls[key] = opened
        self._kept.append(opened)

    def _describe(self, opened: invocation_pb2.ToolInvocation, call: message_pb2.ToolCall) -> None:
        opened.name = call.name
        opened.arguments_json, opened.arguments_truncated = head(call.arguments_json, self._bounds.max_tool_args_bytes)


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
    """The tool's JSON, or its text as a JSON string."""
    parts = result.parts
    if len(parts) == 1 and parts[0].HasField("data_json"):
        return parts[0].data_json
    return json.dumps("".join(_readable(part) for part in parts), ensure_ascii=False)


def _readable(part: message_pb2.Part) -> str:
    """A part as text; of bytes, where they are or what they are."""
    blob = part.blob
    return part.text or part.data_json or blob.uri or blob.filename or blob.media_type
