"""Calls with buf's command line, which has nothing but the server's reflection."""

import asyncio
import json
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import json_format

from bough.v1 import agent_service_pb2, eval_result_pb2, eval_service_pb2, event_pb2
from bough_server.evals.sets.eval_set import parse_eval_set
from tests.support.log_laws import check_laws
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.wire_client import connected

EXAMPLES = Path(__file__).parents[2] / "examples"
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
        "bough.v1.AccessService",
        "bough.v1.AgentService",
        "bough.v1.CatalogService",
        "bough.v1.EvalService",
        "bough.v1.SessionService",
        "bough.v1.UsageService",
    }
    assert "bough.v1.AgentService/Run" in listed
    assert "grpc.health.v1.Health/Check" in listed
    assert events == log
    check_laws(events)
    assert events[-1].run_completed.final_answer.parts[0].text == "It works."


async def test_the_set_of_the_desk_is_evaluated_by_hand(tmp_path: Path) -> None:
    request = EXAMPLES / "eval" / "request.json"
    asked = json_format.Parse(request.read_text(encoding="utf-8"), eval_service_pb2.EvaluateRequest())
    desk = shutil.copytree(EXAMPLES / "desk", tmp_path / "desk")  # a server leaves files beside its configuration
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    async with serving(desk / "bough.yaml", environment=environment) as server:
        url = f"http://{server.address}/bough.v1.EvalService"
        printed = await _buf_curl(tmp_path, "-d", f"@{request}", f"{url}/Evaluate")
        responses = [json_format.ParseDict(one, eval_service_pb2.EvaluateResponse()) for one in _printed(printed)]
        events = [event for response in responses for event in response.batch.events]
        watched = json.dumps({"evaluationId": events[0].evaluation_id, "afterSequence": "0"})
        again = await _buf_curl(tmp_path, "-d", watched, f"{url}/WatchEvaluation")
        found = await _buf_curl(
            tmp_path, "-d", json.dumps({"evaluationId": events[0].evaluation_id}), f"{url}/ListCaseResults"
        )

    assert asked.eval_set == parse_eval_set(EXAMPLES / "eval" / "desk.yaml").set
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert events[-1].evaluation_completed.verdict == eval_result_pb2.VERDICT_PASSED
    rejoined = [json_format.ParseDict(one, eval_service_pb2.WatchEvaluationResponse()) for one in _printed(again)]
    assert [event for response in rejoined for event in response.batch.events] == events
    result = json_format.Parse(found, eval_service_pb2.ListCaseResultsResponse())
    assert [case.case_id for case in result.cases] == [case.id for case in asked.eval_set.cases]


def _events(printed: str) -> list[event_pb2.AgentEvent]:
    """The events of the responses of a run."""
    responses = [json_format.ParseDict(one, agent_service_pb2.RunResponse()) for one in _printed(printed)]
    return [event for response in responses for event in response.batch.events]


def _printed(text: str) -> Iterator[dict[str, object]]:
    """The responses that are printed one after the other."""
    decoder, place = json.JSONDecoder(), 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        value, place = decoder.raw_decode(text, place)
        yield value
