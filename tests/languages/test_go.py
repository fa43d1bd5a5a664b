"""The Go client: its checks and tests, its examples by hand against a server, and a server that dies under them."""

import asyncio
import base64
import copy
import json
import re
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bough import AsyncClient
from bough.v1 import WATCH_UNTIL_CURRENT
from tests.languages.go_client import MODULE, Program, finished, go, gofmt, has_compiler, running
from tests.support.processes import PATIENCE_SECONDS, Serving, serving
from tests.support.projects import llm, write_project
from tests.support.toolchains import ROOT, require

QUESTION = "Why do leaves turn red?"


@pytest.fixture(autouse=True)
def _toolchain() -> None:
    require("go")


def serving_example(name: str, folder: Path) -> AbstractAsyncContextManager[Serving]:
    """Serve a copy of an example; its folder is not written to."""
    shutil.copytree(ROOT / "examples" / name, folder / name)
    environment = {"BOUGH_DATABASE": str(folder / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    return serving(folder / name / "bough.yaml", environment=environment)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Serving]:
    """The desk of the examples."""
    async with serving_example("desk", tmp_path) as server:
        yield server


def test_vet_gofmt_and_mod_tidy_find_nothing() -> None:
    assert gofmt("-l", ".").stdout == ""
    for arguments in (("vet", "./..."), ("mod", "tidy", "-diff")):
        checked = go(*arguments)
        assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_its_own_tests_pass(whole_grid: bool) -> None:
    race = ["-race"] if whole_grid and has_compiler() else []  # it compiles every dependency once more
    tested = go("test", *race, "./...")
    assert tested.returncode == 0, tested.stdout + tested.stderr


async def test_run_shows_the_tree_while_it_grows_and_what_it_took(desk: Serving) -> None:
    ran = await finished("run", "lead", QUESTION, desk.address)
    assert (ran.code, ran.err) == (0, "")
    grown, answer, tree = ran.out.split("\n\n")
    assert grown.splitlines() == [
        "lead",
        *(f"  call_researcher {arguments}" for arguments in re.findall(r"^  call_researcher (.*)$", grown, re.M)),
        "  researcher",
        '    search_notes {"topic": "leaves"}',
        *(f"  call_writer {arguments}" for arguments in re.findall(r"^  call_writer (.*)$", grown, re.M)),
        "  writer",
    ]
    assert "red" in answer
    assert tree.splitlines() == [
        "lead: 6 model calls, 2 tool calls",
        "lead/researcher: 2 model calls, 1 tool calls",
        "lead/writer: 1 model calls, 0 tool calls",
    ]


async def test_approve_answers_what_the_shop_waits_for(tmp_path: Path) -> None:
    async with serving_example("approvals", tmp_path) as server:
        said = ("lead", "Orders 1001 and 1002 come back.", server.address)
        ran = await finished("approve", *said, lines=["4711", "it does not fit", "y"])
        left = await finished("approve", *said, lines=["4711"])
    assert (ran.code, ran.err) == (0, "")
    asked = [line.removeprefix("> ").partition(":")[0] for line in ran.out.splitlines()]
    assert asked[:3] == ["lead", "interviewer", "refunds"]
    assert ran.out.endswith("> Thank you. Whatever was approved is on its way to your card.\n")
    assert left.code == 1
    assert "no answer: the run still waits for it" in left.err


async def test_eval_ends_with_the_exit_code_for_ci(desk: Serving, tmp_path: Path) -> None:
    request = json.loads((ROOT / "examples/eval/request.json").read_text(encoding="utf-8"))
    requests = {"passed": request, "failed": copy.deepcopy(request), "impossible": {**request, "agent": "leda"}}
    requests["failed"]["eval_set"]["cases"][0]["turns"][0]["expect"] = {"answer": {"exact": "Because it is cold."}}
    codes = {}
    for name, changed in requests.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(changed), encoding="utf-8")
        ran = await finished("eval", str(path), desk.address)
        codes[name] = (ran.code, ran.out.splitlines()[-1:], "UNKNOWN_AGENT" in ran.err)
    assert codes == {
        "passed": (0, ["desk passed"], False),
        "failed": (1, ["desk failed"], False),
        "impossible": (2, [], True),
    }


def slow_team(folder: Path) -> Path:
    """A team whose run takes about two seconds, in ten steps."""
    calls: list[object] = [
        {"calls": [{"name": "look_up", "arguments": {"topic": f"topic {number}"}}], "delay_ms": 200}
        for number in range(10)
    ]
    return write_project(folder, llm("lead", tools=["look_up"]), script={"lead": [*calls, "That is all."]})


async def killed_and_restarted(folder: Path, program: Program, *, after: bytes) -> tuple[str, list[int]]:
    """Kill the server under a program when its output has `after`, start another one; return output and sequences."""
    port = program.server.address.rpartition(":")[2]
    out = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while after not in out:
            assert program.process.stdout is not None
            line = await program.process.stdout.readline()
            assert line, "it ended too early"
            out += line
        await program.server.kill()
        async with serving(folder / "bough.yaml", arguments=["--port", port]) as again:
            rest, _ = await program.process.communicate()
            async with AsyncClient(again.address) as client:
                runs = [run async for run in client.list_runs()]
                assert len(runs) == 1, "a second run was started"
                watched = client.watch(runs[0].run_id, until=WATCH_UNTIL_CURRENT)
                sequences = [event.sequence async for event in watched]
    return (out + rest).decode(), sequences


async def test_rejoin_survives_a_killed_server_and_has_every_sequence_once(tmp_path: Path) -> None:
    async with serving(slow_team(tmp_path)) as server, running("rejoin", "lead", "Go.", server.address) as process:
        program = Program(process=process, server=server)
        out, sequences = await killed_and_restarted(tmp_path, program, after=b" tool_completed\n")
    assert program.process.returncode == 0
    lines = out.splitlines()
    assert lines[-1] == "That is all."
    assert [int(line.split()[0]) for line in lines[:-1]] == sequences == list(range(1, len(sequences) + 1))
    assert any(line.endswith(" lead run_resumed") for line in lines)


async def test_the_driver_follows_over_a_killed_server(tmp_path: Path) -> None:
    async with serving(slow_team(tmp_path)) as server, running("driver", server.address) as process:
        request = {"agent": "lead", "input": {"parts": [{"text": "Go."}]}, "policy": {"background": True}}
        assert process.stdin is not None
        process.stdin.write(json.dumps({"call": "AgentService.Run", "request": request}).encode() + b"\n")
        process.stdin.write_eof()
        program = Program(process=process, server=server)
        out, sequences = await killed_and_restarted(tmp_path, program, after=b'"toolCompleted"')
    printed = [json.loads(line) for line in out.splitlines()]
    assert [int(line["event"]["sequence"]) for line in printed[:-1]] == sequences
    assert printed[-1] == {"end": {"code": "OK", "rejoins": 1}}


def programs_of(page: Path) -> list[str]:
    """The Go programs of a page, without its fragments."""
    blocks = re.findall(r"^```go\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if block.startswith("package main")]


@pytest.mark.parametrize("page", ["clients/go/README.md", "docs/how-to/other-languages.md"])
async def test_the_programs_of_the_pages_run_in_a_module_that_requires_the_client(
    page: str, desk: Serving, tmp_path: Path
) -> None:
    [program] = programs_of(ROOT / page)
    (tmp_path / "main.go").write_text(program.replace("127.0.0.1:50051", desk.address), encoding="utf-8")
    module = "github.com/bough-dev/bough/clients/go"
    required = (MODULE / "go.mod").read_text(encoding="utf-8").replace(f"module {module}", "module example.com/desk")
    replaced = f"\nrequire {module} v0.0.0\n\nreplace {module} => {MODULE}\n"
    (tmp_path / "go.mod").write_text(required + replaced, encoding="utf-8")
    shutil.copy(MODULE / "go.sum", tmp_path)
    ran = await asyncio.to_thread(go, "run", ".", folder=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "1 lead run_started\n" in ran.stdout
    assert " lead/researcher sub_agent_started\n" in ran.stdout


async def drive(address: str, *lines: Mapping[str, object]) -> list[dict[str, dict[str, object]]]:
    """Return what the driver prints for these lines."""
    driven = await finished("driver", address, lines=[json.dumps(line) for line in lines])
    assert (driven.code, driven.err) == (0, "")
    return [json.loads(line) for line in driven.out.splitlines()]


async def test_the_driver_performs_every_kind_of_line(desk: Serving) -> None:
    request = {"agent": "lead", "input": {"parts": [{"text": QUESTION}]}}
    answer, ok = await drive(desk.address, {"call": "AgentService.Run", "request": request, "collect": True})
    assert answer["answer"]["state"] == "EXECUTION_STATE_SUCCEEDED"
    assert not answer["answer"]["interrupted"]
    assert "red" in str(answer["answer"]["text"])
    run_id = answer["answer"]["runId"]
    assert ok == {"end": {"code": "OK", "rejoins": 0}}

    watch = {"call": "AgentService.WatchRun", "request": {"run_id": run_id}, "cancelAfterEvents": 2}
    *events, end = await drive(desk.address, watch)
    assert [event["event"]["sequence"] for event in events] == ["1", "2"]
    assert end["end"]["code"] == "CANCELLED"

    tree, _ = await drive(desk.address, {"tree": run_id})
    agents = tree["answer"]["agents"]
    assert isinstance(agents, list)
    assert [(agent["path"], agent["depth"]) for agent in agents] == [
        ("lead", 0),
        ("lead/researcher", 1),
        ("lead/writer", 1),
    ]

    got, _ = await drive(desk.address, {"call": "AgentService.GetRun", "request": {"runId": run_id}})
    assert got["answer"]["run"]["runId"] == run_id  # type: ignore[index]
    [wrong] = await drive(desk.address, {"call": "AgentService.Run", "request": {"agent": ""}})
    assert (wrong["end"]["code"], wrong["end"]["reason"]) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert {violation["field"] for violation in wrong["end"]["violations"]} >= {"agent", "input"}  # type: ignore[attr-defined]
    beyond = {"call": "AgentService.WatchRun", "request": {"runId": run_id, "afterSequence": "9999"}}
    [out_of_range] = await drive(desk.address, beyond)
    assert out_of_range["end"]["code"] == "OUT_OF_RANGE"
    assert out_of_range["end"]["rejoins"] == 0


async def test_the_driver_transcodes_and_refuses_what_it_does_not_understand() -> None:
    binary = base64.b64encode(b"\x10\x07\xba\x3f\x00").decode()  # sequence 7, and a field that is unknown
    [written] = await drive("127.0.0.1:1", {"transcode": "bough.v1.AgentEvent", "binary": binary})
    assert written == {"transcoded": {"binary": binary, "json": {"sequence": "7"}}}
    refused = await finished("driver", "127.0.0.1:1", lines=['{"cal": "AgentService.Run"}'])
    assert refused.code == 2
    assert "cal" in refused.err


async def test_first_contact_with_an_address_where_nothing_is_fails_fast() -> None:
    async with asyncio.timeout(5):
        [end] = await drive("127.0.0.1:1", {"call": "AgentService.Run", "request": {"agent": "lead"}})
    assert end["end"]["code"] == "UNAVAILABLE"


async def test_a_stopping_server_is_a_drop_too(tmp_path: Path) -> None:
    async with serving(slow_team(tmp_path)) as server, running("driver", server.address) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"agent": "lead", "input": {"parts": [{"text": "Go."}]}, "policy": {"background": True}}
        process.stdin.write(json.dumps({"call": "AgentService.Run", "request": request, "rejoin": False}).encode())
        process.stdin.write_eof()
        await process.stdout.readline()
        server.send(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            out, _ = await process.communicate()
        end = json.loads(out.splitlines()[-1])["end"]
    assert end["code"] == "UNAVAILABLE"
