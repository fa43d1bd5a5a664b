"""Questions of agents' code: who asks, what answers are taken, and what becomes of a run until it has them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bough import approve, reply, tool_result
from bough.v1 import agent_service_pb2, error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import AlreadyAnswered, InvalidRequest, RequestIdReused, RunEnded, RunError
from bough_server.runtime.answers import received as as_received
from bough_server.runtime.context import Context
from tests.support.house import ME, House, names, open_house
from tests.support.readings import answer_of, check_replay, having
from tests.support.teams import Scripts

Message = message_pb2.Message
Request = input_pb2.InputRequest
INTEGER = {"type": "integer"}


def house(folder: Path, *agents: FunctionAgent, **options: object) -> AbstractAsyncContextManager[House]:
    return open_house(folder, models=Scripts("agents: {}"), code_agents=agents, **options)  # type: ignore[arg-type]


def open_requests(log: Sequence[event_pb2.AgentEvent]) -> dict[str, Request]:
    """What the last event, an interruption, asks, by its words."""
    assert log[-1].HasField("run_interrupted"), names(log)
    return {request.prompt: request for request in log[-1].run_interrupted.requests}


def received(log: Sequence[event_pb2.AgentEvent]) -> list[input_pb2.InputAnswer]:
    return [event.input_received.answer for event in having(log, "input_received")]


@agent(description="Asks what it is told.")
async def asker(ctx: Context, input: Message) -> str:
    return str(await ctx.ask(input.parts[0].text))


@agent(description="Hands on.", agents=["asker"])
async def third(ctx: Context, input: Message) -> Message:
    return await ctx.dispatch("asker", input)


@agent(description="Hands on.", agents=["third"])
async def second(ctx: Context, input: Message) -> Message:
    return await ctx.dispatch("third", input)


@agent(description="Hands on.", agents=["second"])
async def first(ctx: Context, input: Message) -> Message:
    return await ctx.dispatch("second", input)


@agent(description="Has three ask at once.", agents=["asker"])
async def pair(ctx: Context, input: Message) -> str:
    async def ask(lane: Context) -> str:
        return str(await lane.ask("c?", schema=INTEGER))

    said = await ctx.gather(lambda lane: lane.dispatch("asker", "a?"), lambda lane: lane.dispatch("asker", "b?"), ask)
    return " ".join(one.parts[0].text if isinstance(one, Message) else str(one) for one in said)


@pytest.mark.parametrize(("root", "address"), [("asker", ["asker"]), ("third", ["third", "asker"])])
async def test_a_question_waits_for_its_answer(tmp_path: Path, root: str, address: list[str]) -> None:
    async with house(tmp_path, asker, third) as it:
        run = await it.start(root, "what?")
        asked = open_requests(await it.until_interrupted(run))["what?"]
        await it.resume(run, reply(asked, "this"))
        log = await it.log(run)
        await check_replay(it, log)
    assert list(asked.address) == address
    assert answer_of(log) == "this"
    assert (asked.reason, asked.call_id, asked.HasField("expire_time")) == (input_pb2.INPUT_REASON_QUESTION, "", False)


async def test_a_question_three_agents_down_goes_through_a_restart(tmp_path: Path) -> None:
    team = (asker, third, second, first)
    async with house(tmp_path, *team) as it:
        run = await it.start("first", "deep?")
        before = await it.until_interrupted(run)
        asked = open_requests(before)["deep?"]
    async with house(tmp_path, *team) as it:
        assert await it.runs.recover() == 0
        found = (await it.runs.get(ME, run.run_id)).run
        assert (found.state, list(found.open_requests)) == (event_pb2.STATE_INPUT_REQUIRED, [asked])
        await it.resume(run, reply(asked, 42))
        log = await it.log(run)
        await check_replay(it, log)
    assert list(asked.address) == ["first", "second", "third", "asker"]
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

    async with house(tmp_path, busy) as it:
        run = await it.start("busy")
        stream = it.follow(run)
        asked = [event async for event in _until(stream, "input_requested", 2)]
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


async def _until(stream, kind: str, count: int):  # type: ignore[no-untyped-def]
    async for event in stream:
        yield event
        count -= event.HasField(kind)
        if not count:
            return


async def test_what_is_not_answered_asks_again_under_its_id_and_is_recorded_once(tmp_path: Path) -> None:
    async with house(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        asked = open_requests(await it.until_interrupted(run))
        await it.resume(run, reply(asked["b?"], "B"))
        log = await _interrupted_again(it, run, 2)
        assert open_requests(log) == {"a?": asked["a?"], "c?": asked["c?"]}
        await it.resume(run, reply(asked["c?"], 3), reply(asked["a?"], "A"))
        log = await it.log(run)
        await check_replay(it, log)
    assert [one.input_requested.request.prompt for one in having(log, "input_requested")] == ["c?", "a?", "b?"]
    assert [one.value_json for one in received(log)] == ['"B"', "3", '"A"']
    assert answer_of(log) == "A B 3"


async def _interrupted_again(it: House, run: object, times: int) -> list[event_pb2.AgentEvent]:
    log = [event async for event in _until(it.follow(run), "run_interrupted", times)]  # type: ignore[arg-type]
    await it.until_over(run)  # type: ignore[arg-type]
    return log


WRONG: dict[str, Callable[[dict[str, Request]], input_pb2.InputAnswer]] = {
    "asks nothing": lambda _: reply("nobody", 1),
    "value_json, not with approval": lambda asked: approve(asked["c?"]),
    "value_json, not with tool_result": lambda asked: tool_result(asked["c?"], "3"),
    "is not of type 'integer'": lambda asked: reply(asked["c?"], "three"),
    "is not JSON": lambda asked: input_pb2.InputAnswer(request_id=asked["c?"].request_id, value_json="{"),
    "NaN is not JSON": lambda asked: input_pb2.InputAnswer(request_id=asked["b?"].request_id, value_json="NaN"),
    "surrogate": lambda asked: input_pb2.InputAnswer(request_id=asked["b?"].request_id, value_json=r'"\ud800"'),
    "is not JSON .": lambda asked: input_pb2.InputAnswer(request_id=asked["b?"].request_id, value_json="[" * 100_000),
}


@pytest.mark.parametrize("words", WRONG)
async def test_a_wrong_answer_among_right_ones_changes_nothing(tmp_path: Path, words: str) -> None:
    async with house(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        before = await it.until_interrupted(run)
        asked = open_requests(before)
        with pytest.raises(InvalidRequest) as raised:
            await it.resume(run, reply(asked["a?"], "A"), WRONG[words](asked))
        assert [violation.field for violation in raised.value.violations] == ["answers[1]"]
        assert words.rstrip(".") in raised.value.violations[0].description
        assert await it.until_interrupted(run) == before
        assert (await it.runs.get(ME, run.run_id)).run.state == event_pb2.STATE_INPUT_REQUIRED


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

    torn.definition.sub_agents[0].on_failure = policy_pb2.ON_SUB_AGENT_FAILURE_ABORT
    async with house(tmp_path, outer, torn, failing) as it:
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

    async with house(tmp_path, busy) as it:
        run = await it.start("busy")
        async for event in it.follow(run):
            if event.HasField("input_requested"):
                asked, at = event.input_requested.request, event.sequence
                break
        answer = reply(asked, "A")
        answer.source, answer.answered_by = input_pb2.ANSWER_SOURCE_EXPIRY, "somebody else"
        assert await _since(it, run, answer) == at
        assert not (await it.runs.get(ME, run.run_id)).run.open_requests
        assert await _since(it, run, reply(asked, "A")) == at
        with pytest.raises(AlreadyAnswered):
            await it.resume(run, reply(asked, "B"))
        go_on.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert answer_of(log) == "A"
    assert not having(log, "run_interrupted")
    (told,) = received(log)
    assert (told.source, told.answered_by) == (input_pb2.ANSWER_SOURCE_CALLER, "local")


async def _since(it: House, run, *answers: input_pb2.InputAnswer, request_id: str = "") -> int:  # type: ignore[no-untyped-def]
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

    async with house(tmp_path, busy) as it:
        run = await it.start("busy")
        asked = [event async for event in _until(it.follow(run), "input_requested", 1)][-1].input_requested.request
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
        assert isinstance(outcome, agent_service_pb2.Run if is_same else AlreadyAnswered)


async def test_a_repeated_resume_follows_from_the_same_place_and_its_id_takes_nothing_else(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    @agent(description="Asks twice at once, and then works.")
    async def busy(ctx: Context, input: Message) -> str:
        async def ask(lane: Context) -> str:
            said = str(await lane.ask("a?"))
            await lane.step("work", go_on.wait)
            return said

        return " ".join([str(one) for one in await ctx.gather(ask, lambda lane: lane.ask("b?"))])

    async with house(tmp_path, busy) as it:
        run = await it.start("busy")
        before = await it.until_interrupted(run)
        asked = open_requests(before)
        a, b = reply(asked["a?"], "A"), reply(asked["b?"], "B")
        assert await _since(it, run, a, request_id="one") == len(before)
        other = await _since(it, run, b, request_id="two")
        assert other == len(before) + 2
        for _ in range(2):
            assert await _since(it, run, a, request_id="one") == len(before)
            assert await _since(it, run, b, request_id="two") == other
        for answers in ([b], [a, b], [reply(asked["a?"], "C")]):
            with pytest.raises(RequestIdReused):
                await it.resume(run, *answers, request_id="one")
        go_on.set()
        log = await it.log(run)
        await check_replay(it, log)
        assert await _since(it, run, b, request_id="two") == other
        with pytest.raises(RunEnded):
            await it.resume(run, reply("nobody", "x"))
    assert answer_of(log) == "A B"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "bogus"}, "JSON Schema"),
        ({"$ref": "#/nowhere"}, "references"),
        ({"enum": ["x" * 600_000]}, "512 KiB"),
    ],
)
async def test_a_question_that_nobody_could_answer_is_refused_at_once(
    tmp_path: Path, schema: dict[str, object], words: str
) -> None:
    @agent(description="Asks for the impossible.")
    async def silly(ctx: Context, input: Message) -> str:
        return str(await ctx.ask("what?", schema=schema))

    async with house(tmp_path, silly) as it:
        log = await it.turn("silly")
        await check_replay(it, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert words in log[-1].run_failed.error.message


async def test_a_question_of_more_text_than_an_event_may_have_is_refused(tmp_path: Path) -> None:
    @agent(description="Asks a lot.")
    async def wordy(ctx: Context, input: Message) -> str:
        return str(await ctx.ask("what? " * 100_000))

    async with house(tmp_path, wordy) as it:
        log = await it.turn("wordy")
        await check_replay(it, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS


async def test_effects_at_once_fail_with_what_to_do_though_one_of_them_asks(tmp_path: Path) -> None:
    @agent(description="Asks twice at once, and wrongly.")
    async def hasty(ctx: Context, input: Message) -> str:
        await asyncio.gather(ctx.ask("a?"), ctx.ask("b?"))
        return "never"

    async with house(tmp_path, hasty) as it:
        run = await it.start("hasty")
        log = await it.until_interrupted(run)
    assert not having(log, "run_interrupted")
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_CONCURRENT_EFFECTS
    assert "ctx.gather" in log[-1].run_failed.error.message


Stubborn = Callable[[Context], Awaitable[object]]


async def _excepts(ctx: Context) -> object:
    try:
        return await ctx.ask("a?")
    except Exception:
        return await ctx.now()


async def _finally(ctx: Context) -> object:
    try:
        return await ctx.ask("a?")
    finally:
        await ctx.now()


async def _swallows(ctx: Context) -> object:
    try:
        return await ctx.ask("a?")
    except BaseException:
        return await ctx.ask("and now?")


async def _times_out(ctx: Context) -> object:
    async with asyncio.timeout(5):
        return await ctx.ask("a?")


@pytest.mark.parametrize(("body", "more"), [(_excepts, 0), (_finally, 1), (_swallows, 0), (_times_out, 0)])
async def test_a_run_that_waits_writes_nothing_whatever_its_code_does(
    tmp_path: Path, body: Stubborn, more: int
) -> None:
    @agent(description="Is stubborn.")
    async def stubborn(ctx: Context, input: Message) -> str:
        return str(await body(ctx))

    async with house(tmp_path, stubborn) as it:
        run = await it.start("stubborn")
        log = await it.until_interrupted(run)
        await it.until_over(run)
        assert await it.store.log.last_sequence(run.run_id) == len(log)
        await it.resume(run, reply(open_requests(log)["a?"], "A"))
        log = await it.log(run)
        await check_replay(it, log)
    assert names(log) == [
        "stubborn: run.started",
        "stubborn: control.input_requested",
        "stubborn: run.interrupted",
        "stubborn: run.resumed",
        "stubborn: control.input_received",
        *["stubborn: control.value_recorded"] * more,
        "stubborn: run.completed",
    ]
    assert answer_of(log) == "A"


async def test_a_run_that_waits_is_cancelled_whole_and_its_session_is_free(tmp_path: Path) -> None:
    async with house(tmp_path, asker, pair) as it:
        run = await it.start("pair")
        asked = open_requests(await it.until_interrupted(run))
        await it.resume(run, reply(asked["a?"], "A"))
        await _interrupted_again(it, run, 2)
        record = await it.runs.cancel(ME, run.run_id)
        assert (record.run.state, list(record.run.open_requests)) == (event_pb2.STATE_CANCELLED, [])
        log = await it.log(run)
        await check_replay(it, log)
        tree = await it.tree(log)
        with pytest.raises(RunEnded):
            await it.resume(run, reply(asked["b?"], "B"))
        following = await it.start("asker", "next?", session_id=run.session_id)
        await it.until_interrupted(following)
    assert [(one.name, one.state) for one in tree.agents] == [
        ("pair", event_pb2.STATE_CANCELLED),
        ("asker", event_pb2.STATE_SUCCEEDED),
        ("asker", event_pb2.STATE_CANCELLED),
    ]


async def test_a_run_that_asks_and_goes_on_is_cancelled_whole(tmp_path: Path) -> None:
    @agent(description="Works beside a question.")
    async def busy(ctx: Context, input: Message) -> str:
        await ctx.gather(lambda lane: lane.ask("a?"), lambda lane: lane.step("work", asyncio.Event().wait))
        return "never"

    async with house(tmp_path, busy) as it:
        run = await it.start("busy")
        log = [event async for event in _until(it.follow(run), "input_requested", 1)]
        asked = log[-1].input_requested.request
        await it.runs.cancel(ME, run.run_id)
        log = await it.log(run)
        await check_replay(it, log)
        with pytest.raises(RunEnded):
            await it.resume(run, reply(asked, "A"))
    assert names(log)[-2:] == ["busy: control.cancel_requested", "busy: run.cancelled"]


async def test_who_has_been_answered_and_has_not_woken_yet_takes_no_other_answer(tmp_path: Path) -> None:
    @agent(description="Works beside a question.")
    async def busy(ctx: Context, input: Message) -> str:
        return str((await ctx.gather(lambda lane: lane.ask("a?"), lambda lane: lane.step("work", go_on.wait)))[0])

    go_on = asyncio.Event()
    async with house(tmp_path, busy) as it:
        run = await it.start("busy")
        asked = [event async for event in _until(it.follow(run), "input_requested", 1)][-1]
        live = it.runs._keeper.roster.at_hand(run.run_id)
        assert live is not None
        answers = [as_received(asked, reply(asked.input_requested.request, text)) for text in "AB"]
        assert [live.execution.answer(answer) for answer in answers] == [True, False]
        go_on.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert (answer_of(log), len(received(log))) == ("A", 1)


async def test_code_that_stops_asking_by_its_own_clock_is_told_that_it_cannot_be_replayed(tmp_path: Path) -> None:
    gave_up = asyncio.Event()

    @agent(description="Loses its patience.")
    async def impatient(ctx: Context, input: Message) -> str:
        async def ask(lane: Context) -> str:
            try:
                async with asyncio.timeout(0.01):
                    return str(await lane.ask("a?"))
            except TimeoutError:
                gave_up.set()
                return str(await lane.now())

        said = await ctx.gather(ask, lambda lane: lane.step("work", gave_up.wait))
        return f"{said[0]} {await ctx.ask('b?')}"

    async with house(tmp_path, impatient) as it:
        run = await it.start("impatient")
        asked = open_requests(await it.until_interrupted(run))
        await it.resume(run, reply(asked["b?"], "B"))
        log = await it.log(run)
    assert asked.keys() == {"b?"}
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_NON_DETERMINISTIC
    assert "by effects only" in log[-1].run_failed.error.message
