"""The `bough` command as a process: its output, its errors and its exit code."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format

import bough as bough_client
from bough.v1 import agent_service_pb2, error_pb2, event_pb2, execution_pb2
from bough_server.distribution import version
from tests.clients.cli_process import Finished, bough, bough_cold, started
from tests.clients.run_events import RUN_ID, SESSION_ID, Turn, desk
from tests.clients.stream_server import Call, LoopbackService, listening
from tests.support.processes import serving
from tests.support.projects import llm, write_project


async def served(service: LoopbackService, *arguments: str, said: str = "") -> Finished:
    """Run a command against a new server."""
    async with listening(service) as port:
        return await bough(*arguments, port=port, said=said)


async def test_a_turn_is_shown_live_with_its_answer_and_its_tree() -> None:
    ended = await served(LoopbackService(desk()), "run", "lead", "Write about owls.")
    assert ended.code == 0
    assert ended.err == f"run {RUN_ID}\nsession {SESSION_ID}\n"
    lines = ended.out.splitlines()
    assert lines[:2] == ["● lead", "│ The researcher knows."]
    assert lines[11:14] == ["│ Owls hunt at night.", "✓ lead  9.0 s, 1,204 tokens", ""]
    assert lines[15].startswith("lead ")
    assert lines[16].startswith("└─ researcher ")
    assert "\x1b" not in ended.out
    assert max(len(line) for line in lines) <= 80


async def test_no_tree_ends_with_the_answer() -> None:
    ended = await served(LoopbackService(desk()), "run", "lead", "hi", "--no-tree")
    assert ended.out.endswith("│ Owls hunt at night.\n✓ lead  9.0 s, 1,204 tokens\n")


async def test_json_is_one_event_a_line_and_nothing_else() -> None:
    ended = await served(LoopbackService(desk()), "run", "lead", "hi", "--output", "json")
    assert [json_format.Parse(line, event_pb2.AgentEvent()) for line in ended.out.splitlines()] == desk()
    assert (ended.code, ended.err) == (0, f"run {RUN_ID}\n")


async def test_plain_is_one_line_an_event() -> None:
    ended = await served(LoopbackService(desk()), "run", "lead", "hi", "--output", "plain")
    assert [int(line.split()[0]) for line in ended.out.splitlines()] == list(range(1, len(desk()) + 1))


async def test_answer_is_the_answer_alone() -> None:
    ended = await served(LoopbackService(desk()), "run", "lead", "hi", "--output", "answer")
    assert (ended.out, ended.code) == ("Owls hunt at night.\n", 0)


async def test_a_dash_reads_what_to_say_from_standard_input() -> None:
    service = LoopbackService(desk())
    await served(service, "run", "lead", "-", "--request-id", "mine", "--session", "s1", said="Write\nabout owls.")
    request = service.asked[0]
    assert (request.agent, request.input.parts[0].text) == ("lead", "Write\nabout owls.")
    assert (request.request_id, request.session_id) == ("mine", "s1")


async def test_a_session_is_created_only_if_that_is_asked_for() -> None:
    service = LoopbackService(desk())
    turn = ("run", "lead", "hi", "--output", "answer")
    await served(service, *turn, "--session", "s1")
    await served(service, *turn, "--session", "s1", "--create-session")
    asked = [request for request in service.asked if isinstance(request, agent_service_pb2.RunRequest)]
    assert [(request.session_id, request.on_missing_session) for request in asked] == [
        ("s1", agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED),
        ("s1", agent_service_pb2.MISSING_SESSION_POLICY_CREATE),
    ]
    without = await served(service, *turn, "--create-session")
    assert without == Finished(
        code=2,
        out="",
        err="--create-session needs the id of the session: add --session ID, or omit both.\n",
    )
    assert len(service.asked) == 2


async def test_a_failed_run_exits_1_and_says_why() -> None:
    turn = Turn()
    turn.start()
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, message="The model is away.")
    turn.add("lead", run_failed=event_pb2.RunFailed(error=error))
    ended = await served(LoopbackService(turn.events), "run", "lead", "hi", "--output", "answer")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"run {RUN_ID}\nThe run failed: MODEL_UNAVAILABLE: The model is away.\n"


async def test_a_run_past_its_deadline_is_followed_to_the_end_that_the_server_gives_it() -> None:
    turn = Turn()
    turn.start()
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message="Its time was over.")
    turn.add("lead", run_failed=event_pb2.RunFailed(error=error))
    service = LoopbackService(turn.events, [Call(events=1, code=grpc.StatusCode.DEADLINE_EXCEEDED)])
    ended = await served(service, "run", "lead", "hi", "--output", "plain")
    assert (ended.code, [line.split()[0] for line in ended.out.splitlines()]) == (1, ["1", "2"])
    assert ended.err == f"run {RUN_ID}\nThe run failed: DEADLINE_EXCEEDED: Its time was over.\n"


async def test_a_cancelled_run_exits_4_and_says_why() -> None:
    deadline = event_pb2.RunCancelled(cancel_reason=execution_pb2.CANCEL_REASON_DEADLINE)
    for cancelled, words in ((deadline, "cancelled: deadline"), (event_pb2.RunCancelled(), "cancelled")):
        turn = Turn()
        turn.start()
        turn.add("lead", run_cancelled=cancelled)
        ended = await served(LoopbackService(turn.events), "run", "lead", "hi")
        assert (ended.code, ended.err) == (4, f"run {RUN_ID}\nsession {SESSION_ID}\nThe run was {words}.\n")


async def test_a_refused_call_is_a_sentence_and_exit_code_2() -> None:
    service = LoopbackService([], [Call(silent=True, code=grpc.StatusCode.NOT_FOUND)])
    assert await served(service, "run", "absent", "hi") == Finished(code=2, out="", err="silent\n")


async def test_a_named_address_where_nobody_answers_is_never_replaced() -> None:
    async with listening(LoopbackService([])) as port:
        pass
    ended = await bough("run", "lead", "hi", port=port)
    sentence = f"No server answers at 127.0.0.1:{port}: start one there, or omit the address.\n"
    assert ended == Finished(code=2, out="", err=sentence)


async def test_the_address_may_come_from_the_environment() -> None:
    async with listening(LoopbackService(desk())) as port:
        environment = {"BOUGH_ADDRESS": f"127.0.0.1:{port}"}
        ended = await bough("run", "lead", "hi", "--output", "answer", environment=environment)
    assert (ended.code, ended.out) == (0, "Owls hunt at night.\n")


async def test_ctrl_c_cancels_the_run_and_exits_130() -> None:
    service = LoopbackService(desk(), [Call(events=3, hold=True)])
    async with listening(service) as port:
        process = await started("run", "lead", "hi", "--output", "plain", port=port)
        assert process.stdout is not None
        await service.held.wait()
        lines = [await process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130
    assert service.cancelled_runs == [RUN_ID]
    assert b"run.cancelled" in out
    assert [line.split()[0] for line in lines] == [b"1", b"2", b"3"]
    assert err.decode().splitlines() == [
        f"run {RUN_ID}",
        "Cancelling the run; Ctrl-C again to leave at once.",
        "The run was cancelled.",
    ]


async def test_a_second_ctrl_c_leaves_at_once() -> None:
    service = LoopbackService(desk(), [Call(events=3, hold=True)])
    service.ignores_cancel = True
    async with listening(service) as port:
        process = await started("run", "lead", "hi", "--output", "plain", port=port)
        assert process.stdout is not None
        await service.held.wait()
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        await service.cancel_asked.wait()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        await service.left.wait()
    assert process.returncode == 130
    assert err.decode() == f"run {RUN_ID}\nCancelling the run; Ctrl-C again to leave at once.\n"


async def test_a_run_watched_after_its_end_still_says_how_it_ended() -> None:
    ended = await served(LoopbackService(desk()), "watch", RUN_ID, "--after", f"{len(desk())}", "--output", "plain")
    assert (ended.code, ended.out) == (1, "")


async def test_watch_shows_a_run_again_after_a_sequence() -> None:
    ended = await served(LoopbackService(desk()), "watch", RUN_ID, "--after", "20", "--output", "plain")
    assert ended.code == 0
    assert [int(line.split()[0]) for line in ended.out.splitlines()] == list(range(21, len(desk()) + 1))


async def test_a_run_that_is_watched_again_shows_its_answer_once() -> None:
    whole = await served(LoopbackService(desk()), "watch", RUN_ID)
    later = await served(LoopbackService(desk()), "watch", RUN_ID, "--after", f"{len(desk()) - 1}")
    assert (whole.code, later.code) == (0, 0)
    assert (whole.out.count("Owls hunt at night."), later.out.count("Owls hunt at night.")) == (1, 1)


async def test_ctrl_c_leaves_a_watched_run_alone() -> None:
    service = LoopbackService(desk(), [Call(events=3, hold=True)])
    async with listening(service) as port:
        process = await started("watch", RUN_ID, "--output", "plain", port=port)
        await service.held.wait()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        await service.left.wait()
    assert (process.returncode, err, service.cancelled_runs) == (130, b"", [])


async def test_events_are_filtered_by_name_also_those_of_the_run() -> None:
    ended = await served(LoopbackService(desk()), "events", RUN_ID, "--types", "tool_completed,sub_agent.*")
    names = [line.split()[3] for line in ended.out.splitlines()]
    assert names == [
        "agent.sub_agent.started",
        "agent.tool.completed",
        "agent.sub_agent.completed",
        "agent.tool.completed",
    ]


async def test_tree_prints_rows_or_json() -> None:
    shown = await served(LoopbackService(desk()), "tree", RUN_ID)
    assert (shown.code, shown.out.splitlines()[1].split()[0]) == (0, "lead")
    printed = await served(LoopbackService(desk()), "tree", RUN_ID, "--json")
    assert [agent["name"] for agent in json.loads(printed.out)["agents"]] == ["lead", "researcher"]


async def test_runs_are_listed_as_rows_or_json_lines() -> None:
    shown = await served(LoopbackService([]), "runs", "--limit", "3")
    assert [line.split()[0] for line in shown.out.splitlines()] == ["run", "run-0", "run-1", "run-2"]
    printed = await served(LoopbackService([]), "runs", "--json")
    assert [json.loads(line)["runId"] for line in printed.out.splitlines()] == [f"run-{n}" for n in range(5)]


async def test_a_run_is_cancelled_by_the_end_of_its_id() -> None:
    service = LoopbackService([], runs=["0193d6b4-abcdef"])
    ended = await served(service, "cancel", "abcdef")
    assert (ended.code, ended.out) == (0, "0193d6b4-abcdef is being cancelled\n")
    assert service.cancelled_runs == ["0193d6b4-abcdef"]


async def test_a_reader_that_leaves_is_neither_a_traceback_nor_a_failure() -> None:
    service = LoopbackService(desk(), [Call(batch=1)])
    async with listening(service) as port:
        read, write = os.pipe()
        process = await started("events", RUN_ID, port=port, stdout=write)
        os.close(write)
        os.close(read)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")


async def test_a_terminal_gets_colors_unless_they_are_not_wanted() -> None:
    async with listening(LoopbackService(desk())) as port:
        colored = await on_a_terminal("run", "lead", "hi", port=port, environment={"TERM": "xterm-256color"})
        plain = await on_a_terminal(
            "run", "lead", "hi", port=port, environment={"TERM": "xterm-256color", "NO_COLOR": "1"}
        )
    color = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert (bool(color.search(colored)), bool(color.search(plain))) == (True, False)
    for text in (colored, plain):
        bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
        assert "│ │ Owls are birds." in bare
        assert "Owls hunt at night." in bare


async def on_a_terminal(*arguments: str, port: int, environment: Mapping[str, str]) -> str:
    """Return the output of a command at a terminal of 80 columns."""
    ours, its = pty.openpty()
    process = await started(*arguments, port=port, environment=environment, stdout=its)
    os.close(its)
    reading = asyncio.create_task(asyncio.to_thread(read_all, ours))
    await process.communicate()
    assert process.returncode == 0
    return (await reading).decode()


def read_all(descriptor: int) -> bytes:
    """Read until the other side is closed, which a terminal reports as an error."""
    found = b""
    try:
        while piece := os.read(descriptor, 65536):
            found += piece
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return found


async def test_help_and_version_need_no_server() -> None:
    shown = await bough("--help")
    assert (shown.code, "Run agents, follow their runs" in shown.out) == (0, True)
    version = await bough_cold("--version")
    assert (version.code, version.out.startswith("bough "), version.err) == (0, True, "")
    turns = ("init", "run", "chat", "resume", "fork", "replay", "watch", "tree", "events", "runs", "cancel")
    for command in (*turns, "serve", "agents", "models", "sessions", "db", "prune", "doctor", "schema"):
        assert f"\n  {command} " in shown.out


async def test_wrong_usage_exits_2() -> None:
    assert (await bough("run", "lead")).code == 2
    ended = await bough("run", "lead", "hi", "--timeout", "soon")
    assert (ended.code, "must be a duration such as 10m" in ended.err) == (2, True)


async def test_embedded_and_an_address_exclude_each_other() -> None:
    ended = await bough("--embedded", "runs", port=1)
    assert (ended.code, ended.err) == (2, "--embedded and --address exclude each other: omit one of them.\n")


async def test_the_package_is_a_program_and_says_its_version() -> None:
    for words in (("-m", "bough_server", "--version"), ("-c", "import bough; print('bough', bough.__version__)")):
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)
        out, _ = await process.communicate()
        assert (process.returncode, out.decode()) == (0, f"bough {version()}\n")
    with pytest.raises(AttributeError, match="has no attribute 'version'"):
        getattr(bough_client, "version")  # noqa: B009  # mypy would object to the attribute


async def completed(folder: Path, typed: str) -> list[str]:
    """What a shell is offered after what was typed, of which the last word is unfinished; nothing else is printed."""
    words = typed.split(" ")
    shell = {"_BOUGH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import sys; sys.argv[0] = 'bough'; from bough_server.cli import main; main()"),
        env={**os.environ, **shell},
        cwd=folder,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return out.decode().split()


async def test_agents_models_and_runs_are_completed_and_nothing_is_made(tmp_path: Path) -> None:
    models = {"default": {"provider": "scripted", "script": "script.yaml"}, "other": {"alias": "default"}}
    config = write_project(tmp_path, llm("lead"), llm("leader"), llm("clerk"), script={"*": ["Yes."]}, models=models)
    files = set(os.listdir(tmp_path))
    assert await completed(tmp_path, "bough run le") == ["lead", "leader"]
    assert await completed(tmp_path, "bough chat c") == ["clerk"]
    assert await completed(tmp_path, "bough run lead Hello --model o") == ["other"]
    assert await completed(tmp_path, f"bough --config {tmp_path}/none.yaml run le") == []
    assert set(os.listdir(tmp_path)) == files
    async with serving(config) as server:
        ran = await bough("--address", server.address, "run", "lead", "hi", "--output", "answer")
        run_id = ran.err.split()[1]
        assert await completed(tmp_path, "bough tree ") == ["last", run_id]
        assert await completed(tmp_path, f"bough tree {run_id[:8]}") == [run_id]
