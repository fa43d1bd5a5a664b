"""The TypeScript client: its checks and tests, its examples against a server, and a server that dies under them."""

import asyncio
import base64
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import AgentEvent, RunStarted
from tests.docs.pages import blocks
from tests.languages.typescript_client import PACKAGE, bundle, depend, finished, npm, npx, package, running
from tests.support.certificates import certificate
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project
from tests.support.toolchains import ROOT, require

QUESTION = "Why do leaves turn red?"
SLOW = [{"chunks": [f"word{number} " for number in range(40)], "delay_ms": 20}]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True, scope="module")
def _toolchain() -> None:
    require("typescript")


@pytest.fixture(autouse=True, scope="module")
def _built(_toolchain: None) -> None:
    package()


def serving_example(name: str, folder: Path) -> AbstractAsyncContextManager[Serving]:
    """Serve a copy of an example, whose folder is not written to."""
    copy = shutil.copytree(ROOT / "examples" / name, folder / name)
    environment = {"BOUGH_DATABASE": str(folder / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    return serving(copy / "bough.yaml", environment=environment)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Serving]:
    """The desk of the examples."""
    async with serving_example("desk", tmp_path) as server:
        yield server


def test_the_linter_finds_nothing() -> None:
    linted = npx(PACKAGE, "oxlint", "--deny-warnings")
    assert linted.returncode == 0, linted.stdout


def test_its_own_tests_pass(tmp_path: Path) -> None:
    tested = npm("run", "--silent", "test:built", BOUGH_TEST_CERTIFICATE=str(certificate(tmp_path)))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert re.search(r"^# skipped 0$", tested.stdout, re.MULTILINE), tested.stdout


async def test_the_programs_of_its_pages_compile_and_run(desk: Serving, tmp_path: Path) -> None:
    depend(tmp_path)
    pages = ("clients/typescript/README.md", "docs/how-to/other-languages.md")
    shown = [block for page in pages for block in blocks(page, (ROOT / page).read_text("utf-8")) if block.kind == "ts"]
    programs = [tmp_path / f"block{number}.ts" for number in range(len(shown))]
    authorities = str(certificate(tmp_path))
    for program, block in zip(programs, shown, strict=True):
        text = block.text.replace("127.0.0.1:50051", desk.address).replace("Client()", f'Client("{desk.address}")')
        program.write_text(text.replace("/etc/ssl/certs/ca-certificates.crt", authorities), encoding="utf-8")
    compiled = await asyncio.to_thread(npx, tmp_path, "tsc")
    assert compiled.returncode == 0, compiled.stdout
    outputs = []
    for program in programs:
        ran = await finished(program.with_suffix(".js"))
        assert (ran.code, ran.err) == (0, ""), ran.err
        outputs.append(ran.out)
    assert len(outputs) == 6
    assert re.search(r"^\d+n lead runCompleted\nIn autumn", outputs[0], re.MULTILINE)
    assert outputs[1].startswith("3 In autumn")
    assert outputs[2].splitlines()[:4] == ["true", "lead 2", "  researcher 1", "  writer 0"]
    assert outputs[4] == "Because the green fades. [ 'Run', 'WatchRun' ]\n"
    assert outputs[5].endswith("show. Some trees then also make a red pigment.\n")


def test_the_package_has_what_its_exports_name_and_nothing_of_its_tests() -> None:
    packed = npm("pack", "--dry-run", "--json", "--ignore-scripts")
    assert packed.returncode == 0, packed.stderr
    files = {file["path"] for file in json.loads(packed.stdout)[0]["files"]}
    exports = json.loads((PACKAGE / "package.json").read_text(encoding="utf-8"))["exports"].values()
    for export in (path.removeprefix("./") for path in exports):
        assert {export, export.replace(".js", ".d.ts")} <= files
    assert {path for path in files if not path.startswith("dist/")} <= {"package.json", "README.md", "LICENSE"}
    assert not [path for path in files if path.startswith("dist/dev")]


def test_the_lock_file_records_no_registry() -> None:
    locked = json.loads((PACKAGE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert [name for name, package in locked.items() if "resolved" in package] == []
    assert all("integrity" in package for name, package in locked.items() if name)


async def test_run_shows_the_tree_while_it_grows(desk: Serving) -> None:
    ran = await finished("examples/run", "lead", QUESTION, desk.address)
    _check_run(ran.out)
    assert (ran.code, ran.err) == (0, "")


async def test_a_bundle_runs_without_any_package_beside_it(desk: Serving, tmp_path: Path) -> None:
    program = shutil.copy(bundle() / "run.mjs", tmp_path)
    ran = await finished(Path(program), "lead", QUESTION, desk.address)
    _check_run(ran.out)
    assert (ran.code, ran.err) == (0, "")


def _check_run(out: str) -> None:
    live, answer, tree = out.split("\n\n")
    assert [line for line in live.splitlines() if "{" not in line] == ["lead", "  researcher", "  writer"]
    assert '  researcher\n    search_notes {"topic"' in live
    assert answer.startswith("In autumn")
    assert tree.splitlines() == [
        "lead: 6 model calls, 2 tool calls",
        "lead/researcher: 2 model calls, 1 tool calls",
        "lead/writer: 1 model calls, 0 tool calls",
    ]


async def test_approve_answers_what_a_run_waits_for(tmp_path: Path) -> None:
    typed = ("4711", "it does not fit", "y")
    async with serving_example("approvals", tmp_path) as server:
        said = ("examples/approve", "lead", "Orders 1001 and 1002 come back.", server.address)
        ran = await finished(*said, lines=typed)
        left = await finished(*said, lines=typed[:1])
    assert (ran.code, ran.err) == (0, "")
    assert left.code == 2
    assert "no answer: the run still waits for it" in left.err
    assert ran.out == (
        'lead calls read_card {"reader": "counter"}: '
        "interviewer asks: Orders 1001 and 1002 come back. May we ask why? "
        'refunds wants to call refund {"order_id": "1002", "amount": 180}. Approve? [y/n] '
        "Thank you. Whatever was approved is on its way to your card.\n"
    )


async def test_rejoin_has_every_sequence_once_though_its_server_is_killed_and_started_again(
    tmp_path: Path, free_tcp_port: int
) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": SLOW})
    port = ("--port", str(free_tcp_port))
    async with (
        serving(config, arguments=port) as server,
        running("examples/rejoin", "alone", "hi", server.address) as program,
    ):
        assert program.stdout is not None
        first = [await program.stdout.readline() for _ in range(8)]
        await server.kill()
        async with serving(config, arguments=port):
            rest, err = await program.communicate()
    *events, answer = (b"".join(first) + rest).decode().splitlines()
    assert [int(line.split()[0]) for line in events] == list(range(1, len(events) + 1))
    assert events[-1].split()[1:] == ["alone", "runCompleted"]
    assert answer == "".join(f"word{number} " for number in range(40))
    assert program.returncode == 0
    assert err.decode().startswith("dropped, rejoining: The server cannot be reached: ")


async def test_eval_ends_as_ci_expects(desk: Serving, tmp_path: Path, free_tcp_port: int) -> None:
    request = ROOT / "examples" / "eval" / "request.json"
    wrong = tmp_path / "wrong.json"
    await asyncio.to_thread(_expect_another_answer, request, wrong)
    passed = await finished("examples/eval", str(request), desk.address)
    failed = await finished("examples/eval", str(wrong), desk.address)
    unreachable = await finished("examples/eval", str(request), f"127.0.0.1:{free_tcp_port}")
    assert (passed.code, passed.err) == (0, "")
    assert passed.out.endswith("\ndesk: 7 of 7 trials passed\n")
    assert "leaves #0: passed\n" in passed.out
    assert (failed.code, failed.err) == (1, "")
    assert "leaves #0: failed" in failed.out
    assert failed.out.endswith("\ndesk: 6 of 7 trials passed\n")
    assert (unreachable.code, unreachable.out) == (2, "")
    assert f"127.0.0.1:{free_tcp_port}" in unreachable.err


def _expect_another_answer(request: Path, wrong: Path) -> None:
    """Write a request again whose first case expects an answer that the desk never has."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    asked["eval_set"]["cases"][0]["turns"][0]["expect"]["answer"] = {"exact": "The desk never says this."}
    wrong.write_text(json.dumps(asked), encoding="utf-8")


async def test_the_driver_speaks_the_protocol_of_the_contract(desk: Serving) -> None:
    run = {"agent": "lead", "input": {"parts": [{"text": QUESTION}]}}
    event = AgentEvent(sequence=7, run_started=RunStarted(agent="lead"))
    encoded = base64.b64encode(event.SerializeToString()).decode()
    collected, end, *more = await _driven(
        desk,
        {"call": "AgentService.Run", "request": run, "collect": True},
        {"call": "AgentService.Run", "request": run, "cancelAfterEvents": 2},
        {"call": "AgentService.WatchRun", "request": {"run_id": "none"}, "rejoin": False},
        {"call": "AgentService.GetRun", "request": {}},
        {"transcode": "bough.v1.AgentEvent", "binary": encoded},
        {"transcode": "bough.v1.AgentEvent", "json": {"sequence": "7", "run_started": {"agent": "lead"}}},
    )
    answer = collected["answer"]
    assert (answer["state"], answer["interrupted"]) == ("EXECUTION_STATE_SUCCEEDED", False)
    assert answer["text"].startswith("In autumn")
    assert end == {"end": {"code": "OK", "rejoins": 0}}
    first, second, cancelled, missing, invalid, *transcoded = more
    assert [first["event"]["sequence"], second["event"]["sequence"]] == ["1", "2"]
    assert cancelled["end"]["code"] == "CANCELLED"
    assert (missing["end"]["code"], missing["end"]["reason"]) == ("NOT_FOUND", "NOT_FOUND")
    assert [violation["field"] for violation in invalid["end"]["violations"]] == ["run_id"]
    written = {"transcoded": {"binary": encoded, "json": {"sequence": "7", "runStarted": {"agent": "lead"}}}}
    assert transcoded == [written, written]
    named = {"call": "AgentService.GetRun", "request": {"runId": answer["runId"]}}
    tree, _, found, _ = await _driven(desk, {"tree": answer["runId"]}, named)
    assert found["answer"]["run"]["lastSequence"] == answer["throughSequence"]
    assert [(agent["path"], agent["depth"]) for agent in tree["answer"]["agents"]] == [
        ("lead", 0),
        ("lead/researcher", 1),
        ("lead/writer", 1),
    ]


async def test_the_driver_ends_with_2_at_a_line_that_it_does_not_understand(desk: Serving) -> None:
    for line in ("{", '{"call": "AgentService.Walk"}', '{"transcode": "bough.v1.Nothing", "json": {}}'):
        ended = await finished("driver/driver", desk.address, lines=[line])
        assert (ended.code, ended.out) == (2, "")
        assert line in ended.err


async def _driven(server: Serving, *lines: dict[str, object]) -> list[dict[str, Any]]:
    driven = await finished("driver/driver", server.address, lines=[json.dumps(line) for line in lines])
    assert (driven.code, driven.err) == (0, "")
    return [json.loads(line) for line in driven.out.splitlines()]
