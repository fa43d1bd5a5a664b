"""Calls with buf's command line, which has nothing but the server's reflection."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from google.protobuf import json_format

from bough.v1 import agent_service_pb2, event_pb2
from tests.support.log_laws import check_laws
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.wire_client import connected

BUF = Path(sys.executable).parent / "buf"


async def _buf_curl(folder: Path, *arguments: str) -> str:
    """Return the standard output of buf, which must write nothing else."""
    process = await asyncio.create_subprocess_exec(
        str(BUF),
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        *arguments,
        stdout=PIPE,
        stderr=PIPE,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode()


async def test_a_newcomer_finds_the_services_by_reflection_and_runs_a_turn_by_hand(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": [{"chunks": ["It ", "works."]}]})
    asked = json.dumps({"agent": "alone", "input": {"parts": [{"text": "hi"}]}})
    async with serving(config) as server, connected(server.address) as remote:
        url = f"http://{server.address}"
        listed = (await _buf_curl(tmp_path, "--list-methods", url)).split()
        printed = await _buf_curl(tmp_path, "-d", asked, f"{url}/bough.v1.AgentService/Run")
        events = _events(printed)
        log = await remote.log(events[0].run_id)
    services = {method.partition("/")[0] for method in listed}
    assert {name for name in services if name.startswith("bough.")} == {
        "bough.v1.AgentService",
        "bough.v1.CatalogService",
        "bough.v1.EvalService",
        "bough.v1.SessionService",
    }
    assert "bough.v1.AgentService/Run" in listed
    assert "grpc.health.v1.Health/Check" in listed
    assert events == log
    check_laws(events)
    assert events[-1].run_completed.final_answer.parts[0].text == "It works."


def _events(printed: str) -> list[event_pb2.AgentEvent]:
    """The events of responses that are printed one after the other."""
    decoder, place = json.JSONDecoder(), 0
    found: list[event_pb2.AgentEvent] = []
    while printed[place:].strip():
        place += len(printed[place:]) - len(printed[place:].lstrip())
        value, place = decoder.raw_decode(printed, place)
        found.extend(json_format.ParseDict(value, agent_service_pb2.RunResponse()).batch.events)
    return found
