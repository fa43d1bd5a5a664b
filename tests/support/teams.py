"""Small teams of LLM agents for tests: definitions in a line, a script of what their models say."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bough.v1 import agent_pb2, catalog_service_pb2
from bough_server.models.model import Model, Price, RetryPolicy
from bough_server.models.script import parse_script
from bough_server.models.scripted import Gate, ScriptedModel
from bough_server.tools.tool import Tool
from tests.support.house import House, open_house


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


class Scripts:
    """A configuration with one scripted model, under the name `default` and any other."""

    def __init__(self, script: str, *, gate: Gate | None = None) -> None:
        self.model = ScriptedModel(
            name="default",
            script=parse_script(script),
            retry=RetryPolicy(retries=2, base=0.0, longest=0.0),
            price=Price(input=1_000_000, output=2_000_000),
            gate=gate,
        )

    def get(self, name: str) -> Model:
        """The scripted model, whatever the name but `unknown`."""
        if name == "unknown":
            raise KeyError(name)
        return self.model

    def list(self) -> list[catalog_service_pb2.ModelInfo]:
        """The one model."""
        return [catalog_service_pb2.ModelInfo(name="default", provider="scripted", model="default")]


@asynccontextmanager
async def open_team(
    folder: Path,
    script: str,
    *definitions: agent_pb2.AgentDefinition,
    tools: Iterable[Tool] = (),
    gate: Gate | None = None,
    **options: object,
) -> AsyncIterator[House]:
    """A house with a team whose models say what the script says."""
    async with open_house(
        folder,
        models=Scripts(script, gate=gate),
        definitions=definitions,
        tools=tools,
        **options,  # type: ignore[arg-type]
    ) as house:
        yield house
