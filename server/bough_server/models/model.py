"""The Model protocol: requests, deltas, responses, and the price of a call."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal, Protocol

from bough.v1 import agent_pb2, message_pb2, step_pb2

_PER_MILLION: Final = 1_000_000


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
    settings: agent_pb2.ModelSettings = field(default_factory=agent_pb2.ModelSettings)
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
    """Prices of a million tokens in millionths of the currency; cached tokens cost `cached_input` where given."""

    input: float
    output: float
    cached_input: float | None = None


@dataclass(slots=True)
class Meter:
    """How far one attempt has come: to be read where it was left before its end, when nothing else knows."""

    usage: message_pb2.Usage | None = None
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
        self, request: ModelRequest, *, meter: Meter | None = None
    ) -> AsyncIterator[Delta | step_pb2.LlmResponse]:
        """One attempt: the deltas as they come, then exactly one LlmResponse as the last item.

        The text of the response's message is the concatenation of the TextDeltas; its tool calls have
        `provider_call_id` set and `call_id` empty. `provider`, `model`, `finish_reason`, `usage` (cost left out) and
        `raw_json` are filled in. Waits for its turn where the model is limited. Closing the iterator, or cancelling the
        task, closes the connection; `meter` is told when the provider is asked, and what it says of usage, at once.

        Raises ModelError, and nothing else on purpose.
        """
        ...

    async def close(self) -> None:
        """Ends connections and child processes."""
        ...


def cost_of(usage: message_pb2.Usage, price: Price) -> int | None:
    """The cost in micros, half rounded up; None where the tokens of a direction are unknown.

    Cached input tokens cost `cached_input` where the price has one, and as much as any other where it has not.
    """
    if not usage.HasField("input_tokens") or not usage.HasField("output_tokens"):
        return None
    cached = min(usage.cached_input_tokens, usage.input_tokens) if price.cached_input is not None else 0
    exact = (
        (usage.input_tokens - cached) * _exact(price.input)
        + cached * _exact(price.cached_input or 0.0)
        + usage.output_tokens * _exact(price.output)
    ) / _PER_MILLION
    return int(exact + Fraction(1, 2))


def _exact(price: float) -> Fraction:
    """The price as it was written: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(repr(price))
