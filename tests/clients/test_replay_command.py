"""`bough replay` on runs of real agents: it says that they come as recorded, or where not, and touches nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import event_pb2
from tests.clients.commands import Finished, bough
from tests.clients.loopback import LoopbackService, listening
from tests.clients.turns import RUN_ID, Turn
from tests.support.projects import llm, write_project

DESK = Path(__file__).parents[2] / "examples" / "desk" / "bough.yaml"
SCRIPT = {
    "lead": [
        {
            "calls": [
                {"name": "look_up", "arguments": {"topic": "owls"}},
                {"name": "call_writer", "arguments": {"message": "Go."}},
            ]
        },
        "Owls, as written.",
    ],
    "writer": ["Owls fly."],
}

CODER = """
from bough.v1 import message_pb2
from bough_server import Context, agent


@agent(version="{version}")
async def coder(ctx: Context, input: message_pb2.Message) -> str:
    '''Makes a step and says what it was told.'''
    async def work() -> str:
        return "done"

    return await ctx.step("{step}", work) + ": " + input.parts[0].text
"""

KEEPER = """
from bough.v1 import message_pb2
from bough_server import Context, agent


@agent
async def keeper(ctx: Context, input: message_pb2.Message) -> str:
    '''Counts its turns in the session.'''
    ctx.state["turns"] = ctx.state.get("turns", 0) + 1
    await ctx.now()
    return f"turn {ctx.state['turns']}"
"""


async def embedded(config: Path, *arguments: str, database: Path) -> Finished:
    environment = {"BOUGH_DATABASE": str(database), "BOUGH_DEFAULT_MODEL": ""}
    return await bough("--config", str(config), "--embedded", *arguments, environment=environment)


async def recorded(config: Path, agent: str, *flags: str, database: Path) -> Sequence[event_pb2.AgentEvent]:
    """The log of a turn."""
    ran = await embedded(config, "run", agent, "Write about owls.", "--output", "json", *flags, database=database)
    assert ran.code == 0, ran.err
    return [json_format.Parse(line, event_pb2.AgentEvent()) for line in ran.out.splitlines()]


def results(log: Sequence[event_pb2.AgentEvent]) -> int:
    """How many effects but dispatches have a result."""
    return sum(
        event.HasField("llm_completed")
        or (event.HasField("tool_completed") and not event.tool_completed.result.child_invocation_id)
        for event in log
    )


def team(folder: Path, *, lead_tools: Sequence[str] = ("look_up",), writer: str = "writer") -> Path:
    """A lead with a tool and a writer."""
    folder.mkdir(exist_ok=True)
    return write_project(folder, llm("lead", calls=[writer], tools=lead_tools), llm(writer), script=SCRIPT)


def coder(folder: Path, *, version: str, step: str) -> Path:
    """An agent in Python that makes one step."""
    folder.mkdir()
    (folder / "coder.py").write_text(CODER.format(version=version, step=step), encoding="utf-8")
    return write_project(folder, llm("lead"), script={"lead": ["Hm."]}, python=["coder"])


async def test_a_run_replays_from_its_log_also_as_a_later_turn_of_its_session(tmp_path: Path) -> None:
    database, config = tmp_path / "bough.db", team(tmp_path / "a")
    first = await recorded(config, "lead", database=database)
    second = await recorded(config, "lead", "--session", first[0].session_id, database=database)
    assert second[0].run_started.session_cut > 0
    before = await embedded(config, "runs", "--json", database=database)
    for log in (first, second):
        replayed = await embedded(config, "replay", log[0].run_id, database=database)
        said = (
            f"run {log[0].run_id} replays to its end: {results(log)} recorded results handed back, nothing diverged\n"
        )
        assert replayed == Finished(code=0, out=said, err="")
    assert (await embedded(config, "runs", "--json", database=database)).out == before.out


async def test_a_run_replays_with_the_values_that_it_began_with(tmp_path: Path) -> None:
    database, folder = tmp_path / "bough.db", tmp_path / "a"
    folder.mkdir()
    (folder / "keeper.py").write_text(KEEPER, encoding="utf-8")
    config = write_project(folder, llm("lead"), script={"lead": ["Hm."]}, python=["keeper"])
    first = await recorded(config, "keeper", database=database)
    session_id = first[0].session_id
    second = await recorded(config, "keeper", "--session", session_id, database=database)
    assert second[-1].run_completed.final_answer.parts[0].text == "turn 2"
    changed = await embedded(config, "sessions", "set", session_id, "turns=9", database=database)
    assert (changed.code, changed.out) == (0, "turns=9\n")
    replayed = await embedded(config, "replay", second[0].run_id, database=database)
    assert (replayed.code, "nothing diverged" in replayed.out) == (0, True), replayed.out


async def test_an_agent_that_changed_is_named_with_both_revisions_and_tried_by_force(tmp_path: Path) -> None:
    database = tmp_path / "bough.db"
    log = await recorded(coder(tmp_path / "a", version="1", step="first"), "coder", database=database)
    changed = coder(tmp_path / "b", version="2", step="second")
    refused = await embedded(changed, "replay", "last", database=database)
    sentence = (
        "The agent 'coder' is another one here: its revision is 2, and the run began with 1.\n"
        "Bring back what the run began with, or try it with --force.\n"
    )
    assert refused == Finished(code=2, out="", err=sentence)
    forced = await embedded(changed, "replay", "last", "--force", database=database)
    assert (forced.code, forced.err) == (1, "")
    assert forced.out.startswith(f"run {log[0].run_id} diverges: ")
    assert "e0" in forced.out
    harmless = coder(tmp_path / "c", version="3", step="first")
    tried = await embedded(harmless, "replay", "last", "--force", database=database)
    assert (tried.code, tried.err) == (0, "")


async def test_an_agent_in_code_that_is_not_configured_is_named(tmp_path: Path) -> None:
    database = tmp_path / "bough.db"
    log = await recorded(coder(tmp_path / "a", version="1", step="first"), "coder", database=database)
    other = team(tmp_path / "b")
    for flags in ((), ("--force",)):
        replayed = await embedded(other, "replay", log[0].run_id, *flags, database=database)
        assert replayed == Finished(code=2, out="", err="The agent 'coder' is not in this configuration.\n")


async def test_a_run_that_goes_on_is_not_replayed() -> None:
    turn = Turn()
    turn.start()
    async with listening(LoopbackService(turn.events)) as port:
        replayed = await bough("--config", str(DESK), "replay", RUN_ID, port=port)
    sentence = f"Run {RUN_ID} is still going: replay it when it has ended, or waits for input.\n"
    assert replayed == Finished(code=2, out="", err=sentence)


@pytest.mark.parametrize("flags", [("--instruction", "writer=Be brief."), ("--tool-result", 'CALL="Cats."')])
async def test_a_fork_replays_with_its_changes(tmp_path: Path, flags: tuple[str, str]) -> None:
    database, config = tmp_path / "bough.db", team(tmp_path / "a")
    log = await recorded(config, "lead", database=database)
    (call,) = [event.tool_completed.result.call for event in log if event.tool_completed.result.call.name == "look_up"]
    (step,) = [event.sequence for event in log if event.HasField("step_completed") and event.agent == "lead"][:1]
    changes = [flag.replace("CALL", call.call_id) for flag in flags]
    forked = await embedded(
        config, "fork", log[0].run_id, "--after", str(step), *changes, "--output", "json", database=database
    )
    assert forked.code == 0, forked.err
    replayed = await embedded(config, "replay", "last", database=database)
    assert (replayed.code, "to its end: " in replayed.out) == (0, True), replayed.out


async def test_a_fork_of_code_that_was_told_something_else_replays(tmp_path: Path) -> None:
    database, config = tmp_path / "bough.db", coder(tmp_path / "a", version="1", step="first")
    log = await recorded(config, "coder", database=database)
    said = ("--after", "1", "--input", "Write about cats.", "--output", "answer")
    forked = await embedded(config, "fork", log[0].run_id, *said, database=database)
    assert (forked.code, forked.out) == (0, "done: Write about cats.\n"), forked.err
    replayed = await embedded(config, "replay", "last", database=database)
    assert (replayed.code, "to its end: " in replayed.out) == (0, True), replayed.out
