"""`bough health`, the probe of containers: its exit code, and what it prints."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.clients.cli_process import bough
from tests.support.processes import Finished, serving
from tests.support.projects import llm, write_project


def project(folder: Path) -> Path:
    """A project with one agent."""
    return write_project(folder, llm("alone"), script={"alone": ["Hm."]})


@asynccontextmanager
async def server_that_says(status: int) -> AsyncIterator[str]:
    """A server that reports this health of Bough's service."""
    servicer = health.aio.HealthServicer()
    await servicer.set("bough.v1.AgentService", status)
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_the_server_of_the_configured_database_is_found_and_serves(tmp_path: Path) -> None:
    config = project(tmp_path)
    async with serving(config) as server:
        found = await bough("--config", str(config), "health")
        named = await bough("--address", server.address, "health")

    assert found == Finished(code=0, out=f"serving {server.address}\n", err="")
    assert named == found


async def test_a_server_that_does_not_serve_fails_the_probe() -> None:
    async with server_that_says(health_pb2.HealthCheckResponse.NOT_SERVING) as address:
        seen = await bough("--address", address, "health")

    words = f"The server at {address} answers, and does not serve: its log says why.\n"
    assert seen == Finished(code=1, out="", err=words)


async def test_an_address_at_which_no_server_answers_fails_the_probe() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and it never listens
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        seen = await bough("--address", address, "health")

    words = f"No server answers at {address}: start one there, or omit the address.\n"
    assert seen == Finished(code=1, out="", err=words)


async def test_a_project_that_is_not_served_fails_the_probe(tmp_path: Path) -> None:
    config = project(tmp_path)

    # With --embedded, what serves another project at the default address does not count.
    seen = await bough("--config", str(config), "--embedded", "health")

    words = "No server answers: start one with `bough serve`, or name another with --address.\n"
    assert seen == Finished(code=1, out="", err=words)


async def test_an_invalid_configuration_is_reported_as_by_every_command(tmp_path: Path) -> None:
    config = tmp_path / "bough.yaml"
    config.write_text("server: {prt: 1}\n", encoding="utf-8")

    seen = await bough("--config", str(config), "health")

    assert (seen.code, "There is no such setting" in seen.err) == (2, True)
