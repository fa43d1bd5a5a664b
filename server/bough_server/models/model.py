"""The Model protocol: requests and what is kept of their messages, deltas, responses, and the price of a call."""

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import lcm
from types import MappingProxyType
from typing import Final, Literal, Protocol

import msgspec

from bough.v1 import message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.log.blobs import blobs_in

_encoder: Final = msgspec.json.Encoder()

_MOST_FORMATS: Final = 2
"""The most formats that are kept: a message is usually sent to one model, or to it and its fallback."""
_MOST_BYTES: Final = 64 * 1024
"""The most bytes of JSON that are kept of a message: a longer one has a file, and few messages have."""

_NANOS: Final = 1_000
"""Billionths of the currency that one token costs if a million tokens cost one unit of it."""

_LARGEST_COST: Final = 2**63 - 1

FINISH_REASONS: Final[Mapping[str, step_pb2.FinishReason.ValueType]] = MappingProxyType(
    {
        "": step_pb2.FINISH_REASON_UNSPECIFIED,
        "stop": step_pb2.FINISH_REASON_STOP,
        "completed": step_pb2.FINISH_REASON_STOP,
        "tool_calls": step_pb2.FINISH_REASON_TOOL_CALLS,
        "function_call": step_pb2.FINISH_REASON_TOOL_CALLS,
        "length": step_pb2.FINISH_REASON_LENGTH,
        "max_output_tokens": step_pb2.FINISH_REASON_LENGTH,
        "content_filter": step_pb2.FINISH_REASON_CONTENT_FILTER,
        "refusal": step_pb2.FINISH_REASON_REFUSAL,
    }
)
"""Finish reasons by the words that providers use for them."""


DEFAULT_CURRENCY: Final = "USD"


class JsonItems:
    """A list in a request's body, each of its items JSON already."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[bytes]) -> None:
        self.items = items


class MessageForms:
    """The forms of one message, which must not change."""

    __slots__ = ("_has_files", "_json", "message", "tokens")

    def __init__(self, message: message_pb2.Message) -> None:
        self.message = message
        self.tokens: int | None = None
        """Its estimated tokens; None until they have been counted."""
        self._has_files: bool | None = None
        self._json: dict[Hashable, Sequence[bytes]] = {}

    @property
    def has_files(self) -> bool:
        """True if the message or a tool result in it has a file."""
        if self._has_files is None:
            self._has_files = any(True for _ in blobs_in(self.message.parts))
        return self._has_files

    def json(
        self, format: Hashable, make: Callable[[message_pb2.Message], Iterable[Mapping[str, object]]]
    ) -> Sequence[bytes]:
        """Return the message as items of JSON in a format of requests; `make` returns the items."""
        found = self._json.get(format)
        if found is None:
            found = [encode_body(item) for item in make(self.message)]
            if sum(map(len, found)) <= _MOST_BYTES:
                if len(self._json) == _MOST_FORMATS:
                    del self._json[next(iter(self._json))]
                self._json[format] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as it is described to a model; `input_schema_json` is a JSON Schema as text."""

    name: str
    description: str
    input_schema_json: str


# Not frozen, because one is made for every model call: that would take four times as long.
@dataclass(slots=True, kw_only=True)
class ModelRequest:
    """One request to a model. Messages have the roles USER, ASSISTANT and TOOL; every tool call has its result."""

    messages: Sequence[message_pb2.Message]
    instruction: str = ""
    tools: Sequence[ToolSpec] = ()
    tool_choice: Literal["auto", "required"] = "auto"
    """`auto`: the model may answer in text; `required`: it must call a tool, and `tools` has at least one."""
    settings: model_pb2.ModelSettings = field(default_factory=model_pb2.ModelSettings)
    output_schema_json: str = ""
    """JSON Schema of a text answer; empty: none. The caller checks whether the answer matches it."""
    forms: Sequence[MessageForms] = field(default=(), repr=False, compare=False)
    """Kept forms of the first messages, which are the same in the next request; see `forms_of`.

    Empty once the request has the bytes of files.
    """
    agent: str = ""
    """The calling agent. Never sent to a provider; the scripted model selects its turns by it."""


# Not frozen, because one is made for every piece: that would take four times as long.
@dataclass(slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. `index` is the call's position in the answer; the first piece has the id and the name."""

    index: int
    arguments: str
    provider_call_id: str = ""
    name: str = ""


Delta = TextDelta | ReasoningDelta | ToolCallDelta

Deltas = Sequence[Delta]
"""Deltas that arrived together, in their order; at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retries of a failed attempt, with exponential backoff: base * 2^n seconds, at most `longest`, with jitter."""

    retries: int = 2
    base: float = 0.5
    longest: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices of a million tokens in units of the currency.

    Input that was read from or written to a cache costs as much as other input if it has no price.
    """

    input_per_million: float
    output_per_million: float
    cached_input_per_million: float | None = None
    cache_write_per_million: float | None = None
    currency_code: str = DEFAULT_CURRENCY


@dataclass(slots=True)
class AttemptMeter:
    """Progress of one attempt. It stays readable if the attempt is abandoned, when no response reports its usage."""

    usage: usage_pb2.Usage | None = None
    """Usage as the provider reported it so far; None if it reported none."""
    is_sent: bool = False
    """Whether the attempt passed the limiter and went to the provider; False while it waits, or if it was refused."""


def forms_of(request: ModelRequest) -> Sequence[MessageForms]:
    """Return the forms of all messages of a request: those that it has, and new ones for other messages."""
    kept = [
        form if form.message is message else MessageForms(message)
        for form, message in zip(request.forms, request.messages, strict=False)
    ]
    return [*kept, *map(MessageForms, request.messages[len(kept) :])]


def encode_body(body: Mapping[str, object]) -> bytes:
    """Return the body of a request as bytes."""
    return _encoder.encode(
        {
            key: msgspec.Raw(b"[" + b",".join(value.items) + b"]") if isinstance(value, JsonItems) else value
            for key, value in body.items()
        }
    )


class Model(Protocol):
    """One configured model of one provider."""

    @property
    def name(self) -> str:
        """Name in the configuration."""
        ...

    @property
    def provider(self) -> str:
        """Provider: "openai", "anthropic", "gemini", "scripted" or "local"."""
        ...

    @property
    def model(self) -> str:
        """The provider's name for the model."""
        ...

    @property
    def retry(self) -> RetryPolicy:
        """Retry policy for failed attempts; the runtime applies it, not the model."""
        ...

    @property
    def fallbacks(self) -> Sequence[str]:
        """Names of the models that a call tries next, in order, if this one cannot answer."""
        ...

    @property
    def price(self) -> Price | None:
        """Price of its tokens; None if none is configured."""
        ...

    @property
    def config_digest(self) -> str:
        """SHA-256 hex of the configuration without secrets."""
        ...

    def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncIterator[Deltas | step_pb2.LlmResponse]:
        """Make one attempt: yield the deltas as they arrive, then exactly one LlmResponse as the last item.

        All deltas that one read of the connection brought are one item; an error that follows them comes after it.
        The text of the response's message is the concatenation of the TextDeltas; its tool calls have
        `provider_call_id` set and `call_id` empty. `provider`, `model`, both finish reasons, `usage` (without a cost)
        and `raw_json` are filled in. Waits while the model's limits are reached. Closing the iterator, or cancelling
        the task, closes the connection. `meter` is updated at once when the request is sent and when usage is reported.

        Raises ModelError, and nothing else on purpose.
        """
        ...

    async def close(self) -> None:
        """Close connections and end child processes."""
        ...


def cost_of(usage: usage_pb2.Usage, price: Price) -> int | None:
    """Return the cost in billionths of the price's currency, rounded half up, at most 2^63 - 1.

    Return None if the input or the output tokens are unknown. Input tokens that were read from or
    written to a cache cost what the price says of them, or else as much as other input tokens.
    """
    if not usage.HasField("input_tokens") or not usage.HasField("output_tokens"):
        return None
    cached = min(usage.cached_input_tokens, usage.input_tokens) if price.cached_input_per_million is not None else 0
    fresh = usage.input_tokens - cached
    written = min(usage.cache_write_tokens, fresh) if price.cache_write_per_million is not None else 0
    numerators, denominator = _scale_rates(price)
    tokens = fresh - written, cached, written, usage.output_tokens
    exact = _NANOS * sum(count * rate for count, rate in zip(tokens, numerators, strict=True))
    return min((2 * exact + denominator) // (2 * denominator), _LARGEST_COST)


@cache
def _scale_rates(price: Price) -> tuple[Sequence[int], int]:
    """Return the rates of fresh input, cached input, written input and output as numerators of one denominator.

    They are exactly as they were written: 0.1 is a tenth, not the nearest binary fraction.
    """
    rates = price.input_per_million, price.cached_input_per_million, price.cache_write_per_million
    fractions = [Fraction(repr(rate or 0.0)) for rate in (*rates, price.output_per_million)]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions], denominator


def finish_reason_of(word: str, *, has_calls: bool, is_refused: bool = False) -> step_pb2.FinishReason.ValueType:
    """Return why a model stopped, from the provider's word for it.

    Several servers say "stop", and the Responses API says "completed", whatever the answer consists of. So the reason
    of a complete answer is TOOL_CALLS if it has calls, and REFUSAL if it is a refusal.
    """
    reason = FINISH_REASONS.get(word, step_pb2.FINISH_REASON_OTHER)
    if reason != step_pb2.FINISH_REASON_STOP:
        return reason
    if has_calls:
        return step_pb2.FINISH_REASON_TOOL_CALLS
    return step_pb2.FINISH_REASON_REFUSAL if is_refused else reason
