"""CatalogService: show, validate and store the agents of the caller's tenant; show tools and models."""

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Final, TypeVar

from grpc import aio

from bough.v1 import agent_pb2, catalog_service_pb2_grpc, model_pb2, tool_pb2
from bough.v1 import catalog_service_pb2 as pb
from bough_server.agents.catalog import AgentCatalog
from bough_server.agents.definition import kind_of
from bough_server.agents.editing import AgentEditor
from bough_server.api.pagination import page_by_name, page_of
from bough_server.errors import UnknownAgent
from bough_server.identity import Caller
from bough_server.store.ports.runs import Catalog

T = TypeVar("T", agent_pb2.Agent, tool_pb2.ToolInfo, tool_pb2.ToolServerInfo, model_pb2.ModelInfo)

_NAME: Final[Callable[[object], str]] = attrgetter("name")
_AGENT_NAME: Final[Callable[[object], str]] = attrgetter("definition.name")
_SIZE: Final[Callable[[object], int]] = methodcaller("ByteSize")


class CatalogService(catalog_service_pb2_grpc.CatalogServiceServicer):
    """Shows, validates and stores agents; shows tools and models."""

    def __init__(
        self, *, agents: AgentCatalog, editor: AgentEditor, revisions: Catalog, caller: Callable[[], Caller]
    ) -> None:
        self._agents, self._editor, self._revisions, self._caller = agents, editor, revisions, caller

    async def CreateAgent(
        self,
        request: pb.CreateAgentRequest,
        context: aio.ServicerContext[pb.CreateAgentRequest, pb.CreateAgentResponse],
    ) -> pb.CreateAgentResponse:
        """Store a new agent."""
        return pb.CreateAgentResponse(agent=await self._editor.create(self._tenant_id(), request.definition))

    async def UpdateAgent(
        self,
        request: pb.UpdateAgentRequest,
        context: aio.ServicerContext[pb.UpdateAgentRequest, pb.UpdateAgentResponse],
    ) -> pb.UpdateAgentResponse:
        """Change a stored agent."""
        agent = await self._editor.update(
            self._tenant_id(), request.definition, mask=request.update_mask, revision=request.revision
        )
        return pb.UpdateAgentResponse(agent=agent)

    async def DeleteAgent(
        self,
        request: pb.DeleteAgentRequest,
        context: aio.ServicerContext[pb.DeleteAgentRequest, pb.DeleteAgentResponse],
    ) -> pb.DeleteAgentResponse:
        """Delete a stored agent."""
        await self._editor.delete(self._tenant_id(), request.name, revision=request.revision)
        return pb.DeleteAgentResponse()

    async def GetAgent(
        self, request: pb.GetAgentRequest, context: aio.ServicerContext[pb.GetAgentRequest, pb.GetAgentResponse]
    ) -> pb.GetAgentResponse:
        """Return an agent in its current or a given revision."""
        tenant_id = self._tenant_id()
        catalog = await self._agents.of(tenant_id)
        if not request.revision:
            return pb.GetAgentResponse(agent=catalog.current(request.name))
        if (found := catalog.find_at_revision(request.name, request.revision)) is not None:
            return pb.GetAgentResponse(agent=found)
        # Past revisions are kept for as long as a run names them.
        used = await self._revisions.get_for_tenant(tenant_id, request.revision)
        if used is None or used.name != request.name:
            hint = f"It has no current revision {request.revision!r}, and no run names that one."
            raise UnknownAgent(request.name, hint=hint)
        return pb.GetAgentResponse(
            agent=agent_pb2.Agent(
                definition=used,
                revision=request.revision,
                source=agent_pb2.AGENT_SOURCE_REVISION,
                kind=kind_of(used),
            )
        )

    async def ListAgents(
        self, request: pb.ListAgentsRequest, context: aio.ServicerContext[pb.ListAgentsRequest, pb.ListAgentsResponse]
    ) -> pb.ListAgentsResponse:
        """List the agents, by name."""
        catalog = await self._agents.of(self._tenant_id())
        agents, token = _page(catalog.list_agents(), request, "agents", name=_AGENT_NAME)
        return pb.ListAgentsResponse(agents=agents, next_page_token=token)

    async def ValidateAgents(
        self,
        request: pb.ValidateAgentsRequest,
        context: aio.ServicerContext[pb.ValidateAgentsRequest, pb.ValidateAgentsResponse],
    ) -> pb.ValidateAgentsResponse:
        """Validate definitions together with the catalog."""
        return pb.ValidateAgentsResponse(violations=await self._agents.validate(self._tenant_id(), request.definitions))

    async def ListTools(
        self, request: pb.ListToolsRequest, context: aio.ServicerContext[pb.ListToolsRequest, pb.ListToolsResponse]
    ) -> pb.ListToolsResponse:
        """List the tools, by name."""
        found = self._agents.registry.list_tools(self._tenant_id(), server=request.server)
        tools, token = _page(found, request, f"tools of {request.server}" if request.server else "tools")
        return pb.ListToolsResponse(tools=tools, next_page_token=token)

    async def ListToolServers(
        self,
        request: pb.ListToolServersRequest,
        context: aio.ServicerContext[pb.ListToolServersRequest, pb.ListToolServersResponse],
    ) -> pb.ListToolServersResponse:
        """List the tool servers, by name."""
        found = self._agents.registry.tool_servers.describe(self._tenant_id())
        servers, token = _page(found, request, "tool servers")
        return pb.ListToolServersResponse(servers=servers, next_page_token=token)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]
    ) -> pb.ListModelsResponse:
        """List the models, by name."""
        models, token = _page(self._agents.for_tenant(self._tenant_id()).list_models(), request, "models")
        return pb.ListModelsResponse(models=models, next_page_token=token)

    def _tenant_id(self) -> str:
        return self._caller().principal.tenant_id


def _page(
    items: Sequence[T],
    request: pb.ListAgentsRequest | pb.ListToolsRequest | pb.ListToolServersRequest | pb.ListModelsRequest,
    listing: str,
    *,
    name: Callable[[object], str] = _NAME,
) -> tuple[list[T], str]:
    page = page_of(request.page_size, request.page_token)
    return page_by_name(items, page, listing=listing, name=name, size=_SIZE)
