"""CatalogService: what there is to run, as the registry has it; it stores nothing."""

import asyncio
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Final, TypeVar

from grpc import aio

from bough.v1 import agent_pb2, catalog_service_pb2_grpc, error_pb2
from bough.v1 import catalog_service_pb2 as pb
from bough_server.agents.registry import Registry
from bough_server.errors import NotFound
from bough_server.services.listing import page_by_name, page_of

T = TypeVar("T", agent_pb2.AgentDefinition, pb.ToolInfo, pb.ModelInfo)

_NAME: Final[Callable[[object], str]] = attrgetter("name")
_SIZE: Final[Callable[[object], int]] = methodcaller("ByteSize")


class CatalogService(catalog_service_pb2_grpc.CatalogServiceServicer):
    """Shows and checks agents, tools and models."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def GetAgent(
        self, request: pb.GetAgentRequest, context: aio.ServicerContext[pb.GetAgentRequest, pb.GetAgentResponse]
    ) -> pb.GetAgentResponse:
        """Gives one agent."""
        try:
            agent = self._registry.agent(request.name)
        except KeyError:
            raise NotFound("agent", request.name, reason=error_pb2.ERROR_REASON_UNKNOWN_AGENT) from None
        return pb.GetAgentResponse(agent=agent.definition)

    async def ListAgents(
        self, request: pb.ListAgentsRequest, context: aio.ServicerContext[pb.ListAgentsRequest, pb.ListAgentsResponse]
    ) -> pb.ListAgentsResponse:
        """Lists the agents, by name."""
        agents, token = _page(self._registry.list_agents(), request, "agents")
        return pb.ListAgentsResponse(agents=agents, next_page_token=token)

    async def ValidateAgent(
        self,
        request: pb.ValidateAgentRequest,
        context: aio.ServicerContext[pb.ValidateAgentRequest, pb.ValidateAgentResponse],
    ) -> pb.ValidateAgentResponse:
        """Checks definitions against each other and the catalog, beside the event loop: schemas take seconds a MiB."""
        violations = await asyncio.to_thread(self._registry.validate, request.definitions)
        return pb.ValidateAgentResponse(violations=violations)

    async def ListTools(
        self, request: pb.ListToolsRequest, context: aio.ServicerContext[pb.ListToolsRequest, pb.ListToolsResponse]
    ) -> pb.ListToolsResponse:
        """Lists the tools, by name."""
        tools, token = _page(self._registry.list_tools(), request, "tools")
        return pb.ListToolsResponse(tools=tools, next_page_token=token)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]
    ) -> pb.ListModelsResponse:
        """Lists the models, by name."""
        models, token = _page(self._registry.list_models(), request, "models")
        return pb.ListModelsResponse(models=models, next_page_token=token)


def _page(
    items: Sequence[T], request: pb.ListAgentsRequest | pb.ListToolsRequest | pb.ListModelsRequest, listing: str
) -> tuple[list[T], str]:
    page = page_of(request.page_size, request.page_token)
    return page_by_name(items, page, listing=listing, name=_NAME, size=_SIZE)
