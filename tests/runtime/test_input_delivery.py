"""Which answers a run takes, which it refuses, and what two at once leave."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from bough import approve, reply, tool_outcome
from bough.v1 import agent_service_pb2, execution_pb2, input_pb2, message_pb2, policy_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.engine.input_requests import build_answer_event
from bough_server.errors import AgentUnusable, AlreadyAnswered, InvalidRequest, RequestIdReused, RunEnded, RunError
from bough_server.runtime.agent import Context
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.question_agents import (
    asker,
    harness,
    open_requests,
    pair,
    received,
    until,
)
from tests.support.run_harness import ME, RunHarness

Message = message_pb2.Message
Request = input_pb2.InputRequest


WRONG: dict[str, Callable[[dict[str, Request]], input_pb2.InputAnswer]] = {
    "has no request with this id": lambda _: reply("absent", 1),
    "value_json, not with approval": lambda asked: approve(asked["c?"]),
    "value_json, not with tool_outcome": lambda asked: tool_outcome(asked["c?"], "3"),
    "is not of type 'integer'": lambda asked: reply(asked["c?"], "three"),
    "is not JSON": lambda asked: input_pb2.InputAnswer(input_id=asked["c?"].input_id, value_json="{"),
    "NaN is not JSON": lambda asked: input_pb2.InputAnswer(input_id=asked["b?"].input_id, value_json="NaN"),
    "surrogate": lambda asked: input_pb2.InputAnswer(input_id=asked["b?"].input_id, value_json=r'"\ud800"'),
    "is not JSON .": lambda asked: input_pb2.InputAnswer(input_id=asked["b?"].input_id, value_json="[" * 100_000),
}


@pytest.mark.parametrize("words", WRONG)
async def test_a_wrong_answer_among_right_ones_changes_nothing(tmp_path: Path, words: str) -> None:
    async with harness(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        before = await it.until_interrupted(run)
        asked = open_requests(before)
        wrong = WRONG[words](asked)
        with pytest.raises(InvalidRequest) as raised:
            await it.resume(run, reply(asked["a?"], "A"), wrong)
        field = "input_id" if words == "has no request with this id" else wrong.WhichOneof("answer")
        assert [violation.field for violation in raised.value.violations] == [f"answers[1].{field}"]
        assert words.rstrip(".") in raised.value.violations[0].description
        assert await it.until_interrupted(run) == before
        assert (await it.runs.get(ME, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED


async def test_a_second_answer_to_the_same_request_is_refused_with_all_the_others(tmp_path: Path) -> None:
    async with harness(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        before = await it.until_interrupted(run)
        asked = open_requests(before)
        with pytest.raises(InvalidRequest) as raised:
            await it.resume(run, *(reply(asked[name], "A") for name in ("a?", "b?", "a?", "b?")))
        assert [violation.field for violation in raised.value.violations] == [
            "answers[2].input_id",
            "answers[3].input_id",
        ]
        assert await it.until_interrupted(run) == before


async def test_a_question_of_what_has_ended_takes_no_answer(tmp_path: Path) -> None:
    @agent(description="Asks, and fails beside it.", agents=["failing"])
    async def torn(ctx: Context, input: Message) -> str:
        await ctx.gather(lambda lane: lane.ask("inner?"), lambda lane: lane.dispatch("failing", "go"))
        return "never"

    @agent(description="Fails.")
    async def failing(ctx: Context, input: Message) -> str:
        raise ValueError("no luck")

    @agent(description="Outlives it.", agents=["torn"])
    async def outer(ctx: Context, input: Message) -> str:
        with pytest.raises(RunError):
            await ctx.dispatch("torn", "go")
        return str(await ctx.ask("outer?"))

    torn.definition.sub_agents[0].on_failure = policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT
    async with harness(tmp_path, outer, torn, failing) as it:
        run = await it.start("outer")
        log = await it.until_interrupted(run)
        asked = {
            one.input_requested.request.prompt: one.input_requested.request for one in having(log, "input_requested")
        }
        assert open_requests(log) == {"outer?": asked["outer?"]}
        assert list((await it.runs.get(ME, run.run_id)).run.open_requests) == [asked["outer?"]]
        with pytest.raises(InvalidRequest, match="has ended"):
            await it.resume(run, reply(asked["inner?"], 1))
        await it.resume(run, reply(asked["outer?"], "out"))
        log = await it.log(run)
        await check_replay(it, log)
    assert answer_of(log) == "out"


async def test_an_answer_is_taken_while_the_run_goes_and_it_is_never_interrupted(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    @agent(description="Works beside a question.")
    async def busy(ctx: Context, input: Message) -> str:
        said = await ctx.gather(lambda lane: lane.ask("a?"), lambda lane: lane.step("work", go_on.wait))
        return str(said[0])

    async with harness(tmp_path, busy) as it:
        run = await it.start("busy")
        async for event in it.follow(run):
            if event.HasField("input_requested"):
                asked, at = event.input_requested.request, event.sequence
                break
        answer = reply(asked, "A")
        answer.source, answer.answered_by = input_pb2.ANSWER_SOURCE_EXPIRY, "somebody else"
        assert await since(it, run, answer) == at
        assert not (await it.runs.get(ME, run.run_id)).run.open_requests
        assert await since(it, run, reply(asked, "A")) == at
        with pytest.raises(AlreadyAnswered):
            await it.resume(run, reply(asked, "B"))
        go_on.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert answer_of(log) == "A"
    assert not having(log, "run_interrupted")
    (told,) = received(log)
    assert (told.source, told.answered_by) == (input_pb2.ANSWER_SOURCE_CALLER, "local")


async def since(it: RunHarness, run: run_pb2.Run, *answers: input_pb2.InputAnswer, request_id: str = "") -> int:
    request = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=answers, request_id=request_id)
    return (await it.runs.resume(ME, request, deadline_time_ns=None)).since


@pytest.mark.parametrize("is_live", [False, True])
async def test_two_different_answers_at_once_the_first_one_stands(tmp_path: Path, is_live: bool) -> None:
    go_on = asyncio.Event()

    @agent(description="May work beside a question.")
    async def busy(ctx: Context, input: Message) -> str:
        async def work(lane: Context) -> None:
            if is_live:
                await lane.step("work", go_on.wait)

        return str((await ctx.gather(lambda lane: lane.ask("a?"), work))[0])

    async with harness(tmp_path, busy) as it:
        run = await it.start("busy")
        asked = [event async for event in until(it.follow(run), "input_requested", 1)][-1].input_requested.request
        if not is_live:
            await it.until_interrupted(run)
        tried = await asyncio.gather(
            *(it.resume(run, reply(asked, number % 2)) for number in range(6)), return_exceptions=True
        )
        go_on.set()
        log = await it.log(run)
        await check_replay(it, log)
    (told,) = received(log)
    for number, outcome in enumerate(tried):
        is_same = str(number % 2) == told.value_json
        assert isinstance(outcome, run_pb2.Run if is_same else AlreadyAnswered)


async def test_a_run_whose_code_is_not_here_takes_no_answer_and_has_not_ended(tmp_path: Path) -> None:
    def waiter(version: str) -> FunctionAgent:
        @agent(description="Waits.", version=version)
        async def waits(ctx: Context, input: Message) -> str:
            return str(await ctx.ask("how?"))

        return waits

    async with harness(tmp_path, waiter("1")) as it:
        run = await it.start("waits")
        asked = open_requests(await it.until_interrupted(run))
    async with harness(tmp_path, waiter("2")) as it:
        with pytest.raises(AgentUnusable) as raised:
            await it.resume(run, reply(asked["how?"], "so"))
        row = (await it.runs.get(ME, run.run_id)).run
    assert [word for word in ("'waits'", "'1'", "'2'") if word not in raised.value.message] == []
    assert (row.state, list(row.open_requests)) == (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, [asked["how?"]])
    async with harness(tmp_path, waiter("1")) as it:
        await it.resume(run, reply(asked["how?"], "so"))
        assert answer_of(await it.log(run)) == "so"


async def test_a_repeated_resume_follows_from_the_same_place_and_its_id_takes_nothing_else(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    @agent(description="Asks twice at once, and then works.")
    async def busy(ctx: Context, input: Message) -> str:
        async def ask(lane: Context) -> str:
            said = str(await lane.ask("a?"))
            await lane.step("work", go_on.wait)
            return said

        return " ".join([str(one) for one in await ctx.gather(ask, lambda lane: lane.ask("b?"))])

    async with harness(tmp_path, busy) as it:
        run = await it.start("busy")
        before = await it.until_interrupted(run)
        asked = open_requests(before)
        a, b = reply(asked["a?"], "A"), reply(asked["b?"], "B")
        assert await since(it, run, a, request_id="one") == len(before)
        other = await since(it, run, b, request_id="two")
        assert other == len(before) + 2
        for _ in range(2):
            assert await since(it, run, a, request_id="one") == len(before)
            assert await since(it, run, b, request_id="two") == other
        for answers in ([b], [a, b], [reply(asked["a?"], "C")]):
            with pytest.raises(RequestIdReused):
                await it.resume(run, *answers, request_id="one")
        go_on.set()
        log = await it.log(run)
        await check_replay(it, log)
        assert await since(it, run, b, request_id="two") == other
        with pytest.raises(RunEnded):
            await it.resume(run, reply("absent", "x"))
    assert answer_of(log) == "A B"


async def test_who_has_been_answered_and_has_not_woken_yet_takes_no_other_answer(tmp_path: Path) -> None:
    @agent(description="Works beside a question.")
    async def busy(ctx: Context, input: Message) -> str:
        return str((await ctx.gather(lambda lane: lane.ask("a?"), lambda lane: lane.step("work", go_on.wait)))[0])

    go_on = asyncio.Event()
    async with harness(tmp_path, busy) as it:
        run = await it.start("busy")
        asked = [event async for event in until(it.follow(run), "input_requested", 1)][-1]
        live = it.live(run.run_id)
        assert live is not None
        answers = [build_answer_event(asked, reply(asked.input_requested.request, text)) for text in "AB"]
        assert [live.execution.answer(answer) for answer in answers] == [True, False]
        go_on.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert (answer_of(log), len(received(log))) == ("A", 1)


async def test_an_answer_written_otherwise_is_the_same_answer(tmp_path: Path) -> None:
    async with harness(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        asked = open_requests(await it.until_interrupted(run))
        of = asked["b?"].input_id
        for text in ('{"x": 1, "y": [true]}', ' {"y":[ true ],"x":1}'):
            await it.resume(run, input_pb2.InputAnswer(input_id=of, value_json=text))
        for text in ('{"x": 1, "y": [1]}', '{"x": true, "y": [true]}'):
            with pytest.raises(AlreadyAnswered):
                await it.resume(run, input_pb2.InputAnswer(input_id=of, value_json=text))
