"""Time, limits and money of runs that wait: what expires, what counts while they do, and what does not."""

import asyncio
from pathlib import Path

import pytest

from bough import approve, reply
from bough.v1 import (
    agent_service_pb2,
    error_pb2,
    event_pb2,
    execution_pb2,
    input_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
)
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import AlreadyAnswered, RunError
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.databases import in_each_database
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of
from tests.support.question_agents import harness
from tests.support.run_harness import ME, RunHarness, names
from tests.support.teams import call, calls, llm, open_team, script

pytestmark = in_each_database


Message = message_pb2.Message
DAY = 86_400
SECOND = 10**9


@agent(description="Asks for a day, and makes do with a default.")
async def patient(ctx: Context, input: Message) -> str:
    return str(await ctx.ask("a?", expires=DAY, default="none"))


@agent(description="Asks for a day, and says what came of it.")
async def strict(ctx: Context, input: Message) -> str:
    try:
        return str(await ctx.ask("a?", expires=DAY))
    except RunError as error:
        return error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


def beside(done: asyncio.Event, seconds: int = 0) -> FunctionAgent:
    """An agent that has another ask while it works; the other may take so many seconds, if that is said."""

    @agent(description="Has one ask beside work.", agents=["patient", "strict"])
    async def busy(ctx: Context, input: Message) -> Message:
        said, _ = await ctx.gather(
            lambda lane: lane.dispatch(input.parts[0].text, "go"), lambda lane: lane.step("work", done.wait)
        )
        assert isinstance(said, Message)
        return said

    for link in busy.definition.sub_agents:
        if seconds:
            link.limits.wall_duration.seconds = seconds
    return busy


async def asked_in(harness: RunHarness, run: run_pb2.Run) -> input_pb2.InputRequest:
    """The first request of a run, once it is recorded."""
    async for event in harness.follow(run):
        if event.HasField("input_requested"):
            return event.input_requested.request
    raise AssertionError("the run asked nothing")


@pytest.mark.parametrize(("name", "said"), [("patient", "none"), ("strict", "INPUT_EXPIRED")])
@pytest.mark.parametrize("when", ["live", "interrupted", "down"])
async def test_a_question_that_is_not_answered_in_time_has_its_default_or_fails(
    tmp_path: Path, name: str, said: str, when: str
) -> None:
    clock, done = HeldClock(), asyncio.Event()
    team = (beside(done), patient, strict)
    async with harness(tmp_path, *team, clock=clock) as it:
        await it.runs.recover()
        run = await it.start("busy" if when == "live" else name, name)
        request = await asked_in(it, run)
        assert request.expire_time.ToNanoseconds() == clock.now_ns() + DAY * SECOND
        if when != "live":
            await it.until_interrupted(run)
            await it.until_over(run)
        if when != "down":
            await clock.next_sleep()
            clock.advance(DAY)
            done.set()
            log = await it.log(run)
    if when == "down":
        clock.advance(DAY)
        async with harness(tmp_path, *team, clock=clock) as it:
            await it.runs.recover()
            log = await it.log(run)
            await check_replay(it, log)
    assert answer_of(log) == said
    (answer,) = (event.input_received.answer for event in having(log, "input_received"))
    assert (answer.source, answer.answered_by) == (input_pb2.ANSWER_SOURCE_EXPIRY, "")
    assert answer.value_json == ('"none"' if name == "patient" else "")
    assert len(having(log, "run_interrupted")) == (when != "live")


async def test_an_answer_stands_that_came_before_the_expiry_and_one_after_it_does_not(tmp_path: Path) -> None:
    clock = HeldClock()
    async with harness(tmp_path, patient, clock=clock) as it:
        await it.runs.recover()
        late, early = await it.start("patient"), await it.start("patient")
        requests = [await asked_in(it, run) for run in (late, early)]
        for run in (late, early):
            await it.until_interrupted(run)
            await it.until_over(run)
        await it.resume(early, reply(requests[1], "soon"))
        soon = await it.log(early)
        await clock.next_sleep()
        clock.advance(DAY)
        expired = await it.log(late)
        with pytest.raises(AlreadyAnswered):
            await it.resume(late, reply(requests[0], "late"))
        await it.resume(late, reply(requests[0], "none"))
        assert await it.store.log.last_sequence(early.run_id) == len(soon)
    assert (answer_of(soon), answer_of(expired)) == ("soon", "none")


async def test_answers_and_the_expiry_at_once_leave_one_answer(tmp_path: Path) -> None:
    clock = HeldClock()
    async with harness(tmp_path, patient, clock=clock) as it:
        await it.runs.recover()
        run = await it.start("patient")
        request = await asked_in(it, run)
        await it.until_interrupted(run)
        await it.until_over(run)
        await clock.next_sleep()
        clock.advance(DAY)
        outcome = (await asyncio.gather(it.resume(run, reply(request, "late")), return_exceptions=True))[0]
        log = await it.log(run)
        await check_replay(it, log)
    (answer,) = (event.input_received.answer for event in having(log, "input_received"))
    assert isinstance(outcome, AlreadyAnswered) == (answer.source == input_pb2.ANSWER_SOURCE_EXPIRY)
    assert answer_of(log) == ("none" if isinstance(outcome, AlreadyAnswered) else "late")


@pytest.mark.parametrize("is_background", [False, True])
async def test_the_deadline_of_the_answering_call_is_the_runs_unless_it_is_in_the_background(
    tmp_path: Path, is_background: bool
) -> None:
    clock = HeldClock()
    async with harness(tmp_path, patient, clock=clock) as it:
        policy = policy_pb2.RunPolicy(background=is_background)
        run = await it.start("patient", policy=policy, deadline_time_ns=clock.now_ns() + SECOND)
        request = await asked_in(it, run)
        await it.until_interrupted(run)
        await it.until_over(run)
        clock.advance(60)
        answers = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=[reply(request, "A")])
        await it.runs.resume(ME, answers, deadline_time_ns=clock.now_ns() + 5 * SECOND)
        log = await it.log(run)
    (resumed,) = having(log, "run_resumed")
    assert resumed.run_resumed.HasField("deadline_time") is not is_background
    assert answer_of(log) == "A"


async def test_a_run_whose_time_is_up_when_it_goes_on_is_ended(tmp_path: Path) -> None:
    clock = HeldClock()
    async with harness(tmp_path, patient, clock=clock) as it:
        run = await it.start("patient")
        request = await asked_in(it, run)
        await it.until_interrupted(run)
        await it.until_over(run)
        answers = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=[reply(request, "A")])
        await it.runs.resume(ME, answers, deadline_time_ns=clock.now_ns())
        log = await it.log(run)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert len(having(log, "run_completed")) == 0


async def test_the_own_time_of_an_agent_that_asks_stands_still_while_the_run_waits(tmp_path: Path) -> None:
    clock, done = HeldClock(), asyncio.Event()
    async with harness(tmp_path, beside(done, seconds=60), patient, strict, clock=clock) as it:
        run = await it.start("busy", "patient")
        request = await asked_in(it, run)
        assert await clock.next_sleep() == 60
        clock.advance(40)
        done.set()
        await it.until_interrupted(run)
        await it.until_over(run)
        clock.advance(3600)
        await it.resume(run, reply(request, "A"))
        log = await it.log(run)
        await check_replay(it, log)
    assert answer_of(log) == "A"


async def test_an_agent_whose_own_time_is_up_while_it_asks_closes_its_question(tmp_path: Path) -> None:
    clock, done = HeldClock(), asyncio.Event()
    async with harness(tmp_path, beside(done, seconds=60), patient, strict, clock=clock) as it:
        run = await it.start("busy", "patient")
        await asked_in(it, run)
        assert await clock.next_sleep() == 60
        clock.advance(60)
        async for event in it.follow(run):
            if event.HasField("sub_agent_failed"):
                break
        assert not (await it.runs.get(ME, run.run_id)).run.open_requests
        done.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert not having(log, "run_interrupted")
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED


@tool(approval=True)
def pay(amount: int) -> str:
    """Pays."""
    return f"paid {amount}"


USED = {"input_tokens": 10, "output_tokens": 5}


async def test_limits_and_money_go_on_where_they_stood_after_restarts(tmp_path: Path) -> None:
    turns = script(p=[*(calls(call("pay", amount=n), usage=USED) for n in range(3)), {"text": "never"}])
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(tool_calls=2, model_calls=3))
    team = (llm("p", tools=["pay"]),)
    async with open_team(tmp_path, turns, *team, tools=[pay]) as it:
        run = await it.start("p", policy=policy)
        (request,) = (await it.until_interrupted(run))[-1].run_interrupted.requests
        await it.until_over(run)
    async with open_team(tmp_path, turns, *team, tools=[pay]) as it:
        await it.resume(run, approve(request))
        async for event in it.follow(run):
            if event.HasField("run_interrupted") and event.run_interrupted.requests[0] != request:
                (request,) = event.run_interrupted.requests
                break
        await it.until_over(run)
    async with open_team(tmp_path, turns, *team, tools=[pay]) as it:
        await it.resume(run, approve(request))
        log = await it.log(run)
        await check_replay(it, log)
        ledger = await it.store.usage.list_for_run(run.run_id)
        tree = await it.tree(log)
    assert [result.error.reason for result in results_of(log)] == [0, 0, error_pb2.ERROR_REASON_LIMIT_EXCEEDED]
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    used = log[-1].run_failed.tree_usage
    assert (used.model_calls, used.tool_calls, used.input_tokens, used.output_tokens) == (3, 2, 30, 15)
    assert tree.tree_usage == used
    assert sum(entry.usage.input_tokens for entry in ledger) == 30


async def test_a_run_that_goes_on_waits_for_a_follower(tmp_path: Path) -> None:
    @agent(description="Works after it was answered.")
    async def worker(ctx: Context, input: Message) -> str:
        await ctx.ask("a?")
        await ctx.step("work", asyncio.Event().wait)
        return "done"

    async with harness(tmp_path, worker) as it:
        run = await it.start("worker")
        request = await asked_in(it, run)
        await it.until_interrupted(run)
        await it.until_over(run)
        await it.resume(run, reply(request, 1))
        live = it.live(run.run_id)
        assert live is not None
        assert live.grace is not None
        stream = it.follow(run)
        await anext(stream)
        assert live.grace is None
        await stream.aclose()
        assert live.grace is not None
        live.end_soon(event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_DISCONNECTED))
        log = await it.log(run)
    assert names(log)[-2:] == ["worker: control.cancel_requested", "worker: run.cancelled"]


async def test_what_fell_due_while_no_server_ran_is_answered_though_the_run_was_never_interrupted(
    tmp_path: Path,
) -> None:
    clock, done = HeldClock(), asyncio.Event()
    team = (beside(done), patient, strict)
    async with harness(tmp_path, *team, clock=clock) as it:
        run = await it.start("busy", "patient")
        await asked_in(it, run)
        await it.crash()
    clock.advance(DAY)
    async with harness(tmp_path, *team, clock=clock) as it:
        await it.runs.recover()
        async for event in it.follow(run):
            if event.HasField("input_received"):
                break
        done.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert answer_of(log) == "none"
    assert not having(log, "run_interrupted")
