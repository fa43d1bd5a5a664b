"""Small teams of LLM agents for tests: definitions in a line, a script of what their models say."""

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from bough.v1 import agent_pb2, model_pb2, step_pb2
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import AttemptMeter, Deltas, Model, ModelRequest, Price, RetryPolicy
from bough_server.models.scripted.model import Gate, ScriptedModel
from bough_server.models.scripted.script import parse_script
from bough_server.tools.tool import Tool
from tests.support.run_harness import RunHarness, open_harness


def llm(
    name: str,
    *,
    links: Sequence[str | agent_pb2.AgentLink] = (),
    tools: Sequence[str | agent_pb2.ToolLink] = (),
    **fields: object,
) -> agent_pb2.AgentDefinition:
    """An LLM agent; `fields` are those of LlmAgent."""
    definition = agent_pb2.AgentDefinition(name=name, description=f"Does what {name} does.")
    definition.llm.CopyFrom(agent_pb2.LlmAgent(instruction=f"You are {name}.", **fields))  # type: ignore[arg-type]
    definition.llm.tools.extend(agent_pb2.ToolLink(name=one) if isinstance(one, str) else one for one in tools)
    definition.sub_agents.extend(agent_pb2.AgentLink(agent=one) if isinstance(one, str) else one for one in links)
    return definition


def script(**agents: Sequence[object]) -> str:
    """A script with these turns for each agent; a turn is a text or a mapping."""
    return json.dumps({"agents": agents})


def calls(*made: Mapping[str, object], **fields: object) -> dict[str, object]:
    """A turn that calls tools or linked agents; `fields` are the turn's others."""
    return {"calls": made, **fields}


def call(name: str, /, **arguments: object) -> dict[str, object]:
    """A call with arguments."""
    return {"name": name, "arguments": arguments}


class Overheard:
    """A scripted model that keeps what it was asked."""

    def __init__(self, model: ScriptedModel, heard: list[ModelRequest]) -> None:
        self._model = model
        self._heard = heard
        self.name, self.provider, self.model = model.name, model.provider, model.model
        self.retry, self.price, self.config_digest = model.retry, model.price, model.config_digest
        self.fallbacks = model.fallbacks

    def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncIterator[Deltas | step_pb2.LlmResponse]:
        """One attempt of the scripted model."""
        self._heard.append(request)
        return self._model.stream(request, meter=meter)

    async def close(self) -> None:
        """Nothing is open."""


_parsed = cache(parse_script)
"""A script is not changed by the models that read it."""


class Scripts:
    """A configuration with one scripted model, under its own name and any other but `unknown`."""

    def __init__(
        self,
        script: str,
        *,
        gate: Gate | None = None,
        heard: list[ModelRequest] | None = None,
        retry: RetryPolicy | None = None,
        fallbacks: Mapping[str, Sequence[str]] | None = None,
        scripts: Mapping[str, str] | None = None,
        max_concurrency: int = 0,
    ) -> None:
        """A model has the script of its name in `scripts`, else the common one."""
        self._max_concurrency = max_concurrency
        self._fallbacks, self._scripts = fallbacks or {}, scripts or {}
        self._script = _parsed(script)
        self._gate = gate
        self._heard = heard if heard is not None else []
        self._retry = retry or RetryPolicy(retries=2, base=0.0, longest=0.0)
        self._models: dict[str, Model] = {}

    def get(self, name: str) -> Model:
        """The scripted model under a name; empty is `default`."""
        if name == "unknown":
            raise KeyError(name)
        return self._models.setdefault(name or "default", self._made(name or "default"))

    def _made(self, name: str) -> Model:
        model = ScriptedModel(
            name=name,
            model=f"{name}-1" if name in self._scripts else "script",
            script=_parsed(self._scripts[name]) if name in self._scripts else self._script,
            fallbacks=self._fallbacks.get(name, ()),
            retry=self._retry,
            price=Price(input_per_million=1, output_per_million=2),
            gate=self._gate,
            limiter=ModelLimiter(name=name, max_concurrency=self._max_concurrency),
        )
        return Overheard(model, self._heard)

    def list(self) -> list[model_pb2.ModelInfo]:
        """The one model."""
        return [model_pb2.ModelInfo(name="default", provider="scripted", model="default")]


@asynccontextmanager
async def open_team(
    folder: Path,
    script: str,
    *definitions: agent_pb2.AgentDefinition,
    tools: Iterable[Tool] = (),
    gate: Gate | None = None,
    heard: list[ModelRequest] | None = None,
    retry: RetryPolicy | None = None,
    fallbacks: Mapping[str, Sequence[str]] | None = None,
    scripts: Mapping[str, str] | None = None,
    max_concurrency: int = 0,
    **options: object,
) -> AsyncIterator[RunHarness]:
    """A harness with a team whose models say what the script says; `heard` gets what they are asked."""
    async with open_harness(
        folder,
        models=Scripts(
            script,
            gate=gate,
            heard=heard,
            retry=retry,
            fallbacks=fallbacks,
            scripts=scripts,
            max_concurrency=max_concurrency,
        ),
        definitions=definitions,
        tools=tools,
        **options,  # type: ignore[arg-type]
    ) as harness:
        yield harness
