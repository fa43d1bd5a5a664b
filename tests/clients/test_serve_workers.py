"""`bough serve --workers N`: servers behind one port, which are watched, replaced and drained."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough import AsyncClient, collect
from tests.rpc.test_metrics import scraped
from tests.support.certificates import Authority
from tests.support.databases import POSTGRES
from tests.support.log_laws import check_laws
from tests.support.log_readings import having
from tests.support.processes import PATIENCE_SECONDS, Serving, finished, serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import standing_gate
from tests.support.wire_client import connected

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers share their port as Linux lets them")

WORKERS = 2

PRINTED = 1_000_000
"""Characters that no pipe holds."""


@asynccontextmanager
async def workers(folder: Path, *, script: Mapping[str, list[object]]) -> AsyncIterator[Serving]:
    """A server of several workers on PostgreSQL, with a page of metrics."""
    with POSTGRES.empty() as url:
        agents = (llm("greeter"), llm("waiter", tools=["wait_at"]))
        storage, telemetry = {"url": url, "durability": "process"}, {"prometheus_port": 0}
        config = write_project(folder, *agents, script=script, storage=storage, telemetry=telemetry)
        async with serving(config, arguments=["--workers", str(WORKERS)]) as server:
            yield server


def processes(server: Serving) -> dict[str, int]:
    """The newest process of each worker, as the log names it."""
    return {worker: int(pid) for pid, worker in re.findall(r"worker started +process=(\d+) worker=(\d+)", server.said)}


async def page(server: Serving) -> dict[str, float]:
    """The metrics of all workers."""
    (address,) = re.findall(r"metrics of all workers +address=(\S+)", server.said)
    return await asyncio.to_thread(scraped, address)


def by_worker(found: Mapping[str, float], name: str) -> dict[str, float]:
    """The value of a metric for each worker that has it."""
    return {
        str(re.findall(r'worker="(\d+)"', sample)[0]): value
        for sample, value in found.items()
        if sample.startswith(f"{name}{{")
    }


async def test_workers_share_a_port_and_one_that_is_killed_is_replaced_and_its_run_goes_on(tmp_path: Path) -> None:
    async with standing_gate() as gate:
        waits = {"calls": [{"name": "wait_at", "arguments": {"port": gate.port}}]}
        async with workers(tmp_path, script={"greeter": ["Hello."], "waiter": [waits, "Done."]}) as server:
            for _ in range(12):
                async with connected(server.address) as remote:
                    assert (await remote.begin("greeter").to_the_end()).kinds[-1] == "run_completed"
            async with connected(server.address) as remote:
                turn = await remote.begin("waiter").until("tool_started")
                run_id, before, found = turn.events[0].run_id, processes(server), await page(server)
                (killed,) = [worker for worker, runs in by_worker(found, "bough_runs_active").items() if runs]
                os.kill(before[killed], signal.SIGKILL)
                with pytest.raises(aio.AioRpcError):
                    await turn.to_the_end()
            await server.until_said("worker ended: starting another")
            gate.open()
            async with connected(server.address) as remote:
                log = await remote.log(run_id)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while by_worker(await page(server), "bough_runs_active").keys() != before.keys():  # noqa: ASYNC110 # of another process
                    await asyncio.sleep(0.05)
            after = processes(server)
            server.send(signal.SIGTERM)
            assert await server.end() == 0
    check_laws(log)
    assert log[-1].HasField("run_completed")
    assert len(having(log, "run_resumed")) == 1
    assert sum(by_worker(found, "bough_agent_invocations_total").values()) == 12
    assert len(by_worker(found, "bough_agent_invocations_total")) > 1, "connections are spread over workers"
    assert [worker for worker in before if before[worker] != after[worker]] == [killed]


async def test_what_a_tool_prints_is_printed_by_workers_too_however_much_it_is(tmp_path: Path) -> None:
    printing = '"""A tool that prints."""\n\nfrom bough_server import tool\n\n\n@tool\ndef shout() -> str:\n    '
    printing += f'"""Prints a long line."""\n    print("x" * {PRINTED}, flush=True)\n    return "Printed."\n'
    (tmp_path / "printing.py").write_text(printing, encoding="utf-8")
    script: dict[str, list[object]] = {"shouter": [{"calls": [{"name": "shout", "arguments": {}}]}, "Done."]}
    with POSTGRES.empty() as url:
        storage = {"url": url, "durability": "process"}
        shouter = llm("shouter", tools=["shout"])
        config = write_project(tmp_path, shouter, script=script, storage=storage, python=["printing"])
        async with serving(config, arguments=["--workers", str(WORKERS)]) as server:
            async with connected(server.address) as remote, asyncio.TaskGroup() as tasks:
                printed = tasks.create_task(server.read_output(PRINTED + 1))
                turn = await remote.begin("shouter").to_the_end()
            server.send(signal.SIGTERM)
            assert await server.end() == 0
    assert (turn.kinds[-1], printed.result()) == ("run_completed", "x" * PRINTED + "\n")


async def test_workers_share_the_ports_of_tls_and_their_parent_answers_probes(tmp_path: Path) -> None:
    servers, clients = Authority("servers"), Authority("clients")
    servers.issue().write(tmp_path / "server.crt", tmp_path / "server.key")
    (tmp_path / "clients.crt").write_bytes(clients.pem)
    client = clients.issue()
    section = {
        "tls": {"cert_file": "server.crt", "key_file": "server.key"},
        "mtls": {"port": 0, "client_ca_file": "clients.crt"},
        "health_port": 0,
    }
    with POSTGRES.empty() as url:
        storage = {"url": url, "durability": "process"}
        config = write_project(
            tmp_path, llm("greeter"), script={"greeter": ["Hello."] * 9}, storage=storage, server=section
        )
        async with serving(config, arguments=["--workers", str(WORKERS)]) as server:
            (port,) = re.findall(r"serving clients with certificates +port=(\d+)", server.said)
            (probes,) = re.findall(r"health of all workers +address=(\S+)", server.said)
            plain = grpc.ssl_channel_credentials(servers.pem)
            mutual = grpc.ssl_channel_credentials(servers.pem, client.key, client.chain)
            for address, credentials in ((server.address, plain), (f"127.0.0.1:{port}", mutual)):
                async with AsyncClient(address, credentials=credentials) as caller:
                    assert (await collect(caller.run("greeter", "hi"))).answer == "Hello."
            async with aio.insecure_channel(probes) as channel:
                watching = aiter(HealthStub(channel).Watch(HealthCheckRequest(service="bough.v1.AgentService")))
                states = [(await anext(watching)).status]
                for pid in processes(server).values():
                    os.kill(pid, signal.SIGSTOP)  # what a worker cannot answer, its parent can
                states.append((await HealthStub(channel).Check(HealthCheckRequest(), timeout=5)).status)
                for pid in processes(server).values():
                    os.kill(pid, signal.SIGCONT)
                server.send(signal.SIGTERM)
                states.append((await anext(watching)).status)
            assert await server.end() == 0
    response = HealthCheckResponse
    assert states == [response.SERVING, response.SERVING, response.NOT_SERVING]


async def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    async with workers(tmp_path, script={"greeter": ["Hello."]}) as server:
        host, _, port = server.address.rpartition(":")
        await server.kill()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except ConnectionRefusedError:
                    break
                writer.close()
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("storage", "host", "said"),
    [
        ({"url": "bough.db"}, "127.0.0.1", "--workers needs PostgreSQL"),
        ({"url": "postgresql://bough@/x?host=/nowhere", "wait_at_start": "0s"}, "127.0.0.1", "Check the address"),
        ({"url": "postgresql://bough@/x?host=/nowhere"}, "missing.invalid", "of missing.invalid cannot be bound: "),
    ],
)
async def test_what_keeps_workers_from_serving_is_said_once(
    tmp_path: Path, storage: Mapping[str, str], host: str, said: str
) -> None:
    config = write_project(tmp_path, llm("greeter"), script={"greeter": ["Hello."]}, storage=storage)
    serve = ("serve", "--host", host, "--port", "0", "--allow-insecure", "--workers", "2")
    ended = await finished("--config", str(config), *serve)
    assert (ended.code, ended.err.count(said), ended.out) == (2, 1, "")
