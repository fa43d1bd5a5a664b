"""Options of `bough run`: sessions by short names, another model, questions at a terminal, global options."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clients.cli_process import Finished, bough, server_of
from tests.clients.terminals import at_a_terminal
from tests.support.projects import llm, write_project

TOOLS = '''
from bough_server import Context, agent, text_of, tool


@tool(approval=True)
def pay(amount: int) -> str:
    """Pays an amount."""
    return f"Paid {amount}."


@agent
async def clerk(ctx: Context, input: str) -> str:
    """Answers in code."""
    return "Code."


@agent(agents=["writer"])
async def editor(ctx: Context, input: str) -> str:
    """Asks the writer in code."""
    return text_of(await ctx.dispatch("writer", input))
'''
SUPERVISOR = {
    "name": "boss",
    "description": "Leads.",
    "supervisor": {"llm": {"instruction": "Lead."}},
    "sub_agents": [{"agent": "writer", "link_mode": "TRANSFER"}],
}


@pytest.fixture(scope="module")
async def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two scripted models."""
    folder = tmp_path_factory.mktemp("run")
    plain, other = {"*": ["Plain."]}, {"*": ["Other."]}
    pay = [{"calls": [{"name": "pay", "arguments": {"amount": 5}}]}]
    twice = {
        "payer": [*pay, *pay, "Paid twice."],
        "lead": [{"calls": [{"name": "call_writer", "arguments": {"message": "Write."}}]}, "Led."],
    }
    (folder / "other.yaml").write_text(json.dumps({"agents": {**other, "lead": twice["lead"]}}), encoding="utf-8")
    (folder / "shop_tools.py").write_text(TOOLS, encoding="utf-8")
    return write_project(
        folder,
        llm("lead", calls=["writer"]),
        llm("writer"),
        llm("payer", tools=["pay"]),
        SUPERVISOR,
        script={**plain, **twice},
        models={
            "default": {"provider": "scripted", "script": "script.yaml"},
            "other": {"provider": "scripted", "script": "other.yaml"},
        },
        python=["shop_tools"],
    )


@pytest.fixture(scope="module")
async def port(config: Path) -> AsyncIterator[int]:
    """The port of its server."""
    async with server_of(config) as port:
        yield port


async def run(port: int, agent: str, *options: str) -> Finished:
    return await bough("run", agent, "hi", "--output", "answer", *options, port=port)


async def sessions_of_runs(port: int) -> list[str]:
    listed = await bough("runs", "--json", "--limit", "1000", port=port)
    return [json.loads(line)["sessionId"] for line in reversed(listed.out.splitlines())]


async def test_a_session_is_continued_by_its_id_by_last_by_continue_or_by_the_end_of_its_id(port: int) -> None:
    await run(port, "writer", "--session", "mine-0815", "--create-session")
    for options in (("--session", "mine-0815"), ("--session", "e-0815"), ("--session", "last"), ("--continue",)):
        assert (await run(port, "writer", *options)).code == 0
    assert (await sessions_of_runs(port))[-5:] == ["mine-0815"] * 5
    shown = await bough("sessions", "show", "e-0815", "--json", port=port)
    messages = await bough("sessions", "messages", "last", "--json", port=port)
    runs = await bough("runs", "--session", "last", "--json", port=port)
    assert json.loads(shown.out)["sessionId"] == "mine-0815"
    assert (messages.out.count("\n"), runs.out.count("\n")) == (10, 5)


async def test_a_session_that_is_none_or_several_is_a_sentence(port: int) -> None:
    for name in ("one-of-two", "two-of-two"):
        await run(port, "writer", "--session", name, "--create-session")
    none = await run(port, "writer", "--session", "nowhere")
    several = await run(port, "writer", "--session", "of-two")
    both = await run(port, "writer", "--session", "one-of-two", "--continue")
    words = "There is no session whose id is 'nowhere' or ends in it: `bough sessions list` lists sessions.\n"
    assert none == Finished(code=2, out="", err=words)
    assert several.err == ("2 session ids end in 'of-two', such as two-of-two and one-of-two: use more characters.\n")
    assert (both.code, "--session and --continue exclude each other" in both.err) == (2, True)


async def test_continue_without_any_session_is_a_sentence(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    ended = await bough("--config", str(config), "run", "alone", "hi", "--continue", "--embedded")
    words = "There is no session yet: `bough run` and `bough chat` begin one.\n"
    assert ended == Finished(code=2, out="", err=words)


async def test_another_model_answers_for_every_agent_of_the_run_and_for_this_run_alone(port: int) -> None:
    models = []
    for options in (("--model", "other"), ()):
        await run(port, "lead", *options)
        events = await bough("events", "last", "--types", "llm.started", "--json", port=port)
        started = [json.loads(line) for line in events.out.splitlines()]
        models.append({(event["agent"], event["llmStarted"]["model"]) for event in started})
    assert models == [{("lead", "other"), ("writer", "other")}, {("lead", "default"), ("writer", "default")}]


@pytest.mark.parametrize("agent", ["boss", "editor"])
async def test_a_supervisor_and_agents_that_code_calls_use_the_model_too(port: int, agent: str) -> None:
    ended = await run(port, agent, "--model", "other")
    assert (ended.code, ended.out) == (0, "Other.\n")


async def test_definitions_of_files_get_the_model_too(port: int, tmp_path: Path) -> None:
    file = tmp_path / "poet.yaml"
    file.write_text(json.dumps(llm("poet")), encoding="utf-8")
    ended = await run(port, "poet", "--definitions", str(file), "--model", "other")
    assert (ended.code, ended.out) == (0, "Other.\n")


async def test_a_model_that_is_none_or_changes_nothing_is_a_sentence(port: int) -> None:
    unknown = await run(port, "writer", "--model", "othr")
    code = await run(port, "clerk", "--model", "other")
    assert (unknown.code, "There is no model 'othr'. Did you mean 'other'?" in unknown.err) == (2, True), unknown.err
    assert code == Finished(code=2, out="", err="No agent that 'clerk' reaches names a model: omit --model.\n")


async def test_at_a_terminal_a_run_asks_until_it_has_ended(port: int) -> None:
    async with at_a_terminal("run", "payer", "hi", "--output", "answer", port=port) as terminal:
        for _ in range(2):
            await terminal.until("Approve?")
            terminal.type("y\n")
        assert await terminal.end() == (0, "Paid twice.\n")


async def test_a_run_whose_question_is_left_open_says_how_to_answer_later(port: int) -> None:
    async with at_a_terminal("run", "payer", "hi", "--output", "answer", port=port) as terminal:
        await terminal.until("Approve?")
        terminal.type("\n")
        await terminal.until("Answer with:")
        assert await terminal.end() == (3, "")


@pytest.mark.parametrize("command", [("run", "payer", "hi"), ("resume", "last")])
async def test_scripts_at_a_terminal_are_not_asked(port: int, command: tuple[str, ...]) -> None:
    if command[0] == "resume":
        assert (await bough("run", "payer", "hi", "--no-input", port=port)).code == 3
    async with at_a_terminal(*command, "--no-input", "--output", "answer", port=port) as terminal:
        code, out = await terminal.end()
    assert (code, "Approve?" in out) == (3, False)


async def test_the_answer_is_printed_once_in_the_live_view_or_below_it(port: int) -> None:
    streamed = await bough("run", "writer", "hi", port=port)
    returned = await bough("run", "clerk", "hi", port=port)
    assert [ended.out.count(word) for ended, word in ((streamed, "Plain."), (returned, "Code."))] == [1, 1]


async def test_global_options_come_before_or_after_the_command(config: Path, port: int, tmp_path: Path) -> None:
    address = f"127.0.0.1:{port}"
    after = await bough("agents", "show", "writer", "--address", address, "--json")
    wins = await bough("--address", "127.0.0.1:1", "runs", "--address", address, "--json")
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db")}
    embedded = await bough("models", "list", "--embedded", "--config", str(config), "--json", environment=environment)
    both = await bough("runs", "--embedded", "--address", address)
    assert [each.code for each in (after, wins, embedded, both)] == [0, 0, 0, 2]
    assert "--embedded and --address exclude each other" in both.err


async def test_the_version_has_a_short_option() -> None:
    version = await bough("-V")
    assert (version.code, version.out.startswith("bough ")) == (0, True)


async def test_shells_complete_commands_and_their_options() -> None:
    program = str(Path(sys.executable).parent / "bough")
    for typed, word, expected in (("bough sess", 1, "sessions"), ("bough run --no-in", 2, "--no-input")):
        shell = {"_BOUGH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(word)}
        process = await asyncio.create_subprocess_exec(
            program, env={**os.environ, **shell}, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert out.decode().split() == [expected]
