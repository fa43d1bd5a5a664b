"""Catalog of a server: stored agents to read, change and validate; tools, tool servers and models to list."""

# Generated from bough/catalog.py by `make proto`, which overwrites changes.

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bough import requests
from bough.arguments import build
from bough.calls import PAGE_SIZE, USE_CLIENT_DEFAULT, SyncCalls, Timeout
from bough.v1 import agent_pb2, catalog_service_pb2, model_pb2, tool_pb2

if TYPE_CHECKING:
    # For types alone, as in the asynchronous client.
    from bough.v1.catalog_service_pb2_grpc import CatalogServiceStub


class SyncCatalog:
    """Calls of the CatalogService, for programs without an event loop."""

    def __init__(self, stub: "CatalogServiceStub", calls: SyncCalls) -> None:
        self._stub, self._calls = stub, calls

    def list_agents(
        self, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> Iterator[agent_pb2.Agent]:
        """List the agents in their current revisions, sorted by name."""
        request = build(catalog_service_pb2.ListAgentsRequest, page_size=page_size)
        return self._calls.pages(self._stub.ListAgents, request, lambda response: response.agents, timeout=timeout)

    def get_agent(self, name: str, *, revision: str = "", timeout: Timeout = USE_CLIENT_DEFAULT) -> agent_pb2.Agent:
        """Return an agent in its current revision, or in one that a run uses. Raises NotFound."""
        request = build(catalog_service_pb2.GetAgentRequest, name=name, revision=revision)
        return self._calls.call(self._stub.GetAgent, request, timeout).agent

    def list_tools(
        self, *, server: str = "", page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> Iterator[tool_pb2.ToolInfo]:
        """List the tools that definitions may name, sorted by name; with `server` only those of that tool server."""
        request = build(catalog_service_pb2.ListToolsRequest, server=server, page_size=page_size)
        return self._calls.pages(self._stub.ListTools, request, lambda response: response.tools, timeout=timeout)

    def list_tool_servers(
        self, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> Iterator[tool_pb2.ToolServerInfo]:
        """List the tool servers whose tools definitions may name, sorted by name, as the server sees them now."""
        request = build(catalog_service_pb2.ListToolServersRequest, page_size=page_size)
        call = self._stub.ListToolServers
        return self._calls.pages(call, request, lambda response: response.servers, timeout=timeout)

    def list_models(
        self, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> Iterator[model_pb2.ModelInfo]:
        """List the models that definitions may name, sorted by name."""
        request = build(catalog_service_pb2.ListModelsRequest, page_size=page_size)
        return self._calls.pages(self._stub.ListModels, request, lambda response: response.models, timeout=timeout)

    def create_agent(
        self, definition: agent_pb2.AgentDefinition, *, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> agent_pb2.Agent:
        """Store a new agent and return it with its revision and its times.

        Raises AlreadyExists, or InvalidRequest with every violation.
        """
        request = build(catalog_service_pb2.CreateAgentRequest, definition=definition)
        return self._calls.call(self._stub.CreateAgent, request, timeout).agent

    def update_agent(
        self,
        definition: agent_pb2.AgentDefinition,
        *,
        revision: str,
        fields: Iterable[str] = (),
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> agent_pb2.Agent:
        """Change the stored agent that the definition names and return the changed agent.

        `revision` is the one that the caller read. `fields` are the paths to change, such as "llm.instruction";
        default: all. Raises RevisionMoved, NotFound, AgentFixed or InvalidRequest.
        """
        request = requests.update_agent_request(definition, revision=revision, fields=fields)
        return self._calls.call(self._stub.UpdateAgent, request, timeout).agent

    def delete_agent(self, name: str, *, revision: str = "", timeout: Timeout = USE_CLIENT_DEFAULT) -> None:
        """Delete a stored agent; if a revision is given, only at that revision.

        Raises NotFound, AgentLinked, AgentFixed or RevisionMoved.
        """
        request = build(catalog_service_pb2.DeleteAgentRequest, name=name, revision=revision)
        self._calls.call(self._stub.DeleteAgent, request, timeout)

    def validate_agents(
        self, definitions: Iterable[agent_pb2.AgentDefinition], *, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> Sequence[catalog_service_pb2.DefinitionViolation]:
        """Check definitions against each other and the catalog; return every violation, none if they are valid."""
        request = build(catalog_service_pb2.ValidateAgentsRequest, definitions=definitions)
        return tuple(self._calls.call(self._stub.ValidateAgents, request, timeout).violations)
