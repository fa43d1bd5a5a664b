"""Model sections of bough.yaml, each validated by itself and against the others."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from bough_server.documents.yaml import FieldPath, suggestion
from bough_server.models.openai.chat_request import ChatDialect, MaxTokensField, SentReasoning, ToolChoice
from bough_server.models.presets import PRESETS, Preset
from bough_server.settings_sections import Count, FilePath, Flag, Seconds, Section, VariableName

REMOTE: Final = ("openai", "anthropic", "gemini")
"""Providers that are called over a network."""


class TimeoutSection(Section):
    """How long a provider may be silent."""

    start: Annotated[Seconds, Field(gt=0)] = 60.0
    """The time until an answer begins."""
    idle: Annotated[Seconds, Field(gt=0)] = 60.0
    """The time between two pieces of an answer."""


class PriceSection(Section):
    """Prices in `currency`, as providers list them."""

    input_per_million: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """The price of a million input tokens, such as 0.15."""
    output_per_million: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """The price of a million output tokens."""
    cached_input_per_million: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """The price of a million input tokens that the provider had cached. Unset: that of other input."""
    cache_write_per_million: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """The price of a million input tokens that the provider put into its cache. Unset: that of other input."""


class BreakerSection(Section):
    """The circuit breaker: when a model that fails is not called for a while."""

    failures: Count = 5
    """The number of failures in a row after which the model is not called; 0 for never."""
    cooldown: Annotated[Seconds, Field(gt=0)] = 15.0
    """How long the model is not called, before one call tries it again."""


class ModelSection(Section):
    """A model that agents name by its key in `models`, or an alias of one."""

    alias: str = ""
    """The name of another model in this file; then nothing else is set."""
    provider: Literal["openai", "anthropic", "gemini", "scripted", "local"] | None = None
    """`openai`: any server that speaks OpenAI's API. `anthropic`: Anthropic's Messages API. `gemini`: Google's
    Gemini API. `scripted`: answers from a file. `local`: the embedded model. Required unless `alias` is set.
    """
    preset: Preset | None = None
    """A known provider that speaks Chat Completions: sets `base_url`, `api_key_env` and how requests are written.
    Each of these fields may still be set.
    """
    api: Literal["chat", "responses"] = "chat"
    """The provider's API: `chat` for Chat Completions, `responses` for Responses."""
    structured_output: Flag = True
    """Whether the provider takes a JSON Schema for its answer; if not, the schema is part of the instruction."""
    max_tokens_field: MaxTokensField = "max_completion_tokens"
    """The name under which Chat Completions is sent an agent's `max_output_tokens`."""
    tool_choice: ToolChoice = "required"
    """How Chat Completions is asked for a tool call that an agent needs: `required`, or `any`, or not at all (`auto`),
    for providers that refuse both. An agent that gets none asks again.
    """
    reasoning: SentReasoning = "as_sent"
    """What of a model's reasoning Chat Completions gets back. `as_sent`: all, in the field that it came in. `required`:
    and an empty `reasoning_content` with each other message that calls tools. `none`: nothing.
    """
    stream_usage: Flag = True
    """Whether Chat Completions is asked for usage, by `stream_options`."""
    prompt_cache: Flag = True
    """Whether requests to `anthropic` mark what its cache should keep: the instruction, and all up to the last message.
    """
    encrypted_reasoning: Flag = False
    """Whether a model of the Responses API is asked for its encrypted reasoning, which is then sent back to it."""
    model: str = ""
    """The provider's name of the model; required but for `scripted` and `local`."""
    base_url: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    """The URL of a server that speaks the API. Unset: the provider's."""
    api_key_env: VariableName = ""
    """Name of the environment variable that holds the key; never the key itself. Default for `anthropic`
    and `gemini`: `ANTHROPIC_API_KEY` and `GEMINI_API_KEY`.
    """
    script: FilePath | None = None
    """The file that a `scripted` model answers from, relative to this file; required for `scripted`."""
    keep_raw: Flag = False
    """Whether answers carry the provider's events as they came, 256 KiB at most; not for `scripted` and `local`."""
    timeouts: TimeoutSection = TimeoutSection()
    """How long the model may be silent."""
    retries: Annotated[Count, Field(le=10)] = 2
    """The number of attempts after the first one."""
    fallbacks: tuple[str, ...] = ()
    """The models that answer a call, in this order, if this one cannot; each with the settings of its entry."""
    max_concurrency: Annotated[Count, Field(ge=1)] | None = None
    """Calls at the same time, but for `local`; further ones wait. Unset: no limit."""
    requests_per_minute: Annotated[Count, Field(ge=1)] | None = None
    """Requests in any 60 seconds; further ones wait. Unset: no limit."""
    tokens_per_minute: Annotated[Count, Field(ge=1)] | None = None
    """Tokens in any 60 seconds, input and output; further calls wait. Unset: no limit."""
    max_wait: Seconds = 60.0
    """How long an attempt may wait because of these two rates."""
    breaker: BreakerSection | None = None
    """When the model is not called because it fails. Unset: none for `scripted` and `local`, else the defaults."""
    price: PriceSection | None = None
    """The prices of the model's tokens. Unset: its calls have no cost."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: object) -> object:
        """Fill in the fields of the preset that are not set."""
        if not isinstance(value, dict) or "alias" in value:
            return value
        preset, provider = value.get("preset"), value.get("provider")
        defaults = PRESETS[preset] if isinstance(preset, str) and preset in PRESETS else {}
        if provider in ("anthropic", "gemini"):
            defaults = {"api_key_env": f"{provider.upper()}_API_KEY", **defaults}
        return {**defaults, **value}

    @property
    def dialect(self) -> ChatDialect:
        """How requests of Chat Completions are written."""
        return ChatDialect(
            structured_output=self.structured_output,
            max_tokens_field=self.max_tokens_field,
            tool_choice=self.tool_choice,
            reasoning=self.reasoning,
            stream_usage=self.stream_usage,
        )

    @model_validator(mode="after")
    def _check_fields(self) -> "ModelSection":
        if self.alias:
            others = self.model_fields_set - {"alias"}
            if others:
                raise ValueError(f"is an alias, which has no other fields; remove {', '.join(sorted(others))}")
        elif self.preset is not None and self.provider != "openai":
            raise ValueError(f"`preset` is for Chat Completions, and `provider` is {self.provider}: remove one of them")
        elif self.provider is None:
            raise ValueError(f"needs a provider ({', '.join(REMOTE)}, scripted or local) or an alias")
        elif self.provider in REMOTE and not self.model:
            raise ValueError("needs `model`, the provider's name for the model")
        elif self.provider == "scripted" and self.script is None:
            raise ValueError("needs `script`, the path of a script file")
        return self


def model_problems(models: Mapping[str, ModelSection]) -> list[tuple[FieldPath, str]]:
    """Return a problem for each alias and fallback that names no model or forms a cycle."""
    return [*_alias_problems(models), *_fallback_problems(models)]


def _alias_problems(models: Mapping[str, ModelSection]) -> list[tuple[FieldPath, str]]:
    problems: list[tuple[FieldPath, str]] = []
    for name, model in models.items():
        seen = [name]
        while model.alias:
            if model.alias not in models:
                if len(seen) == 1:  # a later alias of the chain is reported under its own name
                    message = f"There is no model {model.alias!r}.{suggestion(model.alias, models)}"
                    problems.append((("models", name, "alias"), message))
                break
            if model.alias in seen:
                if model.alias == name:  # a chain that only leads into a cycle is not part of it
                    problems.append((("models", name, "alias"), f"forms a cycle: {' > '.join([*seen, name])}"))
                break
            seen.append(model.alias)
            model = models[model.alias]
    return problems


def _fallback_problems(models: Mapping[str, ModelSection]) -> list[tuple[FieldPath, str]]:
    problems: list[tuple[FieldPath, str]] = []
    for name, model in models.items():
        for index, other in enumerate(model.fallbacks):
            if other not in models:
                message = f"There is no model {other!r}.{suggestion(other, models)}"
                problems.append((("models", name, "fallbacks", index), message))
        if cycle := _fallback_cycle(name, models):
            problems.append((("models", name, "fallbacks"), f"forms a cycle: {' > '.join(cycle)}"))
    return problems


def _fallback_cycle(name: str, models: Mapping[str, ModelSection]) -> list[str]:
    """Return a chain of fallbacks from a model back to itself; empty if there is none."""
    chains, seen = [[name]], {name}
    while chains:
        chain = chains.pop()
        for fallback in models[chain[-1]].fallbacks:
            other = _follow_aliases(fallback, models)
            if other == name:
                return [*chain, name]
            if other in models and other not in seen:
                seen.add(other)
                chains.append([*chain, other])
    return []


def _follow_aliases(name: str, models: Mapping[str, ModelSection]) -> str:
    """Follow aliases and return the name at their end, known or not; empty if they form a cycle."""
    seen: set[str] = set()
    while name in models and models[name].alias:
        if name in seen:
            return ""
        seen.add(name)
        name = models[name].alias
    return name
