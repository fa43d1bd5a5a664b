"""What there is to run: agents, shown, checked and stored; tools and models, shown. Nothing is run here."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING

from bough import requests
from bough.calls import PAGE_SIZE, Calls
from bough.v1 import agent_pb2, catalog_service_pb2, model_pb2, tool_pb2

if TYPE_CHECKING:
    # Only stub files have it.
    from bough.v1.catalog_service_pb2_grpc import CatalogServiceAsyncStub


class Catalog:
    """The CatalogService of a server."""

    def __init__(self, stub: "CatalogServiceAsyncStub", calls: Calls) -> None:
        self._stub, self._calls = stub, calls

    def agents(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[agent_pb2.Agent]:
        """The agents in their current revisions, by name."""
        request = catalog_service_pb2.ListAgentsRequest(page_size=page_size)
        return self._calls.pages(self._stub.ListAgents, request, lambda response: response.agents)

    async def agent(self, name: str, *, revision: str = "") -> agent_pb2.Agent:
        """One agent in its current revision, or in one that a run uses. Raises NotFound."""
        request = catalog_service_pb2.GetAgentRequest(name=name, revision=revision)
        return (await self._calls.one(self._stub.GetAgent, request)).agent

    def tools(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[tool_pb2.ToolInfo]:
        """The tools that definitions may name, by name."""
        request = catalog_service_pb2.ListToolsRequest(page_size=page_size)
        return self._calls.pages(self._stub.ListTools, request, lambda response: response.tools)

    def models(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[model_pb2.ModelInfo]:
        """The models that definitions may name, by name."""
        request = catalog_service_pb2.ListModelsRequest(page_size=page_size)
        return self._calls.pages(self._stub.ListModels, request, lambda response: response.models)

    async def create(self, definition: agent_pb2.AgentDefinition) -> agent_pb2.Agent:
        """Store a new agent, and return it with its revision and its times.

        Raises AlreadyExists, and InvalidRequest with everything that is wrong with it.
        """
        request = catalog_service_pb2.CreateAgentRequest(definition=definition)
        return (await self._calls.one(self._stub.CreateAgent, request)).agent

    async def update(
        self, definition: agent_pb2.AgentDefinition, *, revision: str, fields: Iterable[str] = ()
    ) -> agent_pb2.Agent:
        """Change the stored agent that the definition names, and return it as it is then.

        `revision` is the one that the agent was read at. `fields` are those to change, such as "llm.instruction"; all
        if there are none. Raises RevisionMoved, NotFound, AgentFixed and InvalidRequest.
        """
        request = requests.update_agent_request(definition, revision=revision, fields=fields)
        return (await self._calls.one(self._stub.UpdateAgent, request)).agent

    async def delete(self, name: str, *, revision: str = "") -> None:
        """Removes a stored agent; only one of this revision, where one is given.

        Raises NotFound, AgentLinked, AgentFixed and RevisionMoved.
        """
        request = catalog_service_pb2.DeleteAgentRequest(name=name, revision=revision)
        await self._calls.one(self._stub.DeleteAgent, request)

    async def validate(
        self, definitions: Iterable[agent_pb2.AgentDefinition]
    ) -> Sequence[catalog_service_pb2.DefinitionViolation]:
        """Everything that is wrong with definitions, checked against each other and the catalog; empty if nothing."""
        request = catalog_service_pb2.ValidateAgentsRequest(definitions=definitions)
        return tuple((await self._calls.one(self._stub.ValidateAgents, request)).violations)
