"""Ids of messages: a fork keeps those that it shares, and what it records itself has ids that no other run has."""

import asyncio
from pathlib import Path

import pytest

from bough.v1 import message_pb2
from bough_server.agents.function import agent
from bough_server.errors import ForkRefused
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.store.opening import rebuild_projections
from tests.support.fork_agents import TEAM, TURNS, Log, World, open_forked, place, run_of
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script

SAID = message_pb2.Message(parts=[message_pb2.Part(text="good evening")])


@pytest.fixture
def world() -> World:
    return World()


async def ids_of(harness: RunHarness, log: Log) -> list[str]:
    """The ids of a session's messages, in order."""
    return [one.message.message_id for one in await harness.messages(log[0].session_id)]


def in_log(log: Log) -> list[str]:
    """The ids of the messages that a log says."""
    said = [
        *(event.run_started.input for event in having(log, "run_started")),
        *(event.run_forked.changes.input for event in having(log, "run_forked")),
        *(event.sub_agent_started.input for event in having(log, "sub_agent_started")),
        *(event.sub_agent_completed.output for event in having(log, "sub_agent_completed")),
        *(event.llm_completed.response.message for event in having(log, "llm_completed")),
        *(event.run_completed.final_answer for event in having(log, "run_completed")),
    ]
    return [message.message_id for message in said if message.message_id]


async def test_a_fork_keeps_the_ids_that_it_shares_and_gives_every_later_message_its_own(
    tmp_path: Path, world: World
) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        origins, shared = await ids_of(harness, origin), set[int]()
        for cut in range(1, len(origin)):
            try:
                fork = await harness.log(await harness.fork(run_of(origin), cut))
            except ForkRefused:
                continue
            await check_replay(harness, fork)
            own = await ids_of(harness, fork)
            number = len([one for one in own if one in origins])
            assert own[:number] == origins[:number], "what is shared stays as it is"
            assert len(set(own)) == len(own) == len(origins)
            assert set(in_log(fork[cut:])).isdisjoint(in_log(origin)), "what follows is another message"
            assert in_log(fork[:cut]) == in_log(origin[:cut])
            assert {event.invocation_id for event in fork} == {event.invocation_id for event in origin}
            shared.add(number)
        assert shared == set(range(1, len(origins))), "there is a fork for every message"


async def test_another_input_is_another_message(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        first = await harness.log(await harness.fork(run_of(origin), 1, input=SAID))
        second = await harness.log(await harness.fork(run_of(origin), 1, input=SAID))
        for log in (first, second):
            await check_replay(harness, log)
        ids = [await ids_of(harness, log) for log in (origin, first, second)]
    assert len({one for each in ids for one in each}) == sum(map(len, ids)), "no two of the three share a message"
    assert ids[1][0] == having(first, "run_forked")[0].run_forked.changes.input.message_id


async def test_a_fork_of_a_fork_keeps_the_ids_of_both(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        first = await harness.log(await harness.fork(run_of(origin), place(origin, "llm_completed")))
        origins, firsts = await ids_of(harness, origin), await ids_of(harness, first)
        cut = place(first, "sub_agent_completed")
        second = await harness.log(await harness.fork(run_of(first), cut))
        await check_replay(harness, second)
        seconds = await ids_of(harness, second)
    kept = len([one for one in seconds if one in firsts])
    assert 2 < kept < len(seconds)
    assert seconds[:kept] == firsts[:kept]
    assert seconds[:2] == origins[:2]
    assert set(seconds[kept:]).isdisjoint([*origins, *firsts])
    rebuild_projections(f"sqlite:///{tmp_path / 'bough.db'}")
    async with open_forked(tmp_path, world) as harness:
        assert [await ids_of(harness, log) for log in (origin, first, second)] == [origins, firsts, seconds]


async def test_a_fork_that_is_lost_goes_on_with_the_same_ids(tmp_path: Path, world: World) -> None:
    reached = asyncio.Event()
    is_held = False

    async def hold(agent: str, turn: int, chunk: int) -> None:
        if is_held and agent == "p" and turn == 1:
            reached.set()
            await asyncio.Event().wait()

    async with open_team(tmp_path, TURNS, *TEAM, tools=world.tools(), gate=hold) as harness:
        origin = await harness.turn("p")
        is_held = True
        fork = await harness.fork(run_of(origin), place(origin, "llm_completed"))
        await reached.wait()
        await harness.crash()
    async with open_forked(tmp_path, world) as harness:
        await harness.runs.recover()
        log = await harness.log(fork)
        await check_replay(harness, log)
        own = await ids_of(harness, log)
    assert answer_of(log) == "Done."
    assert len(set(own)) == len(own)
    assert set(in_log(log[fork.forked_from.sequence :])).isdisjoint(in_log(origin))


@agent(description="Notes what it sees.", agents=["c"], tools=["look"])
async def notes(ctx: Context, input: message_pb2.Message) -> str:
    async def note() -> str:
        return "noted"

    asked = await ctx.model(ModelRequest(messages=ctx.history(), tools=ctx.offers()))
    await ctx.tools([part.tool_call for part in asked.message.parts if part.HasField("tool_call")])
    await ctx.dispatch("c", "root")
    for seen in ctx.history():
        await ctx.step(f"note {seen.message_id}", note)
    return "Noted."


async def test_code_that_depends_on_ids_is_forked_anywhere(tmp_path: Path, world: World) -> None:
    turns = script(notes=[calls(call("look", what="leaf"))], c=["Found."])
    async with open_team(tmp_path, turns, llm("c"), code_agents=[notes], tools=world.tools()) as harness:
        origin = await harness.turn("notes")
        await check_replay(harness, origin)
        for cut in range(1, len(origin)):
            fork = await harness.log(await harness.fork(run_of(origin), cut))
            await check_replay(harness, fork)
            assert answer_of(fork) == "Noted."
