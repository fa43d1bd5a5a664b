"""The Model protocol: requests, deltas, responses, and the price of a call."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal, Protocol

from bough.v1 import message_pb2, model_pb2, step_pb2, usage_pb2

_NANOS: Final = Fraction(1_000, 1_000_000)
"""Billionths of the currency for a token, if a million tokens cost one millionth of it."""

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
"""What the providers' words for the end of an answer mean."""


DEFAULT_CURRENCY: Final = "USD"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as a model is told of it; the schema is JSON text."""

    name: str
    description: str
    input_schema_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What a model is asked. Messages have roles USER, ASSISTANT and TOOL; every call in them has its result."""

    messages: Sequence[message_pb2.Message]
    instruction: str = ""
    tools: Sequence[ToolSpec] = ()
    tool_choice: Literal["auto", "required"] = "auto"
    """Whether it may answer in words, or has to call one of the tools, of which there is one then at least."""
    settings: model_pb2.ModelSettings = field(default_factory=model_pb2.ModelSettings)
    output_schema_json: str = ""
    """What an answer in words has to fit instead, if anything. Whether it does is judged by whoever asks."""
    agent: str = ""
    """Who asks; providers do not send it, the scripted model chooses by it."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. `index` is the call's place in the answer; id and name are on its first piece."""

    index: int
    arguments: str
    provider_call_id: str = ""
    name: str = ""


Delta = TextDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a failed attempt is tried again, and how long to wait: base * 2^n, at most `longest`, with jitter."""

    retries: int = 2
    base: float = 0.5
    longest: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices of a million tokens in millionths of the currency; cached tokens cost `cached_input` if it is set."""

    input: float
    output: float
    cached_input: float | None = None
    currency_code: str = DEFAULT_CURRENCY


@dataclass(slots=True)
class AttemptMeter:
    """How far one attempt has come: to be read where it was left before its end, when nothing else knows."""

    usage: usage_pb2.Usage | None = None
    """What the provider has said that it used; None where it said nothing."""
    is_sent: bool = False
    """Whether the provider has been asked: not one that waits for its turn, or was refused before."""


class Model(Protocol):
    """One configured model of one provider."""

    @property
    def name(self) -> str:
        """The name in the configuration."""
        ...

    @property
    def provider(self) -> str:
        """ "openai", "scripted" or "local"."""
        ...

    @property
    def model(self) -> str:
        """The provider's own name for it."""
        ...

    @property
    def retry(self) -> RetryPolicy:
        """How failed attempts are tried again; the runtime does it, not the model."""
        ...

    @property
    def fallbacks(self) -> Sequence[str]:
        """The names of the models that a call goes on with, in order, when this one cannot answer it."""
        ...

    @property
    def price(self) -> Price | None:
        """Its price, where it has one."""
        ...

    @property
    def config_digest(self) -> str:
        """SHA-256 hex of the configuration without secrets."""
        ...

    def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncIterator[Delta | step_pb2.LlmResponse]:
        """One attempt: the deltas as they come, then exactly one LlmResponse as the last item.

        The text of the response's message is the concatenation of the TextDeltas; its tool calls have
        `provider_call_id` set and `call_id` empty. `provider`, `model`, both finish reasons, `usage` (without a cost)
        and `raw_json` are filled in. Waits for its turn where the model is limited. Closing the iterator, or cancelling
        the task, closes the connection; `meter` is told when the provider is asked, and what it says of usage, at once.

        Raises ModelError, and nothing else on purpose.
        """
        ...

    async def close(self) -> None:
        """Ends connections and child processes."""
        ...


def cost_of(usage: usage_pb2.Usage, price: Price) -> int | None:
    """Return the cost in billionths of the price's currency, half rounded up, at most the largest that its field holds.

    None if the tokens of a direction are unknown. Cached input tokens cost `cached_input` if the price has one, else as
    much as any other.
    """
    if not usage.HasField("input_tokens") or not usage.HasField("output_tokens"):
        return None
    cached = min(usage.cached_input_tokens, usage.input_tokens) if price.cached_input is not None else 0
    exact = _NANOS * (
        (usage.input_tokens - cached) * _exact(price.input)
        + cached * _exact(price.cached_input or 0.0)
        + usage.output_tokens * _exact(price.output)
    )
    return min(int(exact + Fraction(1, 2)), _LARGEST_COST)


def _exact(price: float) -> Fraction:
    """The price as it was written: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(repr(price))


def finish_reason_of(word: str, *, has_calls: bool, is_refused: bool = False) -> step_pb2.FinishReason.ValueType:
    """Return why a model stopped, from the provider's word for it.

    Several servers say "stop", and the Responses API says "completed", whatever the answer consists of: a complete
    answer that asks for calls ended for them, and one that is a refusal ended as such.
    """
    reason = FINISH_REASONS.get(word, step_pb2.FINISH_REASON_OTHER)
    if reason != step_pb2.FINISH_REASON_STOP:
        return reason
    if has_calls:
        return step_pb2.FINISH_REASON_TOOL_CALLS
    return step_pb2.FINISH_REASON_REFUSAL if is_refused else reason
