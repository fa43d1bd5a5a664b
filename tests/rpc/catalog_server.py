"""A server with agents in a file and in code and a scripted model, for tests of stored agents."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc import aio

from bough.v1 import agent_pb2
from bough.v1 import catalog_service_pb2 as pb
from bough_server.identity import LOCAL, Caller, Principal
from bough_server.settings import Settings
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, settings
from tests.support.projects import Definition, llm

ANNE = Principal(tenant_id="anne's", user_id="anne")
BERT = Principal(tenant_id="bert's", user_id="bert")

MODULES = ("tests.rpc.agents", "tests.rpc.question_agents", "tests.rpc.catalog_tools")
FILES: Sequence[Definition] = (llm("editor", calls=["writer"]), llm("writer"))
IN_FILES_AND_CODE = ["asker", "chief", "echo", "editor", "failing", "lead", "nester", "waiter", "writer"]
SCRIPT: Mapping[str, Sequence[object]] = {
    "editor": [{"calls": [{"name": "call_writer", "arguments": {"message": "Write."}}]}, "The editor's word."],
    "coach": [{"calls": [{"name": "call_writer", "arguments": {"message": "Write."}}]}, "The coach's word."],
    "reader": [{"calls": [{"name": "look_up", "arguments": {"topic": "trees"}}]}, "It is read."],
    "holder": [{"calls": [{"name": "call_waiter", "arguments": {"message": "held"}}]}, "It was held."],
    "inquirer": [{"calls": [{"name": "call_asker", "arguments": {"message": "Which?"}}]}, "It is asked."],
    "*": ["A word."],
}


@dataclass(slots=True)
class CurrentCaller:
    """Who makes the calls, with every role; it stands where a proof says who that is."""

    principal: Principal = ANNE

    def __call__(self) -> Caller:
        return Caller(principal=self.principal, roles=LOCAL.roles, via="test")


def team_settings(
    folder: Path,
    *,
    files: Sequence[Definition] = FILES,
    python: Sequence[str] = MODULES,
    model: str = "default",
    **changes: Any,
) -> Settings:
    """Return settings of a server with these files, a tool, and the agents in code that wait and ask."""
    (folder / "agents.yaml").write_text("".join(f"---\n{json.dumps(one)}\n" for one in files), encoding="utf-8")
    (folder / "script.yaml").write_text(json.dumps({"agents": SCRIPT}), encoding="utf-8")
    return settings(
        folder,
        agents=[str(folder / "agents.yaml")],
        python=list(python),
        models={model: {"provider": "scripted", "script": str(folder / "script.yaml")}},
        **changes,
    )


def define(name: str, *, links: Sequence[str] = (), tools: Sequence[str] = (), **fields: Any) -> Any:
    """A definition that names no model."""
    return agent_pb2.AgentDefinition(
        name=name,
        description=fields.pop("description", f"Does what {name} does."),
        llm=agent_pb2.LlmAgent(tools=[agent_pb2.ToolLink(name=each) for each in tools], **fields),
        sub_agents=[agent_pb2.AgentLink(agent=each) for each in links],
    )


async def create(server: Served, definition: agent_pb2.AgentDefinition) -> agent_pb2.Agent:
    """Store an agent."""
    response: pb.CreateAgentResponse = await server.catalog.CreateAgent(pb.CreateAgentRequest(definition=definition))
    return response.agent


async def update(server: Served, definition: agent_pb2.AgentDefinition, *paths: str, revision: str) -> agent_pb2.Agent:
    """Change an agent."""
    request = pb.UpdateAgentRequest(definition=definition, update_mask=FieldMask(paths=paths), revision=revision)
    response: pb.UpdateAgentResponse = await server.catalog.UpdateAgent(request)
    return response.agent


async def delete(server: Served, name: str, *, revision: str = "") -> None:
    """Delete an agent."""
    await server.catalog.DeleteAgent(pb.DeleteAgentRequest(name=name, revision=revision))


async def get(server: Served, name: str, *, revision: str = "") -> agent_pb2.Agent:
    """Return an agent in its current revision, or in the given one."""
    request = pb.GetAgentRequest(name=name, revision=revision)
    response: pb.GetAgentResponse = await server.catalog.GetAgent(request)
    return response.agent


async def listed(server: Served) -> list[str]:
    """The names of all agents."""
    response = await server.catalog.ListAgents(pb.ListAgentsRequest(page_size=1_000))
    return [agent.definition.name for agent in response.agents]


def revisions(turn: Turn) -> dict[str, str]:
    """Return the revisions of the definitions that a run started with, by name."""
    return {ref.name: ref.revision for ref in turn.events[0].run_started.definition_refs}


def answer(turn: Turn) -> str:
    """Return the final answer of a run."""
    return turn.events[-1].run_completed.final_answer.parts[0].text


async def refused(call: Any) -> tuple[grpc.StatusCode, ErrorInfo]:
    """Return the status and the ErrorInfo of a refused call."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    info = status_details(caught.value)[0]
    assert isinstance(info, ErrorInfo)
    return caught.value.code(), info


def info_of(reason: str, **metadata: str) -> ErrorInfo:
    """An ErrorInfo of this server."""
    return ErrorInfo(reason=reason, domain="bough.dev", metadata=metadata)


def wrong_fields(error: Any) -> list[tuple[str, str]]:
    """Return the fields of a BadRequest, each with its reason."""
    (bad,) = [detail for detail in status_details(error) if isinstance(detail, BadRequest)]
    return [(each.field, each.reason) for each in bad.field_violations]
