"""The context of a call, as its handler and the tasks it starts see it."""

import asyncio
from typing import Any

from structlog.contextvars import get_contextvars

from bough.v1 import agent_service_pb2 as pb
from bough.v1.agent_service_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from bough_server.identity import LOCAL
from bough_server.interceptors.auth import current_principal
from tests.rpc.interceptor_server import behaving


async def test_a_call_and_its_tasks_know_their_caller_and_log_its_names_for_the_call() -> None:
    seen: list[Any] = []

    async def look() -> None:
        seen.append((current_principal(), get_contextvars()))

    async def get_run(request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        await look()
        await asyncio.create_task(look())
        return pb.GetRunResponse()

    metadata = (("x-request-id", "7"), ("bough-client", "cli"), ("authorization", "Bearer secret"))
    async with behaving(add_AgentServiceServicer_to_server, GetRun=get_run) as channel:
        await AgentServiceStub(channel).GetRun(pb.GetRunRequest(run_id="r"), metadata=metadata)
        await AgentServiceStub(channel).GetRun(pb.GetRunRequest(run_id="r"))
    method = "/bough.v1.AgentService/GetRun"
    named = {"method": method, "x_request_id": "7", "bough_client": "cli"}
    assert seen == [(LOCAL, named)] * 2 + [(LOCAL, {"method": method})] * 2


async def test_metadata_can_neither_flood_the_log_nor_put_secrets_into_it() -> None:
    seen: list[Any] = []

    async def get_run(request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        seen.append(get_contextvars())
        return pb.GetRunResponse()

    many = tuple((f"bough-key-{number}", "sk-secret") for number in range(40))
    metadata = (("bough-token", "sk-secret"), ("x-request-id", "secret" * 20), ("bough-client", "a b c"), *many)
    async with behaving(add_AgentServiceServicer_to_server, GetRun=get_run) as channel:
        await AgentServiceStub(channel).GetRun(pb.GetRunRequest(run_id="r"), metadata=metadata)
    assert seen == [{"method": "/bough.v1.AgentService/GetRun"}]
