"""What a call of a tool asks people and clients for: an approval, a result, a word after a crash; it runs no tool."""

from bough.v1 import error_pb2, input_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.runtime.lane import Lane
from bough_server.runtime.questions import Asking, ask_outside
from bough_server.runtime.toolset import Offer
from bough_server.tools.arguments import parse_arguments
from bough_server.tools.execution import needs_approval


class Approvals:
    """The questions of one call: `key` is its effect, `index` its step."""

    def __init__(self, lane: Lane, *, key: str, index: int) -> None:
        self._lane = lane
        self._key = key
        self._index = index

    async def approved(self, call: message_pb2.ToolCall, offer: Offer) -> message_pb2.ToolCall:
        """The call as it may run, with other arguments where who approved it gave some. Raises RunError to refuse."""
        if not self._is_needed(call, offer):
            return call
        answer = await ask_outside(
            self._lane,
            Asking(
                key=f"{self._key}.ok",
                reason=input_pb2.INPUT_REASON_APPROVAL,
                prompt=f"May {self._lane.frame.name} call {call.name}?",
                schema_json=offer.spec.input_schema_json,
                call=call,
                step_index=self._index,
                within=_within(offer),
            ),
        )
        return _as_approved(call, answer)

    async def from_client(self, call: message_pb2.ToolCall, offer: Offer, digest: str) -> message_pb2.ToolResult:
        """What the client's tool gave; a failed result where it gave nothing in time."""
        answer = await ask_outside(
            self._lane,
            Asking(
                key=self._key,
                reason=input_pb2.INPUT_REASON_CLIENT_TOOL,
                prompt=f"Run {call.name} and give its result.",
                digest=digest,
                call=call,
                step_index=self._index,
                within=_within(offer),
            ),
        )
        if answer.HasField("tool_result"):
            return _given(answer.tool_result, call)
        expired = RunError(
            f"The client did not run {call.name!r} in time.", reason=error_pb2.ERROR_REASON_INPUT_EXPIRED
        )
        return message_pb2.ToolResult(call=call, error=expired.to_agent_error())

    async def after_loss(
        self, call: message_pb2.ToolCall, offer: Offer, *, attempt: int
    ) -> message_pb2.ToolResult | message_pb2.ToolCall:
        """What somebody says of a call that was running when its server was lost: its result, or as what to run it.

        Raises RunError where it must not run again.
        """
        answer = await ask_outside(
            self._lane,
            Asking(
                key=f"{self._key}.again{attempt}",
                reason=input_pb2.INPUT_REASON_RECOVERY,
                prompt=f"The server was lost while {call.name} ran. May it run again, or is its result known?",
                schema_json=offer.spec.input_schema_json,
                call=call,
                step_index=self._index,
                within=_within(offer),
            ),
        )
        if answer.HasField("tool_result"):
            return _given(answer.tool_result, call)
        return _as_approved(call, answer)

    def _is_needed(self, call: message_pb2.ToolCall, offer: Offer) -> bool:
        if offer.requires_approval or f"{self._key}.ok" in self._lane.execution.journal.requested:
            return True  # what was asked before a crash is asked, whatever code decides today
        if offer.tool is None:
            return False
        return needs_approval(offer.tool, parse_arguments(call.arguments_json, offer.spec.input_schema_json))


def _given(answered: message_pb2.ToolResult, call: message_pb2.ToolCall) -> message_pb2.ToolResult:
    """A result from outside, without what only the server can say of it."""
    result = message_pb2.ToolResult()
    result.CopyFrom(answered)
    result.call.CopyFrom(call)
    result.ClearField("child_invocation_id")
    if result.HasField("error") and not result.error.reason:
        result.error.reason = error_pb2.ERROR_REASON_TOOL_FAILED
    return result


def _as_approved(call: message_pb2.ToolCall, answer: input_pb2.InputAnswer) -> message_pb2.ToolCall:
    if not answer.HasField("approval"):
        raise RunError(
            f"Nobody approved the call of {call.name!r} in time; it did not run.",
            reason=error_pb2.ERROR_REASON_INPUT_EXPIRED,
        )
    approval = answer.approval
    if not approval.approved:
        why = f": {approval.note}" if approval.note else "."
        raise RunError(f"The call of {call.name!r} was refused{why}", reason=error_pb2.ERROR_REASON_NOT_APPROVED)
    if not approval.arguments_json:
        return call
    edited = message_pb2.ToolCall()
    edited.CopyFrom(call)
    edited.arguments_json = approval.arguments_json
    return edited


def _within(offer: Offer) -> float | None:
    return offer.tool.answer_within if offer.tool is not None else None
