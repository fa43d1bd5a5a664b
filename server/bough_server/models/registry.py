"""Configured models by name, with their aliases, fallbacks and limits.

Building them opens no connection and starts no process: an unreachable provider is an error of the first call.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bough.v1 import model_pb2
from bough_server.clock import Clock, SystemClock
from bough_server.errors import ConfigurationError
from bough_server.models.anthropic.request import MessagesApi
from bough_server.models.config import REMOTE, ModelSection
from bough_server.models.endpoint import Timeouts
from bough_server.models.gemini.request import GeminiApi
from bough_server.models.limiter import BreakerPolicy, ModelLimiter, RatePolicy
from bough_server.models.local.model import LocalModel
from bough_server.models.local.process import SLOTS
from bough_server.models.model import DEFAULT_CURRENCY, Model, Price, RetryPolicy
from bough_server.models.openai.client import ChatApi, ResponsesApi
from bough_server.models.remote import Api, RemoteModel
from bough_server.models.scripted.model import ScriptedModel
from bough_server.models.scripted.script import Script, read_script

DEFAULT: Final = "default"


class ConfiguredModels:
    """The models of a configuration, which it owns and closes."""

    def __init__(self, models: Mapping[str, Model], aliases: Mapping[str, str], *, default: str) -> None:
        self._models = dict(models)
        self._aliases = dict(aliases)
        self._default = default

    def get(self, name: str) -> Model:
        """Return the model of a name, following aliases; empty: the default. Raises KeyError if there is none."""
        name = name or self._default
        return self._models[self._aliases.get(name, name)]

    def list(self) -> list[model_pb2.ModelInfo]:
        """Return every name that a definition may use, aliases included, sorted."""
        named = {**{name: name for name in self._models}, **self._aliases}
        return [
            model_pb2.ModelInfo(
                name=name,
                provider=self._models[target].provider,
                model=self._models[target].model,
                fallbacks=self._models[target].fallbacks,
            )
            for name, target in sorted(named.items())
        ]

    async def close(self) -> None:
        """Close every model, even if closing one fails. Raises ExceptionGroup with the failures."""
        failures: list[Exception] = []
        for model in self._models.values():
            try:
                await model.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("Not every model could be closed.", failures)


def build_models(
    configs: Mapping[str, ModelSection],
    *,
    secrets: Mapping[str, str],
    folder: Path,
    currency: str = DEFAULT_CURRENCY,
    default: str = DEFAULT,
    clock: Clock | None = None,
) -> ConfiguredModels:
    """Build the models of a configuration; scripts are relative to `folder`, keys are looked up in `secrets`.

    `currency` is the currency of all prices. A missing key is an error of the model's first call, so that a server
    starts without the keys it does not use. Raises ConfigurationError if an alias or a fallback names no model or forms
    a cycle, a provider is unknown, or a script is invalid.
    """
    aliases = {name: _follow_aliases(name, configs) for name, config in configs.items() if config.alias}
    models = {
        name: _model(
            name,
            config,
            fallbacks=_resolve_fallbacks(name, configs),
            secrets=secrets,
            folder=folder,
            price=_price(config, currency),
            limiter=_limiter(name, config, clock or SystemClock()),
        )
        for name, config in configs.items()
        if not config.alias
    }
    return ConfiguredModels(models, aliases, default=default)


def _follow_aliases(name: str, configs: Mapping[str, ModelSection]) -> str:
    seen = [name]
    while alias := configs[seen[-1]].alias:
        if alias not in configs:
            raise ConfigurationError(f"models.{seen[-1]}.alias: There is no model {alias!r}.")
        if alias in seen:
            raise ConfigurationError(f"models.{name}.alias: forms a cycle: {' > '.join([*seen, alias])}")
        seen.append(alias)
    return seen[-1]


def _resolve_fallbacks(name: str, configs: Mapping[str, ModelSection]) -> Sequence[str]:
    """Return every model that a call of this one may fall back to, in order: each fallback, followed by its own."""
    order: list[str] = []

    def follow(chain: list[str]) -> None:
        for fallback in configs[chain[-1]].fallbacks:
            if fallback not in configs:
                raise ConfigurationError(f"models.{chain[-1]}.fallbacks: There is no model {fallback!r}.")
            other = _follow_aliases(fallback, configs)
            if other in chain:
                cycle = " > ".join([*chain[chain.index(other) :], other])
                raise ConfigurationError(f"models.{other}.fallbacks: forms a cycle: {cycle}")
            if other not in order:
                order.append(other)
                follow([*chain, other])

    follow([name])
    return order


def _limiter(name: str, config: ModelSection, clock: Clock) -> ModelLimiter:
    """Return a model's limiter. By default only models that are called over a network have a breaker."""
    breaker = BreakerPolicy() if config.provider in REMOTE else None
    if config.breaker is not None:
        breaker = BreakerPolicy(failures=config.breaker.failures, cooldown=config.breaker.cooldown)
    # More calls than the embedded model's process has slots would only wait inside it, on their timeouts.
    slots = SLOTS if config.provider == "local" else config.max_concurrency or 0
    rates = RatePolicy(requests=config.requests_per_minute, tokens=config.tokens_per_minute, max_wait=config.max_wait)
    return ModelLimiter(name=name, max_concurrency=slots, breaker=breaker, rates=rates, clock=clock)


def _model(
    name: str,
    config: ModelSection,
    *,
    fallbacks: Sequence[str],
    secrets: Mapping[str, str],
    folder: Path,
    price: Price | None,
    limiter: ModelLimiter,
) -> Model:
    retry = RetryPolicy(retries=config.retries)
    if config.provider in REMOTE:
        return _remote(name, config, fallbacks=fallbacks, secrets=secrets, price=price, limiter=limiter)
    if config.provider == "local":
        return LocalModel(
            name=name,
            retry=retry,
            fallbacks=fallbacks,
            price=price,
            config_digest=_digest(config),
            limiter=limiter,
        )
    if config.provider != "scripted":
        known = f"{', '.join(REMOTE)}, scripted or local"
        raise ConfigurationError(f"models.{name}.provider: must be {known}, not {config.provider!r}")
    if config.script is None:
        raise ConfigurationError(f"models.{name}.script: is required: the path of a script file")
    script = read_script(folder / config.script)
    return ScriptedModel(
        name=name,
        script=script,
        model=config.model or config.script.stem,
        retry=retry,
        fallbacks=fallbacks,
        price=price,
        config_digest=_digest(config, script),
        limiter=limiter,
    )


def _remote(
    name: str,
    config: ModelSection,
    *,
    fallbacks: Sequence[str],
    secrets: Mapping[str, str],
    price: Price | None,
    limiter: ModelLimiter,
) -> RemoteModel:
    variable = config.api_key_env
    key = secrets.get(variable, "") if variable else ""
    missing = ""
    if variable and not key:
        missing = f"the environment variable {variable} is not set. Set it and start the server again."
    elif not variable and not config.base_url:
        missing = f"models.{name}.api_key_env does not say which environment variable holds it."
    return RemoteModel(
        name=name,
        provider=config.provider or "",
        model=config.model,
        api=_api(config),
        base_url=config.base_url,
        key=key,
        timeouts=Timeouts(start=config.timeouts.start, idle=config.timeouts.idle),
        keep_raw=config.keep_raw,
        missing_key=missing,
        retry=RetryPolicy(retries=config.retries),
        fallbacks=fallbacks,
        price=price,
        config_digest=_digest(config),
        limiter=limiter,
    )


def _api(config: ModelSection) -> Api:
    if config.provider == "anthropic":
        return MessagesApi(structured_output=config.structured_output, caches=config.prompt_cache)
    if config.provider == "gemini":
        return GeminiApi(model=config.model, structured_output=config.structured_output)
    if config.api == "chat":
        return ChatApi(dialect=config.dialect)
    return ResponsesApi(encrypted_reasoning=config.encrypted_reasoning, structured_output=config.structured_output)


def _price(config: ModelSection, currency: str) -> Price | None:
    if config.price is None:
        return None
    return Price(
        input_per_million=config.price.input_per_million,
        output_per_million=config.price.output_per_million,
        cached_input_per_million=config.price.cached_input_per_million,
        cache_write_per_million=config.price.cache_write_per_million,
        currency_code=currency,
    )


_SENT: Final = ("structured_output", "max_tokens_field", "tool_choice", "reasoning", "encrypted_reasoning")
"""The fields of a model's configuration that decide what a provider is sent of an agent's request."""


def _digest(config: ModelSection, script: Script | None = None) -> str:
    """Return the hash of what an answer depends on.

    Retries, timeouts, limits, prices and the key do not count, nor do requests for usage and the marks for a cache.
    """
    facts: dict[str, object] = {
        "provider": config.provider,
        "api": config.api,
        "model": config.model,
        "base_url": config.base_url,
    }
    if config.provider in REMOTE:
        facts |= config.model_dump(include=set(_SENT))
    if script is not None:
        facts["script"] = {
            agent: [turn.model_dump(mode="json") for turn in turns] for agent, turns in script.agents.items()
        }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
