"""Sections of bough.yaml that describe models, each checked by itself and against the others."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from bough_server.documents import FieldPath, suggestion
from bough_server.settings_sections import Count, Flag, Seconds, Section


def _absolute(path: Path, info: ValidationInfo) -> Path:
    folder: Path = (info.context or {}).get("folder", Path.cwd())
    return folder / path


def _variable(name: str) -> str:
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]{0,127})?", name):
        raise ValueError("must be the name of an environment variable that holds the key, not the key")
    return name


class Timeouts(Section):
    """How long a model may be silent."""

    start: Annotated[Seconds, Field(gt=0)] = 60.0
    idle: Annotated[Seconds, Field(gt=0)] = 60.0


class PriceSection(Section):
    """Prices of a million tokens, in millionths of the currency."""

    input: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    output: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    cached_input: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class BreakerSection(Section):
    """When a model is left alone for a while."""

    failures: Count = 5
    """After how many failures in a row; 0 for never."""
    cooldown: Annotated[Seconds, Field(gt=0)] = 15.0
    """For how long, before one call may try it."""


class ModelSection(Section):
    """One model, or another name for one."""

    alias: str = ""
    """Another model's name; then nothing else is set."""
    provider: Literal["openai", "scripted", "local"] | None = None
    api: Literal["chat", "responses"] = "chat"
    structured_output: Flag = True
    """Whether the provider can be asked for JSON of a schema; if not, it is asked for it in words."""
    encrypted_reasoning: Flag = False
    """Whether a model of the Responses API is asked for its encrypted reasoning, to be sent back to it."""
    model: str = ""
    """The provider's name for it."""
    base_url: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    api_key_env: Annotated[str, AfterValidator(_variable)] = ""
    """The name of the environment variable that holds the key; never the key."""
    script: Annotated[Path, AfterValidator(_absolute)] | None = None
    keep_raw: Flag = False
    """Whether answers carry their provider's events."""
    timeouts: Timeouts = Timeouts()
    retries: Annotated[Count, Field(le=10)] = 2
    fallbacks: tuple[str, ...] = ()
    """The models that a call goes on with, in this order, when this one cannot answer it; each with its own."""
    max_concurrency: Annotated[Count, Field(ge=1)] | None = None
    requests_per_minute: Annotated[Count, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[Count, Field(ge=1)] | None = None
    max_wait: Seconds = 60.0
    """How long an attempt may wait for its turn by these two."""
    breaker: BreakerSection | None = None
    """None for the default: with openai that of BreakerSection, else none."""
    price: PriceSection | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "ModelSection":
        if self.alias:
            others = self.model_fields_set - {"alias"}
            if others:
                raise ValueError(f"is an alias and so has nothing else; leave out {', '.join(sorted(others))}")
        elif self.provider is None:
            raise ValueError("needs a provider (openai, scripted or local) or an alias")
        elif self.provider == "openai" and not self.model:
            raise ValueError("needs `model`, the provider's name for it")
        elif self.provider == "scripted" and self.script is None:
            raise ValueError("needs `script`, the file that it answers from")
        return self


def model_problems(models: Mapping[str, ModelSection]) -> list[tuple[FieldPath, str]]:
    """Aliases and fallbacks that lead nowhere or in a circle."""
    return [*_alias_problems(models), *_fallback_problems(models)]


def _alias_problems(models: Mapping[str, ModelSection]) -> list[tuple[FieldPath, str]]:
    problems: list[tuple[FieldPath, str]] = []
    for name, model in models.items():
        seen = [name]
        while model.alias:
            if model.alias not in models:
                if len(seen) == 1:
                    words = f"There is no model {model.alias!r}.{suggestion(model.alias, models)}"
                    problems.append((("models", name, "alias"), words))
                break
            if model.alias in seen:
                if model.alias == name:
                    problems.append((("models", name, "alias"), f"leads in a circle: {' > '.join([*seen, name])}"))
                break
            seen.append(model.alias)
            model = models[model.alias]
    return problems


def _fallback_problems(models: Mapping[str, ModelSection]) -> list[tuple[FieldPath, str]]:
    problems: list[tuple[FieldPath, str]] = []
    for name, model in models.items():
        for place, other in enumerate(model.fallbacks):
            if other not in models:
                words = f"There is no model {other!r}.{suggestion(other, models)}"
                problems.append((("models", name, "fallbacks", place), words))
        if circle := _way_back(name, models):
            problems.append((("models", name, "fallbacks"), f"leads in a circle: {' > '.join(circle)}"))
    return problems


def _way_back(name: str, models: Mapping[str, ModelSection]) -> list[str]:
    """The way by fallbacks from a model to itself; empty where there is none."""
    ways, seen = [[name]], {name}
    while ways:
        way = ways.pop()
        for fallback in models[way[-1]].fallbacks:
            other = _target(fallback, models)
            if other == name:
                return [*way, name]
            if other in models and other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


def _target(name: str, models: Mapping[str, ModelSection]) -> str:
    """The model that a name stands for; a name that leads nowhere, or in a circle, stands for nothing."""
    seen: set[str] = set()
    while name in models and models[name].alias:
        if name in seen:
            return ""
        seen.add(name)
        name = models[name].alias
    return name
