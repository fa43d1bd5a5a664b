"""What an operator may say of a model, as far as making one needs it; where it is written is the settings' business."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class TimeoutConfig(Protocol):
    """Seconds that a model may be silent."""

    @property
    def start(self) -> float:
        """Until its answer begins."""
        ...

    @property
    def idle(self) -> float:
        """Between two pieces of it."""
        ...


class PriceConfig(Protocol):
    """Prices of a million tokens in millionths of the currency."""

    @property
    def input(self) -> float:
        """Of tokens sent."""
        ...

    @property
    def output(self) -> float:
        """Of tokens written."""
        ...

    @property
    def cached_input(self) -> float | None:
        """Of tokens sent that the provider had cached; None for as much as any other."""
        ...


class BreakerConfig(Protocol):
    """When a model is left alone."""

    @property
    def failures(self) -> int:
        """After so many failures in a row; 0 for never."""
        ...

    @property
    def cooldown(self) -> float:
        """For so many seconds."""
        ...


class ModelConfig(Protocol):
    """What the operator says of one model; the settings have it."""

    @property
    def alias(self) -> str:
        """Another model's name; then nothing else counts."""
        ...

    @property
    def provider(self) -> str | None:
        """ "openai", "scripted" or "local"."""
        ...

    @property
    def api(self) -> str:
        """ "chat" or "responses"."""
        ...

    @property
    def structured_output(self) -> bool:
        """Whether its provider can be asked for JSON of a schema."""
        ...

    @property
    def keep_raw(self) -> bool:
        """Whether answers carry their provider's events."""
        ...

    @property
    def encrypted_reasoning(self) -> bool:
        """Whether a model of the Responses API is asked for its encrypted reasoning."""
        ...

    @property
    def model(self) -> str:
        """The provider's name for it."""
        ...

    @property
    def base_url(self) -> str:
        """Where it is; empty for OpenAI's own address."""
        ...

    @property
    def api_key_env(self) -> str:
        """The variable that holds the key; empty where none is needed."""
        ...

    @property
    def script(self) -> Path | None:
        """The file that a scripted model answers from."""
        ...

    @property
    def timeouts(self) -> TimeoutConfig:
        """How long it may be silent."""
        ...

    @property
    def retries(self) -> int:
        """How often a failed attempt is tried again."""
        ...

    @property
    def fallbacks(self) -> Sequence[str]:
        """The models that a call goes on with when this one cannot answer it."""
        ...

    @property
    def max_concurrency(self) -> int | None:
        """How many calls it takes at once; None for any."""
        ...

    @property
    def requests_per_minute(self) -> int | None:
        """How many requests any 60 seconds may have; None for any."""
        ...

    @property
    def tokens_per_minute(self) -> int | None:
        """How many tokens any 60 seconds may have, sent and written; None for any."""
        ...

    @property
    def max_wait(self) -> float:
        """How many seconds an attempt may wait for its turn by these rates."""
        ...

    @property
    def breaker(self) -> BreakerConfig | None:
        """When it is left alone; None for the provider's default."""
        ...

    @property
    def price(self) -> PriceConfig | None:
        """What it costs."""
        ...
