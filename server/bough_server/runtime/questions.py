"""Requests for input from agents and tool calls: questions, approvals, client tools, recovery.

The execution waits for the answer; this module applies it to the effect that asked.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.input_requests import result_of
from bough_server.errors import RunError
from bough_server.matching.schemas import schema_mistakes, value_schema_problem
from bough_server.messages import copy_of
from bough_server.runtime.agent import NO_DEFAULT
from bough_server.runtime.lane import Lane
from bough_server.runtime.running_agent import RunningAgent
from bough_server.runtime.toolset import ToolOffer
from bough_server.tools.arguments import parse_arguments
from bough_server.tools.execution import needs_approval
from bough_server.truncation import MAX_TEXT_BYTES, size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequestSpec:
    """A request for input: its effect, the kind of answer, its prompt; it expires after `within` seconds."""

    key: str
    kind: input_pb2.InputKind.ValueType
    prompt: str
    schema_json: str = ""
    digest: str = ""
    call: message_pb2.ToolCall | None = None
    step_index: int | None = None
    within: float | None = None
    default_json: str | None = None
    approvers: str | None = None
    four_eyes: bool = False


async def ask_outside(lane: Lane, spec: InputRequestSpec) -> input_pb2.InputAnswer:
    """Request input and wait for the answer; a recorded request or answer is used."""
    execution, running = lane.execution, lane.running
    # A recorded request is not built again: its expiry is the time that was set when it was first made.
    requested = next(
        (event for event in execution.journal.of_effect.get(spec.key, ()) if event.HasField("input_requested")), None
    )
    if requested is None:
        requested = _build_request(lane, spec)
    answer = await execution.ask_outside(requested)
    execution.check_open(running.invocation_id, spec.key)
    return answer


def _build_request(lane: Lane, spec: InputRequestSpec) -> event_pb2.AgentEvent:
    execution, running = lane.execution, lane.running
    event = running.event(spec.key, spec.step_index)
    event.effect_digest = spec.digest
    request = event.input_requested.request
    request.input_id = ids.derive_id(execution.facts.key_root, spec.key)
    request.invocation_id, request.kind, request.prompt = running.invocation_id, spec.kind, spec.prompt
    request.answer_schema_json = spec.schema_json
    request.agent_path.extend(_agent_path(running))
    if spec.call is not None:
        request.call_id = spec.call.call_id
        request.call.CopyFrom(spec.call)
    if spec.within is not None:
        request.expire_time.FromNanoseconds(execution.clock.now_ns() + int(spec.within * 1e9))
    request.approver_group, request.four_eyes = spec.approvers or "", spec.four_eyes
    if spec.default_json is not None:
        request.default_answer.value_json = spec.default_json
    return event


def _agent_path(running: RunningAgent) -> list[str]:
    names: list[str] = []
    above: RunningAgent | None = running
    while above is not None:
        names.append(above.name)
        above = above.parent
    return names[::-1]


async def ask_question(
    lane: Lane, key: str, prompt: str, *, schema: Mapping[str, Any] | None, within: float | None, default: object
) -> str:
    """Ask a question for an agent's code and return the answer as JSON text.

    Raises RunError: BAD_ARGUMENTS if the question cannot be answered or its default does not fit, INPUT_EXPIRED.
    """
    schema_json = json.dumps(schema, allow_nan=False) if schema is not None else ""
    default_json = json.dumps(default, allow_nan=False) if default is not NO_DEFAULT else None
    _check_sizes(prompt, schema_json, default_json)
    if schema is not None and (problem := value_schema_problem(schema)):
        raise _bad_arguments(f"The schema of the question {prompt!r} {problem}")
    if schema_json and default_json is not None and (wrong := schema_mistakes(default, schema_json)):
        raise _bad_arguments(f"The default of the question {prompt!r} does not fit its schema: {'; '.join(wrong)}.")
    digest = keys.digest("ask", schema_json)
    if (replayed := await lane.replay_result(key, digest)) is not None:
        return _value_of(replayed.input_received.answer, prompt)
    await lane.go_live(key)
    spec = InputRequestSpec(
        key=key,
        kind=input_pb2.INPUT_KIND_QUESTION,
        prompt=prompt,
        schema_json=schema_json,
        digest=digest,
        within=within,
        default_json=default_json,
    )
    return _value_of(await ask_outside(lane, spec), prompt)


def _check_sizes(prompt: str, schema_json: str, default_json: str | None) -> None:
    for name, text in (("prompt", prompt), ("schema", schema_json), ("default", default_json or "")):
        if size_of(text) > MAX_TEXT_BYTES:
            raise _bad_arguments(f"The {name} of a question is longer than {MAX_TEXT_BYTES // 1024} KiB.")


def _bad_arguments(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)


def _value_of(answer: input_pb2.InputAnswer, prompt: str) -> str:
    if not answer.HasField("value_json"):
        raise RunError(
            f"The question {prompt!r} was not answered in time.", reason=error_pb2.ERROR_REASON_INPUT_EXPIRED
        )
    return answer.value_json


class ToolQuestions:
    """The questions of one call: `key` is its effect, `index` its step, None if code called."""

    def __init__(self, lane: Lane, *, key: str, index: int | None) -> None:
        self._lane = lane
        self._key = key
        self._index = index

    async def request_approval(self, call: message_pb2.ToolCall, offer: ToolOffer) -> message_pb2.ToolCall:
        """Return the call as approved, with the approver's arguments if there are any. Raises RunError to refuse it."""
        if not self._is_needed(call, offer):
            return call
        prompt = f"May {self._lane.running.name} call {call.name}?"
        answer = await self._ask(call, offer, key=".ok", kind=input_pb2.INPUT_KIND_APPROVAL, prompt=prompt)
        return _apply_approval(call, answer)

    async def ask_client(self, call: message_pb2.ToolCall, offer: ToolOffer, digest: str) -> message_pb2.ToolResult:
        """Return the result of a client-side tool; a failed one if the client did not answer in time."""
        answer = await ask_outside(
            self._lane,
            InputRequestSpec(
                key=self._key,
                kind=input_pb2.INPUT_KIND_CLIENT_TOOL,
                prompt=f"Run {call.name} and return its result.",
                digest=digest,
                call=call,
                step_index=self._index,
                within=_answer_seconds(offer),
            ),
        )
        if answer.HasField("tool_outcome"):
            return result_of(answer.tool_outcome, call)
        expired = RunError(
            f"The client did not run {call.name!r} in time.", reason=error_pb2.ERROR_REASON_INPUT_EXPIRED
        )
        return message_pb2.ToolResult(call=call, error=expired.to_agent_error())

    async def ask_for_recovery(
        self, call: message_pb2.ToolCall, offer: ToolOffer, *, attempt: int
    ) -> message_pb2.ToolResult | message_pb2.ToolCall:
        """Ask about a call that was running when its server crashed; return its result, or the call to run again.

        Raises RunError if it must not run again.
        """
        prompt = f"The server was lost while {call.name} ran. May it run again, or is its result known?"
        answer = await self._ask(call, offer, key=f".again{attempt}", kind=input_pb2.INPUT_KIND_RECOVERY, prompt=prompt)
        if answer.HasField("tool_outcome"):
            return result_of(answer.tool_outcome, call)
        return _apply_approval(call, answer)

    async def _ask(
        self,
        call: message_pb2.ToolCall,
        offer: ToolOffer,
        *,
        key: str,
        kind: input_pb2.InputKind.ValueType,
        prompt: str,
    ) -> input_pb2.InputAnswer:
        spec = InputRequestSpec(
            key=f"{self._key}{key}",
            kind=kind,
            prompt=prompt,
            schema_json=offer.spec.input_schema_json,
            call=call,
            step_index=self._index,
            within=_answer_seconds(offer),
            approvers=None if offer.tool is None else offer.tool.approvers,
            four_eyes=offer.tool is not None and offer.tool.four_eyes,
        )
        return await ask_outside(self._lane, spec)

    def _is_needed(self, call: message_pb2.ToolCall, offer: ToolOffer) -> bool:
        if offer.requires_approval or f"{self._key}.ok" in self._lane.execution.journal.requested:
            return True  # approval was requested before a crash: required whatever the tool's code decides now
        if offer.tool is None:
            return False
        return needs_approval(offer.tool, parse_arguments(call.arguments_json, offer.spec.input_schema_json))


def _apply_approval(call: message_pb2.ToolCall, answer: input_pb2.InputAnswer) -> message_pb2.ToolCall:
    if not answer.HasField("approval"):
        raise RunError(
            f"The call of {call.name!r} was not approved in time; it did not run.",
            reason=error_pb2.ERROR_REASON_INPUT_EXPIRED,
        )
    approval = answer.approval
    if not approval.approved:
        why = f": {approval.note}" if approval.note else "."
        raise RunError(f"The call of {call.name!r} was refused{why}", reason=error_pb2.ERROR_REASON_NOT_APPROVED)
    if not approval.arguments_json:
        return call
    edited = copy_of(call)
    edited.arguments_json = approval.arguments_json
    return edited


def _answer_seconds(offer: ToolOffer) -> float | None:
    return offer.tool.answer_within if offer.tool is not None else None
