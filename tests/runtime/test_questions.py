"""Questions of agents' code: who asks, how long a run waits, and how it is cancelled meanwhile."""

import asyncio
import json
from pathlib import Path

import pytest

from bough import reply
from bough.v1 import error_pb2, execution_pb2, input_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunEnded
from bough_server.runtime.agent import Context
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.question_agents import (
    asker,
    harness,
    interrupted_again,
    open_requests,
    pair,
    received,
    third,
    until,
)
from tests.support.run_harness import ME, names

Message = message_pb2.Message
Request = input_pb2.InputRequest


@agent(description="Hands on.", agents=["third"])
async def second(ctx: Context, input: Message) -> Message:
    return await ctx.dispatch("third", input)


@agent(description="Hands on.", agents=["second"])
async def first(ctx: Context, input: Message) -> Message:
    return await ctx.dispatch("second", input)


@pytest.mark.parametrize(("root", "address"), [("asker", ["asker"]), ("third", ["third", "asker"])])
async def test_a_question_waits_for_its_answer(tmp_path: Path, root: str, address: list[str]) -> None:
    async with harness(tmp_path, asker, third) as it:
        run = await it.start(root, "what?")
        asked = open_requests(await it.until_interrupted(run))["what?"]
        await it.resume(run, reply(asked, "this"))
        log = await it.log(run)
        await check_replay(it, log)
    assert list(asked.agent_path) == address
    assert answer_of(log) == "this"
    assert (asked.kind, asked.call_id, asked.HasField("expire_time")) == (input_pb2.INPUT_KIND_QUESTION, "", False)


async def test_a_question_three_agents_down_goes_through_a_restart(tmp_path: Path) -> None:
    team = (asker, third, second, first)
    async with harness(tmp_path, *team) as it:
        run = await it.start("first", "deep?")
        before = await it.until_interrupted(run)
        asked = open_requests(before)["deep?"]
    async with harness(tmp_path, *team) as it:
        assert await it.runs.recover() == 0
        found = (await it.runs.get(ME, run.run_id)).run
        assert (found.state, list(found.open_requests)) == (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, [asked])
        await it.resume(run, reply(asked, 42))
        log = await it.log(run)
        await check_replay(it, log)
    assert list(asked.agent_path) == ["first", "second", "third", "asker"]
    assert log[: len(before)] == before
    assert names(log[len(before) :]) == [
        "first: run.resumed",
        "asker: control.input_received",
        "asker: sub_agent.completed",
        "third: sub_agent.completed",
        "second: sub_agent.completed",
        "first: run.completed",
    ]
    assert answer_of(log) == "42"


async def test_lanes_that_go_on_end_before_one_interruption_names_all_that_ask(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    @agent(description="Works beside two questions.")
    async def busy(ctx: Context, input: Message) -> str:
        async def work(lane: Context) -> str:
            await lane.step("work", go_on.wait)
            return str(await lane.ask("after work?"))

        return json.dumps(await ctx.gather(lambda lane: lane.ask("a?"), work, lambda lane: lane.ask("b?")))

    async with harness(tmp_path, busy) as it:
        run = await it.start("busy")
        stream = it.follow(run)
        asked = [event async for event in until(stream, "input_requested", 2)]
        assert not having(asked, "run_interrupted")
        assert [one.prompt for one in (await it.runs.get(ME, run.run_id)).run.open_requests] == ["a?", "b?"]
        go_on.set()
        log = await it.until_interrupted(run)
        await it.resume(run, *[reply(one, text[0]) for text, one in open_requests(log).items()])
        log = await it.log(run)
        await check_replay(it, log)
    assert len(having(log, "run_interrupted")) == len(having(log, "run_resumed")) == 1
    assert [one.prompt for one in having(log, "run_interrupted")[0].run_interrupted.requests] == [
        "a?",
        "b?",
        "after work?",
    ]
    assert answer_of(log) == '["a", "a", "b"]'


async def test_what_is_not_answered_asks_again_under_its_id_and_is_recorded_once(tmp_path: Path) -> None:
    async with harness(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        asked = open_requests(await it.until_interrupted(run))
        await it.resume(run, reply(asked["b?"], "B"))
        log = await interrupted_again(it, run, 2)
        assert open_requests(log) == {"a?": asked["a?"], "c?": asked["c?"]}
        await it.resume(run, reply(asked["c?"], 3), reply(asked["a?"], "A"))
        log = await it.log(run)
        await check_replay(it, log)
    assert [one.input_requested.request.prompt for one in having(log, "input_requested")] == ["c?", "a?", "b?"]
    assert [one.value_json for one in received(log)] == ['"B"', "3", '"A"']
    assert answer_of(log) == "A B 3"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "bogus"}, "JSON Schema"),
        ({"$ref": "#/nowhere"}, "references"),
        ({"enum": ["x" * 600_000]}, "512 KiB"),
    ],
)
async def test_a_question_that_could_not_be_answered_is_refused_at_once(
    tmp_path: Path, schema: dict[str, object], words: str
) -> None:
    @agent(description="Asks for the impossible.")
    async def silly(ctx: Context, input: Message) -> str:
        return str(await ctx.ask("what?", schema=schema))

    async with harness(tmp_path, silly) as it:
        log = await it.turn("silly")
        await check_replay(it, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert words in log[-1].run_failed.error.message


async def test_a_question_of_more_text_than_an_event_may_have_is_refused(tmp_path: Path) -> None:
    @agent(description="Asks a lot.")
    async def wordy(ctx: Context, input: Message) -> str:
        return str(await ctx.ask("what? " * 100_000))

    async with harness(tmp_path, wordy) as it:
        log = await it.turn("wordy")
        await check_replay(it, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS


async def test_a_run_that_waits_is_cancelled_whole_and_its_session_is_free(tmp_path: Path) -> None:
    async with harness(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        asked = open_requests(await it.until_interrupted(run))
        await it.resume(run, reply(asked["a?"], "A"))
        await interrupted_again(it, run, 2)
        record = await it.runs.cancel(ME, run.run_id)
        assert (record.run.state, list(record.run.open_requests)) == (execution_pb2.EXECUTION_STATE_CANCELLED, [])
        log = await it.log(run)
        await check_replay(it, log)
        tree = await it.tree(log)
        with pytest.raises(RunEnded):
            await it.resume(run, reply(asked["b?"], "B"))
        following = await it.start("asker", "next?", session_id=run.session_id)
        await it.until_interrupted(following)
    assert [(one.name, one.state) for one in tree.agents] == [
        ("pair", execution_pb2.EXECUTION_STATE_CANCELLED),
        ("asker", execution_pb2.EXECUTION_STATE_SUCCEEDED),
        ("asker", execution_pb2.EXECUTION_STATE_CANCELLED),
    ]


async def test_a_run_that_asks_and_goes_on_is_cancelled_whole(tmp_path: Path) -> None:
    @agent(description="Works beside a question.")
    async def busy(ctx: Context, input: Message) -> str:
        await ctx.gather(lambda lane: lane.ask("a?"), lambda lane: lane.step("work", asyncio.Event().wait))
        return "never"

    async with harness(tmp_path, busy) as it:
        run = await it.start("busy")
        log = [event async for event in until(it.follow(run), "input_requested", 1)]
        asked = log[-1].input_requested.request
        await it.runs.cancel(ME, run.run_id)
        log = await it.log(run)
        await check_replay(it, log)
        with pytest.raises(RunEnded):
            await it.resume(run, reply(asked, "A"))
    assert names(log)[-2:] == ["busy: control.cancel_requested", "busy: run.cancelled"]
