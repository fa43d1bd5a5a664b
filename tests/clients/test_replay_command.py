"""`bough replay` on runs of real agents: it reports equality or the divergence, and has no effects."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import event_pb2
from tests.clients.cli_process import Finished, bough, server_of
from tests.clients.run_events import RUN_ID, Turn
from tests.clients.stream_server import LoopbackService, listening
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

ABSENT = "is not in this configuration.\nName the configuration that the run started with by --config.\n"
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

HISTORIAN = """
from bough_server import Context, agent, text_of


@agent
async def historian(ctx: Context, input: str) -> str:
    '''Says what it sees.'''
    seen = " | ".join(map(text_of, ctx.history()))

    async def work() -> str:
        return seen

    return await ctx.step(f"read {seen}", work)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A lead with a writer, both in a sequence, agents in code, and their server."""

    config: Path
    port: int

    async def __call__(self, *arguments: str, config: Path | None = None) -> Finished:
        """Run a command against the server, with the agents of the team or of another configuration."""
        return await bough("--config", str(config or self.config), *arguments, port=self.port)


@pytest.fixture(scope="module")
async def team(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Team]:
    """The team, for the commands of all tests; the newest run is that of the test."""
    folder = tmp_path_factory.mktemp("team")
    config = write_team(folder)
    async with server_of(config) as port:
        yield Team(config=config, port=port)


async def recorded(team: Team, agent: str, *flags: str) -> Sequence[event_pb2.AgentEvent]:
    """The log of a run."""
    ran = await team("run", agent, "Write about owls.", "--output", "json", *flags)
    assert ran.code == 0, ran.err
    return [json_format.Parse(line, event_pb2.AgentEvent()) for line in ran.out.splitlines()]


def results(log: Sequence[event_pb2.AgentEvent]) -> int:
    """Return how many effects other than dispatches have a result."""
    return sum(
        event.HasField("llm_completed")
        or (event.HasField("tool_completed") and not event.tool_completed.result.child_invocation_id)
        for event in log
    )


def write_team(folder: Path) -> Path:
    """The configuration of the team."""
    (folder / "keeper.py").write_text(KEEPER, encoding="utf-8")
    (folder / "coder.py").write_text(CODER.format(version="1", step="first"), encoding="utf-8")
    (folder / "historian.py").write_text(HISTORIAN, encoding="utf-8")
    lead, writer = llm("lead", calls=["writer"], tools=["look_up"]), llm("writer")
    both = {"name": "both", "description": "Runs both.", "sequence": {}, "sub_agents": [{"agent": "lead"}]}
    reader = {"name": "reader", "description": "Reads.", "function": {"function": "historian"}}
    agents = [lead, writer, both, {**reader, "history": {"scope": "CALLS"}}]
    python = ["team_tools", "keeper", "coder", "historian"]
    return write_project(folder, *agents, script=SCRIPT, python=python)


def write_coder(folder: Path, *, version: str, step: str) -> Path:
    """A configuration with another version of the agent that makes a step."""
    folder.mkdir()
    (folder / "coder.py").write_text(CODER.format(version=version, step=step), encoding="utf-8")
    return write_project(folder, llm("lead"), script={"lead": ["Hm."]}, python=["coder"])


async def test_a_run_replays_from_its_log_also_as_a_later_turn_of_its_session(team: Team) -> None:
    first = await recorded(team, "lead")
    second = await recorded(team, "lead", "--session", first[0].session_id)
    assert second[0].run_started.session_cut > 0
    before = await team("runs", "--json")
    for log in (first, second):
        replayed = await team("replay", log[0].run_id)
        said = f"run {log[0].run_id} replays to its end: {results(log)} recorded results replayed, nothing diverged\n"
        assert replayed == Finished(code=0, out=said, err="")
    assert (await team("runs", "--json")).out == before.out


async def test_a_run_replays_with_a_server_inside_the_command(tmp_path: Path) -> None:
    flags = ("--config", str(write_team(tmp_path)), "--embedded")
    ran = await bough(*flags, "run", "lead", "Write about owls.", "--output", "answer")
    replayed = await bough(*flags, "replay", "last")
    assert (ran.code, ran.out) == (0, "Owls, as written.\n")
    assert (replayed.code, "nothing diverged" in replayed.out, replayed.err) == (0, True, "")


async def test_a_run_replays_with_the_values_that_it_began_with(team: Team) -> None:
    first = await recorded(team, "keeper")
    session_id = first[0].session_id
    second = await recorded(team, "keeper", "--session", session_id)
    assert second[-1].run_completed.final_answer.parts[0].text == "turn 2"
    changed = await team("sessions", "set", session_id, "turns=9")
    assert (changed.code, changed.out) == (0, "turns=9\n")
    replayed = await team("replay", second[0].run_id)
    assert (replayed.code, "nothing diverged" in replayed.out) == (0, True), replayed.out


@pytest.mark.parametrize("agent", ["historian", "reader"])
async def test_code_that_reads_the_history_replays_with_what_it_has_seen(team: Team, agent: str) -> None:
    first = await recorded(team, "both")
    second = await recorded(team, agent, "--session", first[0].session_id)
    seen = second[-1].run_completed.final_answer.parts[0].text
    assert "Owls, as written." in seen
    assert ("call_writer" in seen) == (agent == "reader")
    replayed = await team("replay", second[0].run_id)
    assert (replayed.code, "nothing diverged" in replayed.out) == (0, True), replayed.out
    forked = await team("fork", second[0].run_id, "--after", "1", "--input", "Again.", "--output", "answer")
    replayed = await team("replay", "last")
    assert (forked.code, replayed.code, "nothing diverged" in replayed.out) == (0, 0, True), replayed.out


async def test_an_agent_that_changed_is_named_with_both_revisions_and_tried_by_force(
    team: Team, tmp_path: Path
) -> None:
    log = await recorded(team, "coder")
    changed = write_coder(tmp_path / "b", version="2", step="second")
    refused = await team("replay", "last", config=changed)
    sentence = (
        "The agent 'coder' differs here: its revision is 2, and the run started with 1.\n"
        "Restore the configuration that the run started with, or try --force.\n"
    )
    assert refused == Finished(code=2, out="", err=sentence)
    forced = await team("replay", "last", "--force", config=changed)
    assert (forced.code, forced.err) == (1, "")
    assert forced.out.startswith(f"run {log[0].run_id} diverges: ")
    assert "e0" in forced.out
    harmless = write_coder(tmp_path / "c", version="3", step="first")
    tried = await team("replay", "last", "--force", config=harmless)
    assert (tried.code, tried.err) == (0, "")


async def test_code_that_ends_where_the_log_holds_a_result_diverges(team: Team, tmp_path: Path) -> None:
    await recorded(team, "coder")
    idle = write_coder(tmp_path / "b", version="1", step="first")
    idle.with_name("coder.py").write_text(
        CODER.format(version="1", step="first").replace('await ctx.step("first", work)', '"done"'), encoding="utf-8"
    )
    replayed = await team("replay", "last", config=idle)
    assert (replayed.code, replayed.err) == (1, "")
    assert "of the effect e0 at sequence 2, but the agents asked for the run's end. " in replayed.out


async def test_a_tool_that_is_not_configured_is_named(team: Team, tmp_path: Path) -> None:
    log = await recorded(team, "lead")
    other = tmp_path / "bough.yaml"
    other.write_text("{}\n", encoding="utf-8")
    for flags in ((), ("--force",)):
        replayed = await team("replay", log[0].run_id, *flags, config=other)
        assert replayed == Finished(code=2, out="", err=f"The tool 'look_up' {ABSENT}")


async def test_an_agent_in_code_that_is_not_configured_is_named(team: Team, tmp_path: Path) -> None:
    log = await recorded(team, "coder")
    other = write_project(tmp_path, llm("lead"), script=SCRIPT)
    for flags in ((), ("--force",)):
        replayed = await team("replay", log[0].run_id, *flags, config=other)
        assert replayed == Finished(code=2, out="", err=f"The agent 'coder' {ABSENT}")


async def test_a_run_that_goes_on_is_not_replayed() -> None:
    turn = Turn()
    turn.start()
    async with listening(LoopbackService(turn.events)) as port:
        replayed = await bough("--config", str(DESK), "replay", RUN_ID, port=port)
    sentence = f"Run {RUN_ID} is still running: replay it when it has ended or waits for input.\n"
    assert replayed == Finished(code=2, out="", err=sentence)


@pytest.mark.parametrize("flags", [("--instruction", "writer=Be brief."), ("--tool-result", 'CALL="Cats."')])
async def test_a_fork_replays_with_its_changes(team: Team, flags: tuple[str, str]) -> None:
    log = await recorded(team, "lead")
    (call,) = [event.tool_completed.result.call for event in log if event.tool_completed.result.call.name == "look_up"]
    (step,) = [event.sequence for event in log if event.HasField("step_completed") and event.agent == "lead"][:1]
    changes = [flag.replace("CALL", call.call_id) for flag in flags]
    forked = await team("fork", log[0].run_id, "--after", str(step), *changes, "--output", "json")
    assert forked.code == 0, forked.err
    replayed = await team("replay", "last")
    assert (replayed.code, "to its end: " in replayed.out) == (0, True), replayed.out


async def test_a_fork_of_code_that_was_told_something_else_replays(team: Team) -> None:
    log = await recorded(team, "coder")
    said = ("--after", "1", "--input", "Write about cats.", "--output", "answer")
    forked = await team("fork", log[0].run_id, *said)
    assert (forked.code, forked.out) == (0, "done: Write about cats.\n"), forked.err
    replayed = await team("replay", "last")
    assert (replayed.code, "to its end: " in replayed.out) == (0, True), replayed.out
