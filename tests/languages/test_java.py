"""Java: the program of clients/java as a person runs it, and its driver, against real servers."""

import asyncio
import base64
import json
import os
import re
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, event_pb2, follow_pb2
from tests.clients.run_events import RUN_ID
from tests.clients.test_connection_security import serve_tokens
from tests.contract.newer_server import serving_newer
from tests.contract.scenario_files import FOLDER, read_group
from tests.languages.java_programs import DRIVER, FOLLOW_RUN, java_program
from tests.support.certificates import certificate
from tests.support.processes import PATIENCE_SECONDS, serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import Gate, standing_gate
from tests.support.toolchains import ROOT

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(1_800)  # the first time it is built

Line = Mapping[str, Any]


@asynccontextmanager
async def _program(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[Process]:
    command = await asyncio.to_thread(java_program, name)
    variables = {**os.environ, **(environment or {})}
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _finished(process: Process, typed: str = "") -> tuple[int | None, list[str], str]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate(typed.encode())
    return process.returncode, out.decode().splitlines(), err.decode()


def _sequences(lines: Sequence[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r"(?:.*\] )? *(\d+) \S+: ", line))]


async def _driven(
    address: str, *lines: Line, environment: Mapping[str, str] | None = None
) -> tuple[int | None, list[dict[str, Any]], str]:
    async with _program(DRIVER, address, environment=environment) as process:
        typed = "".join(f"{json.dumps(line)}\n" for line in lines)
        code, printed, errors = await _finished(process, typed)
    return code, [json.loads(line) for line in printed], errors


async def test_the_program_answers_what_a_run_asks_for_and_prints_the_tree(tmp_path: Path) -> None:
    shop = shutil.copytree(EXAMPLES / "approvals", tmp_path / "approvals")
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db")}
    async with serving(shop / "bough.yaml", environment=environment) as server:
        asked = (server.address, "lead", "Orders 1001 and 1002 come back.")
        async with _program(FOLLOW_RUN, *asked) as process:
            code, lines, errors = await _finished(process, '"4711"\n"it does not fit"\ny\n')
    sequences = _sequences(lines)
    assert (code, errors) == (0, "")
    assert sequences == list(range(1, len(sequences) + 1))
    assert lines[-3:] == ["lead SUCCEEDED", "  interviewer SUCCEEDED", "  refunds SUCCEEDED"]


async def test_a_call_that_fails_says_why(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"))
    async with serving(config) as server, _program(FOLLOW_RUN, server.address, "nobody", "hi") as process:
        code, lines, errors = await _finished(process)
    assert (code, lines) == (2, [])
    assert errors.startswith("NOT_FOUND UNKNOWN_AGENT: There is no agent 'nobody'.")


async def test_a_server_that_was_never_there_is_an_error_at_once() -> None:
    async with _program(FOLLOW_RUN, "127.0.0.1:1", "alone", "hi") as process:
        code, lines, errors = await _finished(process)
    assert (code, lines) == (2, [])
    assert errors.startswith("UNAVAILABLE : io exception")


def _team(folder: Path, gate: Gate) -> Path:
    waiting = {"calls": [{"name": "wait_at", "arguments": {"port": gate.port}}]}
    script: dict[str, list[object]] = {
        "lead": [{"calls": [{"name": "call_waiter", "arguments": {"message": "Wait."}}]}, "Done."],
        "waiter": [waiting, "The gate is open."],
    }
    return write_project(folder, llm("lead", calls=["waiter"]), llm("waiter", tools=["wait_at"]), script=script)


async def test_the_program_has_every_sequence_once_over_the_death_of_its_server(tmp_path: Path) -> None:
    async with standing_gate() as gate:
        config = _team(tmp_path, gate)
        async with serving(config) as server, _program(FOLLOW_RUN, server.address, "lead", "Go.") as process:
            await gate.arrived.wait()
            await server.kill()
            gate.open()
            port = server.address.rpartition(":")[2]
            async with serving(config, arguments=("--port", port)):
                code, lines, errors = await _finished(process)
    sequences = _sequences(lines)
    assert (code, errors) == (0, "")
    assert sequences == list(range(1, len(sequences) + 1))
    assert any(line.endswith(": run_resumed") for line in lines)
    assert lines[-3:] == ["(the connection was lost 1 times)", "lead SUCCEEDED", "  waiter SUCCEEDED"]


class _Ending(agent_service_pb2_grpc.AgentServiceServicer):
    """Answers each call of a run with the batches that it is given for it, then ends it with their code."""

    def __init__(self, *calls: tuple[grpc.StatusCode, Sequence[follow_pb2.EventBatch]]) -> None:
        self._calls = list(calls)
        self.asked: list[str] = []

    async def Run(self, request, context):
        async for batch in self._stream("Run", context):
            yield agent_service_pb2.RunResponse(batch=batch)

    async def WatchRun(self, request, context):
        async for batch in self._stream(f"WatchRun {request.after_sequence}", context):
            yield agent_service_pb2.WatchRunResponse(batch=batch)

    async def _stream(self, asked, context):
        self.asked.append(asked)
        code, batches = self._calls.pop(0)
        if batches:
            await context.send_initial_metadata((("bough-run-id", "run-1"),))
        for batch in batches:
            yield batch
        if code is not grpc.StatusCode.OK:
            await context.abort(code, code.name)


def _batch(sequence: int, **payload: Any) -> follow_pb2.EventBatch:
    event = event_pb2.AgentEvent(run_id="run-1", sequence=sequence, **payload)
    return follow_pb2.EventBatch(events=[event], through_sequence=sequence)


@asynccontextmanager
async def _answering(service: _Ending) -> AsyncIterator[str]:
    server = aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_stream_rejoins_whatever_ends_it_before_its_end() -> None:
    started = _batch(1, run_started=event_pb2.RunStarted())
    service = _Ending(
        (grpc.StatusCode.OK, []),
        # So does gRPC end calls that a stopping server has not accepted.
        (grpc.StatusCode.CANCELLED, [started]),
        (grpc.StatusCode.OK, [follow_pb2.EventBatch(through_sequence=1)]),
        (grpc.StatusCode.OK, [_batch(2, run_completed=event_pb2.RunCompleted())]),
    )
    async with _answering(service) as address:
        _, printed, _ = await _driven(address, {"call": "AgentService.Run", "request": {"agent": "alone"}})
    assert [line["event"]["sequence"] for line in printed[:-1]] == ["1", "2"]
    assert printed[-1]["end"]["code"] == "OK"
    assert service.asked == ["Run", "Run", "WatchRun 1", "WatchRun 1"]


async def test_the_program_ends_with_a_stream_that_ended_at_an_event_that_it_does_not_know() -> None:
    paused = read_group(FOLDER / "newer_pause.yaml").server.newer
    assert paused is not None
    async with standing_gate() as gate, serving_newer(paused, gate) as server:
        gate.open()
        async with _program(FOLLOW_RUN, server.address, "lead", "Count.") as process:
            code, lines, errors = await _finished(process)
    assert (code, errors) == (1, "")
    assert [line.split(": ")[-1] for line in lines] == [
        "run_started",
        "One",
        "something that this program does not know",
        "lead RUNNING",
    ]


async def test_the_driver_performs_calls_of_every_kind(tmp_path: Path) -> None:
    script: dict[str, list[object]] = {"alone": ["It works."], "lead": ["Nothing to do."]}
    config = write_project(tmp_path, llm("alone"), llm("lead"), script=script)
    request = {"agent": "alone", "input": {"parts": [{"text": "hi"}]}}
    async with serving(config) as server:
        _, (first, *_), _ = await _driven(server.address, {"call": "AgentService.Run", "request": request})
        run_id = first["event"]["runId"]
        watch = {"call": "AgentService.WatchRun", "request": {"run_id": run_id}}
        code, printed, errors = await _driven(
            server.address,
            watch,
            {**watch, "cancelAfterEvents": 2},
            {**watch, "collect": True},
            {"call": "AgentService.GetRun", "request": {"runId": run_id}},
            {"tree": run_id},
            {"call": "AgentService.GetRun", "request": {"runId": "none"}},
            {"call": "AgentService.Run", "request": {**request, "agent": ""}},
            {"call": "EvalService.AggregateEvents", "request": {"events": [first["event"]]}},
        )
    assert (code, errors) == (0, "")
    calls = _calls(printed)
    assert [call[-1]["end"]["code"] for call in calls] == [
        *("OK", "CANCELLED", "OK", "OK", "OK", "NOT_FOUND", "INVALID_ARGUMENT", "OK"),
    ]
    watched, cancelled, collected, got, tree, _, refused, aggregated = calls
    assert [int(line["event"]["sequence"]) for line in watched[:-1]] == list(range(1, len(watched)))
    assert cancelled[:-1] == watched[:2]
    assert collected[0]["answer"] == {
        "text": "It works.",
        "state": "EXECUTION_STATE_SUCCEEDED",
        "interrupted": False,
        "runId": run_id,
        "throughSequence": len(watched) - 1,
    }
    assert got[0]["answer"]["run"]["state"] == "EXECUTION_STATE_SUCCEEDED"
    agent = {"agent": "alone", "path": "alone", "depth": 0, "state": "EXECUTION_STATE_SUCCEEDED"}
    assert tree[0] == {"answer": {"agents": [agent]}}
    assert refused[-1]["end"]["reason"] == "INVALID_REQUEST"
    assert refused[-1]["end"]["violations"][0]["field"] == "agent"
    assert aggregated[0]["answer"]["invocation"]["runId"] == run_id


def _calls(printed: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Divide what was printed at the end of each call."""
    calls: list[list[dict[str, Any]]] = [[]]
    for line in printed:
        calls[-1].append(line)
        if "end" in line:
            calls.append([])
    return calls[:-1]


async def test_the_driver_writes_back_what_it_reads() -> None:
    event = event_pb2.AgentEvent(run_id="r", sequence=2**53 + 1)
    event.llm_output_text_delta.text = "ä"
    unknown = event_pb2.AgentEvent(sequence=3).SerializeToString() + b"\xba\x3e\x02hi"  # field 999
    code, printed, _ = await _driven(
        "127.0.0.1:1",
        {"transcode": "bough.v1.AgentEvent", "binary": base64.b64encode(unknown).decode()},
        {"transcode": "bough.v1.AgentEvent", "json": {"runId": "r", "sequence": str(2**53 + 1)}},
        {"transcode": "bough.v1.AgentEvent", "binary": base64.b64encode(event.SerializeToString()).decode()},
    )
    kept, read, written = (line["transcoded"] for line in printed)
    assert code == 0
    assert base64.b64decode(kept["binary"]) == unknown
    assert read["json"] == {"runId": "r", "sequence": str(2**53 + 1)}
    assert event_pb2.AgentEvent.FromString(base64.b64decode(written["binary"])) == event
    assert written["json"]["llmOutputTextDelta"] == {"text": "ä"}


@pytest.mark.parametrize(
    "line", ["{", '{"call": "AgentService.Nothing"}', '{"transcode": "bough.v1.Nothing", "json": {}}']
)
async def test_the_driver_ends_at_a_line_that_it_does_not_understand(line: str) -> None:
    async with _program(DRIVER, "127.0.0.1:1") as process:
        code, printed, errors = await _finished(process, f"{line}\n")
    assert (code, printed) == (2, [])
    assert errors.startswith("This line is not understood: ")
    assert len(errors.splitlines()) == 1


async def test_a_token_travels_encrypted_or_to_this_machine(tmp_path: Path) -> None:
    pem, authority = certificate(tmp_path), tmp_path / "authority.crt"
    authority.write_bytes(b"-----BEGIN CERTIFICATE" + pem.read_bytes().partition(b"-----BEGIN CERTIFICATE")[2])
    line = {"call": "AgentService.GetRun", "request": {"runId": RUN_ID}}
    async with serve_tokens() as (plain, seen_plain), serve_tokens(pem) as (secure, seen_secure):
        token = {"DRIVER_TOKEN": "secret"}
        sent = [
            await _driven(plain, line, environment=token),
            await _driven(secure, line, environment={**token, "DRIVER_CA_FILE": str(authority)}),
        ]
        broken = await _driven(plain, line, environment={"DRIVER_TOKEN": "sec ret"})
        exposed = await _driven(f"0.0.0.0:{plain.rpartition(':')[2]}", line, environment=token)
    assert [(code, printed[-1]["end"]["code"]) for code, printed, _ in sent] == [(0, "OK")] * 2
    assert (seen_plain, seen_secure) == (["Bearer secret"], ["Bearer secret"])
    end = broken[1][-1]["end"]
    assert (end["code"], "no bearer token" in end["message"], "sec" in end["message"]) == (
        "UNAUTHENTICATED",
        True,
        False,
    )
    assert exposed[0] != 0
    assert "A token would travel to 0.0.0.0" in exposed[2]
    assert "secret" not in exposed[2]
