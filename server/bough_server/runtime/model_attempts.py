"""The attempts of one model call: retries, fallbacks, deltas and the whole answer."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import takewhile
from typing import Final, cast

from google.protobuf import duration_pb2

from bough.v1 import error_pb2, event_pb2, step_pb2, usage_pb2
from bough_server import events, ids, usage
from bough_server.engine.execution import Execution
from bough_server.engine.recorder import DeltaChunk
from bough_server.errors import ModelError, RunError
from bough_server.models.model import AttemptMeter, Delta, Model, ModelRequest, ReasoningDelta, TextDelta, cost_of
from bough_server.runtime.agent import Resolver
from bough_server.runtime.running_agent import RunningAgent
from bough_server.telemetry import Traced
from bough_server.truncation import MAX_TEXT_BYTES, size_of


class FallbackChain:
    """The models of one call, those that were given up left out; never empty. Each has retries of its own."""

    def __init__(self, models: Sequence[Model], *, tries: int = 1) -> None:
        self._models = list(models)
        self._tries = tries

    @property
    def model(self) -> Model:
        """The model in force."""
        return self._models[0]

    def go_on(self, error: ModelError, *, is_sent: bool) -> float | None:
        """Makes the next attempt's model the one in force, after a failure of this one's.

        An attempt that was not sent, because its model is left alone or has too many calls, goes on with the next model
        at once. Gives the seconds that the attempt waits, jitter and the provider's own wish left out; None where there
        is none.
        """
        policy, is_last = self.model.retry, len(self._models) == 1
        if error.retry is not None and self._tries <= policy.retries and (is_sent or is_last):
            delay: float = min(policy.longest, policy.base * 2 ** (self._tries - 1))
            self._tries += 1
            return delay
        if error.is_of_the_request or is_last:
            return None
        del self._models[0]
        self._tries = 1
        return 0.0


def succession(resolver: Resolver, name: str, recorded: Sequence[event_pb2.AgentEvent] = ()) -> FallbackChain:
    """Who answers a call of the model of a name; one that the log holds begun goes on with its last attempt's model.

    Raises RunError MODEL_UNAVAILABLE where that model is not configured; fallbacks that are not are passed over.
    """
    asked = list(_asked(recorded))
    model = _found(resolver, asked[-1] if asked else name)
    if model is None:
        raise RunError(
            f"There is no model {name!r} in the server's configuration.",
            reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
        )
    after = _after(resolver, asked[0], asked[-1]) if asked else None
    names = model.fallbacks if after is None else after
    others = [found for other in names if (found := _found(resolver, other)) is not None]
    lost = sum(1 for _ in takewhile(lambda one: one == asked[-1], reversed(asked)))
    return FallbackChain([model, *others], tries=lost + 1)


def _asked(recorded: Sequence[event_pb2.AgentEvent]) -> Sequence[str]:
    """The model of each attempt that the log holds."""
    named = [event.llm_retrying.next_model or event.llm_started.model for event in recorded]
    return [name for name in named if name]


def _after(resolver: Resolver, first: str, last: str) -> Sequence[str] | None:
    """Whom the first model's fallbacks name after the last one; None where they do not name that."""
    model = _found(resolver, first)
    order = [first, *model.fallbacks] if model is not None else []
    return order[order.index(last) + 1 :] if last in order else None


def _found(resolver: Resolver, name: str) -> Model | None:
    try:
        return resolver.model(name)
    except KeyError:
        return None


_MAX_RAW_BYTES: Final = 512 * 1024


class ModelAttempts:
    """One model call of an invocation: `key` is its effect, `index` its step; None for one that is no step.

    Of a call that is no step no pieces are recorded: what it says is not said by its agent.
    """

    def __init__(
        self,
        execution: Execution,
        frame: RunningAgent,
        *,
        key: str,
        index: int | None,
        succession: FallbackChain,
        traced: Traced,
        attempt: int,
    ) -> None:
        self._execution = execution
        self._writer = execution.writer
        self._frame = frame
        self._key = key
        self._index = index
        self._succession = succession
        self._traced = traced
        self._attempt = attempt
        self._meter = AttemptMeter()
        self._call_ids: dict[int, str] = {}

    async def answer(self, request: ModelRequest) -> step_pb2.LlmResponse:
        """Streams attempts, of the model and then of its fallbacks, until one answers. Raises the last ModelError."""
        try:
            while True:
                self._meter = AttemptMeter()
                try:
                    return self._whole(await self._streamed(request))
                except ModelError as error:
                    self._release_call_ids()
                    if error.lost_usage is not None:
                        self._price(error.lost_usage)
                    await self._go_on(error)
        except asyncio.CancelledError:
            self._leave()
            raise

    def _jitter(self) -> float:
        """Between a half and one, by the run, the effect and the attempt."""
        seed = ids.derived_id(self._execution.facts.key_root, f"{self._key}#{self._attempt}")
        return 0.5 + random.Random(seed).random() / 2

    @property
    def attempt(self) -> int:
        """The attempt in force, from 1."""
        return self._attempt

    @property
    def is_sent(self) -> bool:
        """Whether the attempt in force has got as far as its provider."""
        return self._meter.is_sent

    def recover(self) -> None:
        """Says that this attempt follows one that was lost with whoever made it; what that one used nobody knows."""
        event = self._event()
        event.llm_retrying.reason = event_pb2.RETRY_REASON_RECOVERED
        event.llm_retrying.next_model = self._succession.model.name
        self._execution.emit(event)

    async def _go_on(self, error: ModelError) -> None:
        """Begins the next attempt, if there is to be one. Raises the error where not."""
        failed = self._succession.model
        delay = self._succession.go_on(error, is_sent=self._meter.is_sent)
        if delay is None:
            raise error
        delay *= self._jitter()
        if self._succession.model is failed:
            delay = max(delay, error.retry_after or 0.0)
        self._attempt += 1
        event = self._event()
        retrying = event.llm_retrying
        retrying.reason = error.retry or event_pb2.RETRY_REASON_REFUSED
        retrying.error.CopyFrom(error.to_agent_error(agent=self._frame.name, invocation_id=self._frame.invocation_id))
        wait = duration_pb2.Duration()
        wait.FromNanoseconds(int(delay * 1e9))
        retrying.delay.CopyFrom(wait)
        retrying.next_model = self._succession.model.name
        retrying.not_sent = not self._meter.is_sent
        if error.lost_usage is not None:
            retrying.lost_usage.CopyFrom(error.lost_usage)
        self._execution.emit(event)
        self._meter = AttemptMeter()
        # On disk before the provider is asked: whoever takes the run over goes on from this attempt.
        await self._writer.committed()
        await self._execution.clock.sleep(delay)

    def _leave(self) -> None:
        """Tells whoever ends a call that was cancelled how far its last attempt had come."""
        opened, meter = self._frame.record, self._meter
        if not meter.is_sent:
            opened.unsent.add(self._key)
        if meter.usage is not None:
            self._price(meter.usage)
            opened.lost[self._key] = meter.usage

    async def _streamed(self, request: ModelRequest) -> step_pb2.LlmResponse:
        response: step_pb2.LlmResponse | None = None
        size = 0
        model = self._succession.model
        stream = cast(AsyncGenerator[Delta | step_pb2.LlmResponse, None], model.stream(request, meter=self._meter))
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, step_pb2.LlmResponse):
                    response = item
                    continue
                size += size_of(item.text if isinstance(item, TextDelta | ReasoningDelta) else item.arguments)
                if size > MAX_TEXT_BYTES:
                    raise _too_large()
                if self._delta(item):
                    await self._writer.room()
        if response is None:
            raise ModelError(
                f"The model {model.name!r} ended its stream without an answer.",
                reason=error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE,
                retry=event_pb2.RETRY_REASON_BAD_RESPONSE,
            )
        return response

    def _delta(self, item: Delta) -> bool:
        if isinstance(item, TextDelta):
            return self._piece(events.LLM_OUTPUT_TEXT_DELTA, "", item.text, "")
        if isinstance(item, ReasoningDelta):
            return self._piece(events.LLM_REASONING_DELTA, "", item.text, "")
        call_id = self._call_id(item.index, item.provider_call_id)
        return self._piece(events.LLM_TOOL_CALL_DELTA, call_id, item.arguments, item.name)

    def _piece(self, kind: int, subject: str, text: str, name: str) -> bool:
        self._execution.cancelling.refuse_sealed(self._key)
        if self._index is None or not (text or name):
            return False

        def make() -> event_pb2.AgentEvent:
            event = self._event()
            event.ClearField("effect_key")
            event.ClearField("trace_id")
            event.ClearField("span_id")
            if kind == events.LLM_TOOL_CALL_DELTA:
                event.llm_tool_call_delta.call_id = subject
                event.llm_tool_call_delta.name = name
            return event

        return self._writer.delta(DeltaChunk(self._key, kind, subject, text), self._frame.joining, make)

    def _call_id(self, position: int, provider_call_id: str) -> str:
        """The provider's id if this invocation has not used it, else one made of the step and the position.

        It is taken at once: another lane's model may give the same one before this answer is whole.
        """
        if position not in self._call_ids:
            is_new = provider_call_id and provider_call_id not in self._frame.call_ids
            self._call_ids[position] = provider_call_id if is_new else f"{self._index}.{position}"
            self._frame.call_ids.add(self._call_ids[position])
        return self._call_ids[position]

    def _release_call_ids(self) -> None:
        """Gives back the ids of an attempt that failed: the next one may be given the same."""
        self._frame.call_ids.difference_update(self._call_ids.values())
        self._call_ids = {}

    def _event(self) -> event_pb2.AgentEvent:
        event = self._frame.record.in_step(self._frame.event(self._key, traced=self._traced), self._index)
        event.attempt = self._attempt
        return event

    def _whole(self, response: step_pb2.LlmResponse) -> step_pb2.LlmResponse:
        position = 0
        for part in response.message.parts:
            if part.HasField("tool_call"):
                call = part.tool_call
                provider_id = call.provider_call_id
                call.call_id = self._call_id(position, provider_id)
                call.provider_call_id = "" if provider_id == call.call_id else provider_id
                position += 1
        if response.HasField("usage"):
            self._price(response.usage)
        if size_of(response.raw_json) > _MAX_RAW_BYTES:
            response.ClearField("raw_json")
        if any(part.ByteSize() > MAX_TEXT_BYTES for part in response.message.parts):
            raise _too_large(response.usage)
        return response

    def _price(self, used: usage_pb2.Usage) -> None:
        rates = self._succession.model.price
        if rates is not None and usage.is_reported(used):
            cost = cost_of(used, rates)
            if cost is not None:
                used.cost_nanos, used.currency_code = cost, rates.currency_code


def _too_large(used: usage_pb2.Usage | None = None) -> ModelError:
    return ModelError(
        f"The model's answer is longer than {MAX_TEXT_BYTES // 1024} KiB. Lower max_output_tokens in its settings.",
        reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        lost_usage=used,
        is_of_the_request=True,
    )
