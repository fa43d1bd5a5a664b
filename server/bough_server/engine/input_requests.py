"""Requests for input that a run waits for, and their answers: validation, and the event that records one."""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2
from bough_server.engine.scheduler import Scheduler, Waiter
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.matching.schemas import schema_mistakes
from bough_server.messages import copy_of
from bough_server.tools.arguments import parse_arguments

_ALLOWED: Final = {
    input_pb2.INPUT_KIND_APPROVAL: ("approval",),
    input_pb2.INPUT_KIND_CLIENT_TOOL: ("tool_outcome",),
    input_pb2.INPUT_KIND_QUESTION: ("value_json",),
    input_pb2.INPUT_KIND_RECOVERY: ("approval", "tool_outcome"),
}


def answer_mistakes(request: input_pb2.InputRequest, answer: input_pb2.InputAnswer) -> list[str]:
    """Return how an answer does not fit its request, in sentences; empty if it fits."""
    given = answer.WhichOneof("answer") or ""
    allowed = _ALLOWED.get(request.kind, ())
    if given not in allowed:
        kind = input_pb2.InputKind.Name(request.kind).removeprefix("INPUT_KIND_")
        return [f"{kind} is answered with {' or '.join(allowed)}, not with {given or 'nothing'}."]
    if given == "approval":
        return _argument_mistakes(answer.approval.arguments_json, request.answer_schema_json)
    if given == "value_json":
        return value_mistakes(answer.value_json, request.answer_schema_json, "value_json")
    return outcome_mistakes(answer.tool_outcome)


def outcome_mistakes(outcome: message_pb2.ToolOutcome) -> list[str]:
    """Return the problems of the outcome that a client reports for a call, in sentences; empty if there are none."""
    parts, failure = outcome.parts, outcome.failure
    if any(part.HasField("tool_call") or part.HasField("tool_result") for part in parts):
        return ["The parts of an outcome must not hold tool calls or tool results."]
    if any(part.WhichOneof("content") is None for part in parts):
        return ["Each part of an outcome must have content; send an empty text if there is none."]
    if not outcome.HasField("failure") and not parts:
        return ["An outcome must have parts, a failure or both; send an empty text if the tool returned nothing."]
    if failure.details_json and not is_json_object(failure.details_json):
        return ["details_json is not a JSON object."]
    if any(part.metadata_json and not is_json_object(part.metadata_json) for part in parts):
        return ["The metadata_json of a part is not a JSON object."]
    return [
        wrong
        for part in parts
        if part.HasField("data_json")
        for wrong in value_mistakes(part.data_json, "", "data_json")
    ]


def result_of(outcome: message_pb2.ToolOutcome, call: message_pb2.ToolCall) -> message_pb2.ToolResult:
    """Return the result of a call with this outcome; its error does not name the agent and invocation yet."""
    result = message_pb2.ToolResult(call=call, parts=map(part_of_caller, outcome.parts))
    if outcome.HasField("failure"):
        failure = outcome.failure
        error = RunError(
            failure.message,
            reason=error_pb2.ERROR_REASON_TOOL_FAILED,
            retryable=failure.retryable,
            details_json=failure.details_json,
        )
        result.error.CopyFrom(error.to_agent_error())
    return result


def part_of_caller(part: message_pb2.Part) -> message_pb2.Part:
    """Return a copy of a part with what a caller determines, its content and metadata: the server cut nothing of it."""
    made = message_pb2.Part()
    made.CopyFrom(part)
    made.ClearField("truncated")
    made.ClearField("original_bytes")
    return made


def outcome_of_caller(outcome: message_pb2.ToolOutcome) -> message_pb2.ToolOutcome:
    """Return a copy of an outcome with what a caller determines."""
    failure = outcome.failure if outcome.HasField("failure") else None
    return message_pb2.ToolOutcome(parts=map(part_of_caller, outcome.parts), failure=failure)


def is_json_object(text: str) -> bool:
    """Return whether a text is one JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_reject_constant), dict)
    except (ValueError, RecursionError):
        return False


def _argument_mistakes(arguments_json: str, schema_json: str) -> list[str]:
    try:
        if arguments_json:
            parse_arguments(arguments_json, schema_json or "{}")
    except RunError as error:
        return [error.message]
    return []


def value_mistakes(value_json: str, schema_json: str, field: str) -> list[str]:
    """Return how a text is no JSON or does not fit a schema, in sentences that name `field`; empty if it fits."""
    try:
        value = json.loads(value_json, parse_constant=_reject_constant)
        # JSON may escape half of a surrogate pair; no string field of a message can carry it, so refuse it here.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return [f"{field} is not JSON ({error})."]
    return schema_mistakes(value, schema_json) if schema_json else []


def _reject_constant(name: str) -> None:
    # Python reads NaN and Infinity; JSON has neither.
    raise ValueError(f"{name} is not JSON")


def is_same_answer(answer: input_pb2.InputAnswer, other: input_pb2.InputAnswer) -> bool:
    """True if two answers have the same content, whatever their source and author."""
    return _normalize(answer) == _normalize(other)


def _normalize(answer: input_pb2.InputAnswer) -> input_pb2.InputAnswer:
    bare = copy_of(answer)
    bare.ClearField("source")
    bare.ClearField("answered_by")
    if bare.HasField("tool_outcome"):
        bare.tool_outcome.CopyFrom(outcome_of_caller(answer.tool_outcome))
    if bare.HasField("value_json"):
        bare.value_json = _canonicalize_json(bare.value_json)
    elif bare.approval.arguments_json:
        bare.approval.arguments_json = _canonicalize_json(bare.approval.arguments_json)
    return bare


def _canonicalize_json(text: str) -> str:
    """Return a JSON text in canonical form (sorted keys); a text that is no JSON is returned as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def build_expiry_answer(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    """Return the answer to a request that expired: its default, or an empty answer."""
    answer = copy_of(request.default_answer)
    answer.input_id = request.input_id
    answer.source = input_pb2.ANSWER_SOURCE_EXPIRY
    return answer


def build_answer_event(
    asked: event_pb2.AgentEvent,
    answer: input_pb2.InputAnswer,
    *,
    request_id: str = "",
    request_digest: str = "",
) -> event_pb2.AgentEvent:
    """Return the input_received of an answer, with the invocation, step and effect key of its input_requested."""
    event = events.in_place_of(asked)
    event.input_received.answer.CopyFrom(answer)
    if answer.HasField("tool_outcome"):
        event.input_received.answer.tool_outcome.CopyFrom(outcome_of_caller(answer.tool_outcome))
    event.input_received.request_id = request_id
    event.input_received.request_digest = request_digest
    return event


class PendingInputs:
    """The requests that effects of a run wait for, each by its input_requested."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, tuple[event_pb2.AgentEvent, Waiter[input_pb2.InputAnswer]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def requests(self) -> Iterator[input_pb2.InputRequest]:
        """Return the pending requests in log order; after a crash they may be registered again in another order."""
        asked = sorted((asked for asked, _ in self._waiting.values()), key=lambda event: event.sequence)
        return (event.input_requested.request for event in asked)

    def get_request_event(self, input_id: str) -> event_pb2.AgentEvent | None:
        """Return the input_requested of a pending request, or None."""
        return self._waiting[input_id][0] if input_id in self._waiting else None

    def take(self, input_id: str) -> Waiter[input_pb2.InputAnswer] | None:
        """Remove and return the waiter of a request, or None. It counts as answered from here on."""
        _, waiter = self._waiting.pop(input_id, (None, None))
        return waiter

    async def wait(
        self, asked: event_pb2.AgentEvent, wait_for_commit: Callable[[event_pb2.AgentEvent], Awaitable[None]]
    ) -> input_pb2.InputAnswer:
        """Wait for the answer to a request that is recorded.

        `wait_for_commit` waits for its commit, and raises CancelledError if the effect was cancelled meanwhile.
        """
        input_id = asked.input_requested.request.input_id
        waiter: Waiter[input_pb2.InputAnswer] = Waiter(self._scheduler)
        # Registered before the commit: a client may answer as soon as it sees the event.
        self._waiting[input_id] = asked, waiter
        try:
            # Not parked during the commit, so the run cannot be interrupted before parallel code starts its effects.
            await wait_for_commit(asked)
            return await waiter.wait()
        finally:
            self._waiting.pop(input_id, None)
