"""Attempts of one model call: retries, fallbacks, deltas and the complete answer."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import groupby, takewhile
from typing import Final, cast

import structlog
from google.protobuf import duration_pb2

from bough.v1 import error_pb2, eval_set_pb2, event_pb2, step_pb2, usage_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.execution import Execution
from bough_server.engine.recorder import DeltaChunk
from bough_server.errors import ModelError, RunError
from bough_server.log import events, usage
from bough_server.models.model import (
    AttemptMeter,
    Delta,
    Deltas,
    Model,
    ModelRequest,
    TextDelta,
    ToolCallDelta,
    cost_of,
)
from bough_server.observability.tracing import Traced
from bough_server.runtime.agent import Resolver
from bough_server.runtime.faults import build_model_error, find_fault
from bough_server.runtime.running_agent import RunningAgent
from bough_server.truncation import MAX_TEXT_BYTES, size_of


class FallbackChain:
    """Fallback chain of a model call: current model, retries used, next models. Each model has its own retries."""

    def __init__(self, models: Sequence[Model], *, tries: int = 1) -> None:
        self._models = list(models)
        self._tries = tries

    @property
    def model(self) -> Model:
        """The current model."""
        return self._models[0]

    def advance(self, error: ModelError, *, is_sent: bool) -> float | None:
        """Choose the model of the next attempt after a failure; return its delay in seconds, None if there is none.

        An attempt that was not sent, because its model's circuit is open or it has too many calls, moves to the next
        model at once. The delay excludes jitter and the provider's retry-after.
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


def build_fallback_chain(resolver: Resolver, name: str, recorded: Sequence[event_pb2.AgentEvent] = ()) -> FallbackChain:
    """Return the fallback chain of a call; a call that the log shows as started continues with its last model.

    Raises RunError MODEL_UNAVAILABLE if that model is not configured; fallbacks that are not configured are skipped.
    """
    attempted = list(_list_attempt_models(recorded))
    model = resolver.model(attempted[-1] if attempted else name)
    if model is None:
        raise RunError(
            f"There is no model {name!r} in the server's configuration.",
            reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
        )
    after = _list_remaining_fallbacks(resolver, attempted[0], attempted[-1]) if attempted else None
    names = model.fallbacks if after is None else after
    others = [found for other in names if (found := resolver.model(other)) is not None]
    # Recorded attempts of the last model count against its retries, those of a lost server included: an answer that
    # crashes the server must not be requested forever.
    lost = sum(1 for _ in takewhile(lambda one: one == attempted[-1], reversed(attempted)))
    return FallbackChain([model, *others], tries=lost + 1)


def _list_attempt_models(recorded: Sequence[event_pb2.AgentEvent]) -> Sequence[str]:
    """Return the model of each attempt in the log."""
    named = [event.llm_retrying.next_model or event.llm_started.model for event in recorded]
    return [name for name in named if name]


def _list_remaining_fallbacks(resolver: Resolver, first: str, last: str) -> Sequence[str] | None:
    """Return the first model's fallbacks after the last attempted model; None if that is not among them."""
    model = resolver.model(first)
    order = [first, *model.fallbacks] if model is not None else []
    return order[order.index(last) + 1 :] if last in order else None


_log = structlog.get_logger(__name__)

_MAX_RAW_BYTES: Final = 512 * 1024

_Stream = tuple[int, str, str]
"""Kind, call id and name of deltas that are one text; a name begins another event."""
_TEXT: Final[_Stream] = (events.LLM_OUTPUT_TEXT_DELTA, "", "")
_REASONING: Final[_Stream] = (events.LLM_REASONING_DELTA, "", "")


class ModelAttempts:
    """The attempts of one model call: `key` is its effect, `index` its step, None for a call that is no step.

    A call that is no step, such as a summary, records no deltas: its text is not its agent's.
    """

    def __init__(
        self,
        execution: Execution,
        running: RunningAgent,
        *,
        key: str,
        index: int | None,
        chain: FallbackChain,
        traced: Traced,
        attempt: int,
    ) -> None:
        self._execution = execution
        self._writer = execution.writer
        self._running = running
        self._key = key
        self._index = index
        self._chain = chain
        self._traced = traced
        self._attempt = attempt
        self._meter = AttemptMeter()
        self._fault: int | None = None
        self._call_ids: dict[int, str] = {}
        self._size = 0
        """Bytes that the current attempt has streamed."""

    async def answer(self, request: ModelRequest) -> step_pb2.LlmResponse:
        """Stream attempts, of the model and then of its fallbacks, until one answers. Raises the last ModelError."""
        self._running.open_invocation.unsent.discard(self._key)
        try:
            while True:
                self._meter = AttemptMeter()
                try:
                    return self._complete_response(await self._stream_attempt(request))
                except ModelError as error:
                    self._release_call_ids()
                    if error.lost_usage is not None:
                        self._complete_usage(error.lost_usage)
                    await self._retry(error)
        except asyncio.CancelledError:
            self._note_partial_usage()
            raise

    def _jitter(self) -> float:
        """Return a factor from 0.5 to 1, derived from the run, the effect and the attempt."""
        seed = ids.derive_id(self._execution.facts.key_root, f"{self._key}#{self._attempt}")
        return 0.5 + random.Random(seed).random() / 2

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1."""
        return self._attempt

    @property
    def is_sent(self) -> bool:
        """True if the current attempt was sent to its provider."""
        return self._meter.is_sent

    @property
    def is_unanswered(self) -> bool:
        """True if the current attempt was sent, and its provider sent nothing of an answer."""
        return self._meter.is_sent and not self._size and self._meter.usage is None

    @property
    def fault(self) -> int | None:
        """The number of the fault that was injected into the current attempt, if one was."""
        return self._fault

    def recover(self) -> None:
        """Record that this attempt replaces one lost in a crash, whose usage is unknown."""
        event = self._event()
        event.llm_retrying.reason = event_pb2.RETRY_REASON_RECOVERED
        event.llm_retrying.next_model = self._chain.model.name
        self._execution.emit(event)

    async def _retry(self, error: ModelError) -> None:
        """Record the next attempt and wait for its delay. Raises the error if there is no further attempt."""
        failed = self._chain.model
        delay = self._chain.advance(error, is_sent=self._meter.is_sent)
        if delay is None:
            raise error
        delay *= self._jitter()
        if self._chain.model is failed:  # another model's provider did not ask for a delay
            delay = max(delay, error.retry_after or 0.0)
        self._attempt += 1
        event = self._event()
        retrying = event.llm_retrying
        retrying.reason = error.retry or event_pb2.RETRY_REASON_REFUSED
        retrying.error.CopyFrom(self._running.error_of(error))
        wait = duration_pb2.Duration()
        wait.FromNanoseconds(int(delay * 1e9))
        retrying.delay.CopyFrom(wait)
        retrying.next_model = self._chain.model.name
        retrying.not_sent = not self._meter.is_sent
        retrying.unanswered = self.is_unanswered
        if self._fault is not None:
            retrying.fault_index = self._fault
        if error.lost_usage is not None:
            retrying.lost_usage.CopyFrom(error.lost_usage)
        self._execution.emit(event)
        # A cancellation during the delay must not find the failed attempt's usage again: it is in llm_retrying.
        self._meter = AttemptMeter()
        # Committed before the provider is called: a worker that takes the run over continues from this attempt.
        await self._writer.wait_for_commit()
        await self._execution.clock.sleep(delay)

    def _note_partial_usage(self) -> None:
        """Note how far the last attempt of a cancelled call got, for the llm_failed that the cancellation records."""
        opened, meter = self._running.open_invocation, self._meter
        if not meter.is_sent:
            opened.unsent.add(self._key)
        if meter.usage is not None:
            self._complete_usage(meter.usage)
            opened.partial_usage[self._key] = meter.usage

    async def _stream_attempt(self, request: ModelRequest) -> step_pb2.LlmResponse:
        response: step_pb2.LlmResponse | None = None
        self._size = 0
        model = self._chain.model
        self._inject_fault(model)
        # aclosing: the request must be closed now if the loop is left, not when the generator is garbage-collected.
        stream = cast(AsyncGenerator[Deltas | step_pb2.LlmResponse, None], model.stream(request, meter=self._meter))
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, step_pb2.LlmResponse):
                    response = item
                elif self._record(item):
                    await self._writer.wait_for_room()
        if response is None:
            raise ModelError(
                f"The model {model.name!r} ended its stream without an answer.",
                reason=error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE,
                retry=event_pb2.RETRY_REASON_BAD_RESPONSE,
            )
        return response

    def _inject_fault(self, model: Model) -> None:
        """Fail the attempt if the evaluation that the run belongs to says so. Raises ModelError."""
        mocks, resolver = self._execution.mocks, self._running.resolver
        if mocks is None:
            return

        def is_meant(fault: eval_set_pb2.EvalFault) -> bool:
            named = resolver.model(fault.model) if fault.model else None
            return named is not None and named.name == model.name

        self._fault = find_fault(mocks, f"{self._key}#{self._attempt}", agent=self._running.name, is_meant=is_meant)
        if self._fault is not None:
            # As an attempt that its provider refused: it counts, and is tried again.
            self._meter.is_sent = True
            raise build_model_error(mocks.faults[self._fault], model.name)

    def _record(self, deltas: Deltas) -> bool:
        """Record deltas; return True to await `wait_for_room` before the next. Raises ModelError over the limit."""
        has_to_wait = False
        for stream, group in groupby(deltas, self._stream_of):
            texts = [delta.arguments if isinstance(delta, ToolCallDelta) else delta.text for delta in group]
            fitting = self._limit_texts(texts)
            has_to_wait = self._buffer_texts(stream, fitting) or has_to_wait
            if len(fitting) < len(texts):
                raise _too_large()
        return has_to_wait

    def _stream_of(self, delta: Delta) -> _Stream:
        if isinstance(delta, ToolCallDelta):
            return events.LLM_TOOL_CALL_DELTA, self._call_id(delta.index, delta.provider_call_id), delta.name
        return _TEXT if isinstance(delta, TextDelta) else _REASONING

    def _limit_texts(self, texts: Sequence[str]) -> Sequence[str]:
        """Count texts; return those before the one that exceeds the limit of an answer."""
        for number, text in enumerate(texts):
            self._size += size_of(text)
            if self._size > MAX_TEXT_BYTES:
                return texts[:number]
        return texts

    def _buffer_texts(self, stream: _Stream, texts: Sequence[str]) -> bool:
        self._execution.cancellation.raise_if_cancelled(self._key)
        kind, subject, name = stream
        texts = texts if name else [text for text in texts if text]
        if self._index is None or not texts:
            return False

        def make() -> event_pb2.AgentEvent:
            # Deltas are most of a log's events and no replay reads them, so they carry neither key nor trace ids.
            event = self._event()
            event.ClearField("effect_key")
            event.ClearField("trace_id")
            event.ClearField("span_id")
            if kind == events.LLM_TOOL_CALL_DELTA:
                event.llm_tool_call_delta.call_id = subject
                event.llm_tool_call_delta.name = name
            return event

        return self._writer.buffer_delta(
            DeltaChunk(self._key, kind, subject, texts), self._running.delta_coalescing, make
        )

    def _call_id(self, position: int, provider_call_id: str) -> str:
        """Return the provider's call id if this invocation has not used it, else one made of branch, step and position.

        It is reserved at once: a model in another lane may use the same id before this answer is complete.
        """
        if position not in self._call_ids:
            is_new = provider_call_id and provider_call_id not in self._running.call_ids
            self._call_ids[position] = provider_call_id if is_new else self._own_call_id(position)
            self._running.call_ids.add(self._call_ids[position])
        return self._call_ids[position]

    def _own_call_id(self, position: int) -> str:
        own = f"{self._index}.{position}"
        # Parallel branches count their steps alike. The digest keeps ids as short as providers demand.
        branch = self._key.removeprefix(f"{self._running.scope}/").rpartition("/")[0]
        return f"{keys.digest(branch)[:12]}.{own}" if branch else own

    def _release_call_ids(self) -> None:
        """Release the call ids of a failed attempt: the next attempt may use the same ones."""
        self._running.call_ids.difference_update(self._call_ids.values())
        self._call_ids = {}

    def _event(self) -> event_pb2.AgentEvent:
        event = self._running.event(self._key, self._index, traced=self._traced)
        event.attempt = self._attempt
        return event

    def _complete_response(self, response: step_pb2.LlmResponse) -> step_pb2.LlmResponse:
        """Return the answer with call ids and costs, within the size limits. Raises ModelError if it is too large."""
        position = 0
        for part in response.message.parts:
            if part.HasField("tool_call"):
                call = part.tool_call
                provider_id = call.provider_call_id
                call.call_id = self._call_id(position, provider_id)
                call.provider_call_id = "" if provider_id == call.call_id else provider_id
                position += 1
        if response.HasField("usage"):
            self._complete_usage(response.usage)
        if size_of(response.raw_json) > _MAX_RAW_BYTES:
            response.ClearField("raw_json")
        if any(part.ByteSize() > MAX_TEXT_BYTES for part in response.message.parts):
            raise _too_large(response.usage)
        return response

    def _complete_usage(self, used: usage_pb2.Usage) -> None:
        """Bound what the provider reported, and set its cost."""
        rates = self._chain.model.price
        if wrong := usage.bound_tokens(used):
            _log.warning("a provider reported an impossible number of tokens", model=self._chain.model.name, **wrong)
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
