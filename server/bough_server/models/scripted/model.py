"""A model that answers from a script, for tests and for trying a team without cost; script.py has the format.

Between requests it remembers nothing but how often it has failed each of them.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from bough.v1 import error_pb2, event_pb2, message_pb2, step_pb2, usage_pb2
from bough_server.clock import Clock, SystemClock
from bough_server.errors import ModelError
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import (
    FINISH_REASONS,
    AttemptMeter,
    Delta,
    Deltas,
    ModelRequest,
    Price,
    ReasoningDelta,
    RetryPolicy,
    TextDelta,
    ToolCallDelta,
)
from bough_server.models.scripted.script import FaultReason, Script, ScriptedFault, ScriptedTurn, split_words

Gate = Callable[[str, int, int], Awaitable[None]]
"""Awaited before each piece, with the agent, the turn's index in its list, and the piece's number from 0."""

_MOST_REMEMBERED: Final = 4096
_FAULTS: Final[dict[FaultReason, tuple[error_pb2.ErrorReason.ValueType, event_pb2.RetryReason.ValueType | None]]] = {
    "TRANSPORT": (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_TRANSPORT),
    "RATE_LIMITED": (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_RATE_LIMITED),
    "PROVIDER_ERROR": (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_PROVIDER_ERROR),
    "TIMEOUT": (error_pb2.ERROR_REASON_MODEL_TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT),
    "BAD_RESPONSE": (error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE, event_pb2.RETRY_REASON_BAD_RESPONSE),
    "UNAVAILABLE": (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, None),
}


class ScriptedModel:
    """A model that answers from its script. `gate` lets a test hold a stream before any piece."""

    def __init__(
        self,
        *,
        name: str,
        script: Script,
        model: str = "script",
        retry: RetryPolicy | None = None,
        fallbacks: Sequence[str] = (),
        price: Price | None = None,
        config_digest: str = "",
        clock: Clock | None = None,
        gate: Gate | None = None,
        limiter: ModelLimiter | None = None,
    ) -> None:
        self.name = name
        self.provider = "scripted"
        self.model = model
        self.retry = retry or RetryPolicy()
        self.fallbacks = tuple(fallbacks)
        self.price = price
        self.config_digest = config_digest
        self._script = script
        self._clock = clock or SystemClock()
        self._gate = gate
        self._limiter = limiter or ModelLimiter(name=name)
        self._attempts: OrderedDict[str, int] = OrderedDict()

    async def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncGenerator[Deltas | step_pb2.LlmResponse, None]:
        """Make one attempt, as the Model protocol specifies."""
        index, turn = self._script.turn(request)
        if turn is None:
            raise self._no_turn(request.agent, index)
        meter = meter or AttemptMeter()
        async with self._limiter.admit(request, meter):
            fault = self._fault(request, turn)
            deltas = _deltas(index, turn)
            # If `after_chunks` is beyond the last piece, the attempt still fails, after all its pieces.
            pieces = deltas if fault is None else deltas[: fault.after_chunks]
            for number, delta in enumerate(pieces):
                if self._gate is not None:
                    await self._gate(request.agent, index, number)
                if turn.delay_ms:
                    await self._clock.sleep(turn.delay_ms / 1000)
                meter.usage = _usage(turn, fault)
                yield (delta,)
            if fault is not None:
                raise self._failure(fault)
            if turn.cut:
                raise self._failure(ScriptedFault(reason="BAD_RESPONSE", message="The stream was cut by its script."))
            yield self._response(index, turn)

    async def close(self) -> None:
        """Do nothing: no resources are held."""

    def _fault(self, request: ModelRequest, turn: ScriptedTurn) -> ScriptedFault | None:
        """Return the fault of this attempt, if any. Counts the attempts of a request if `times` of them fail."""
        if turn.error is None or turn.error.times is None:
            return turn.error
        key = _digest(request)
        # pop() moves the key to the end, so that the request used longest ago is forgotten first.
        made = self._attempts[key] = self._attempts.pop(key, 0) + 1
        if len(self._attempts) > _MOST_REMEMBERED:
            self._attempts.popitem(last=False)
        return turn.error if made <= turn.error.times else None

    def _failure(self, fault: ScriptedFault) -> ModelError:
        reason, retry = _FAULTS[fault.reason]
        return ModelError(
            f"The model {self.name!r} failed: {fault.message}",
            reason=reason,
            retry=retry,
            retry_after=fault.retry_after,
            lost_usage=fault.usage.message() if fault.usage else None,
        )

    def _no_turn(self, agent: str, step: int) -> ModelError:
        return ModelError(
            f"The script {self._script.path!r} has no turn {step} for the agent {agent!r}. "
            f"Add it under agents.{agent or '*'}.",
            reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
        )

    def _response(self, index: int, turn: ScriptedTurn) -> step_pb2.LlmResponse:
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        if turn.reasoning:
            message.parts.add().reasoning.text = turn.reasoning
        if text := "".join(turn.pieces):
            message.parts.add(text=text)
        for position, call in enumerate(turn.calls):
            part = message.parts.add().tool_call
            part.name, part.arguments_json = call.name, call.arguments_text
            part.provider_call_id = _call_id(index, position)
        word = turn.finish_reason or ("tool_calls" if turn.calls else "stop")
        return step_pb2.LlmResponse(
            provider=self.provider,
            model=self.model,
            message=message,
            finish_reason=FINISH_REASONS.get(word, step_pb2.FINISH_REASON_OTHER),
            provider_finish_reason=word,
            usage=turn.usage.message() if turn.usage else None,
            raw_json=json.dumps(turn.model_dump(exclude_defaults=True), ensure_ascii=False),
        )


def _deltas(index: int, turn: ScriptedTurn) -> list[Delta]:
    deltas: list[Delta] = [ReasoningDelta(piece) for piece in split_words(turn.reasoning)]
    deltas += [TextDelta(piece) for piece in turn.pieces]
    for position, call in enumerate(turn.calls):
        deltas.append(ToolCallDelta(position, "", _call_id(index, position), call.name))
        deltas.append(ToolCallDelta(position, call.arguments_text))
    return deltas


def _usage(turn: ScriptedTurn, fault: ScriptedFault | None) -> usage_pb2.Usage | None:
    """Return the usage that an attempt reports from its first piece on; None for a stream that is cut."""
    usage = fault.usage if fault is not None else turn.usage
    return usage.message() if usage is not None and not turn.cut else None


def _call_id(index: int, position: int) -> str:
    return f"call_{index}_{position}"


def _digest(request: ModelRequest) -> str:
    digest = hashlib.sha256(f"{request.agent}\0{request.instruction}".encode())
    for message in request.messages:
        digest.update(message.SerializeToString(deterministic=True))
    return digest.hexdigest()
