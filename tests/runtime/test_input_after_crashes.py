"""Answers that meet a crash, a restart or a recovery: taken once, with the same continuation as without."""

import asyncio
from pathlib import Path

import pytest

from bough import approve, refuse, reply
from bough.v1 import event_pb2, execution_pb2, input_pb2, message_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.models.model import ModelRequest
from bough_server.runs.replay import ReplayOutcome
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.databases import in_each_database
from tests.support.held_clock import HeldClock
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.question_agents import harness
from tests.support.run_harness import ME, RunHarness, names, open_harness
from tests.support.teams import Scripts, call, calls, llm, open_team, script

pytestmark = in_each_database


Message = message_pb2.Message
Request = input_pb2.InputRequest


@tool(approval=True)
def pay(amount: int) -> str:
    """Pays."""
    return f"paid {amount}"


def beside(done: asyncio.Event) -> FunctionAgent:
    """An agent that asks while it works."""

    @agent(description="Asks beside work.")
    async def busy(ctx: Context, input: Message) -> str:
        said = await ctx.gather(lambda lane: lane.ask("a?"), lambda lane: lane.step("work", done.wait))
        return str(said[0])

    return busy


async def asked_in(harness: RunHarness, run: run_pb2.Run, count: int = 1) -> list[Request]:
    """The first requests of a run, once they are recorded."""
    found: list[Request] = []
    async for event in harness.follow(run):
        if event.HasField("input_requested"):
            found.append(event.input_requested.request)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("recovers", [False, True])
async def test_an_answer_to_a_run_that_is_not_being_executed_takes_it_over(tmp_path: Path, recovers: bool) -> None:
    done = asyncio.Event()
    async with harness(tmp_path, beside(done)) as it:
        run = await it.start("busy")
        (request,) = await asked_in(it, run)
        await it.crash()
    async with harness(tmp_path, beside(done)) as it:
        if recovers:
            await asyncio.gather(it.runs.recover(), *(it.resume(run, reply(request, "A")) for _ in range(3)))
        else:
            await it.resume(run, reply(request, "A"))
            await it.runs.recover()
        done.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert answer_of(log) == "A"
    assert len(having(log, "input_received")) == len(having(log, "run_resumed")) == 1
    assert not having(log, "run_interrupted")


async def test_an_answer_that_was_recorded_before_a_crash_is_not_asked_for_again(tmp_path: Path) -> None:
    done = asyncio.Event()
    async with harness(tmp_path, beside(done)) as it:
        run = await it.start("busy")
        (request,) = await asked_in(it, run)
        await it.resume(run, reply(request, "A"))
        await it.crash()
    async with harness(tmp_path, beside(done)) as it:
        await it.runs.recover()
        await it.resume(run, reply(request, "A"))
        assert not (await it.runs.get(ME, run.run_id)).run.open_requests
        done.set()
        log = await it.log(run)
        await check_replay(it, log)
    assert (answer_of(log), len(having(log, "input_received"))) == ("A", 1)


TURNS = script(
    lead=[calls(call("call_p", message="Pay."), text="I ask."), "All done."],
    p=[calls(call("pay", amount=1), call("pay", amount=2), text="I pay."), calls(call("pay", amount=3)), "Paid."],
)


async def test_models_are_shown_the_same_however_often_the_run_was_restarted(tmp_path: Path) -> None:
    heard: dict[bool, list[ModelRequest]] = {False: [], True: []}
    team = (llm("lead", links=["p"]), llm("p", tools=["pay"]))
    for restarts, said in heard.items():
        folder = tmp_path / str(restarts)
        folder.mkdir()
        answered, run = 0, None
        while answered < 3:
            async with open_team(folder, TURNS, *team, tools=[pay], heard=said) as it:
                run = run or await it.start("lead")
                while answered < 3:
                    await _stopped(it, run)
                    open_requests = (await it.runs.get(ME, run.run_id)).run.open_requests
                    request = open_requests[0]
                    no_more = refuse(request, note="Enough.")
                    await it.resume(run, approve(request) if answered < 2 else no_more)
                    answered += 1
                    if restarts and answered < 3:
                        await _stopped(it, run)
                        break
                else:
                    log = await it.log(run)
                    await check_replay(it, log)
        assert answer_of(log) == "All done."
        assert [text_of(one) for one in results_of(log)] == ["paid 1", "paid 2", "", "Paid."]
        assert log[-1].run_completed.tree_usage.model_calls == 5
        assert log[-1].run_completed.tree_usage.tool_calls == 3
    plain, restarted = ([_shown(request) for request in said] for said in heard.values())
    assert len(plain) == 5
    assert restarted == plain


async def _stopped(harness: RunHarness, run: run_pb2.Run) -> None:
    """Waits until a run waits for input, or has ended."""
    await harness.until_over(run)
    state = (await harness.runs.get(ME, run.run_id)).run.state
    assert state in (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, execution_pb2.EXECUTION_STATE_SUCCEEDED)


def _shown(request: ModelRequest) -> list[tuple[int, str, str]]:
    return [
        (
            message.role,
            "".join(part.text for part in message.parts),
            "".join(
                part.tool_call.name
                + part.tool_call.arguments_json
                + text_of(part.tool_result)
                + part.tool_result.error.message
                for part in message.parts
            ),
        )
        for message in request.messages
    ]


@agent(description="Pays in two lanes.", tools=["pay"])
async def lanes(ctx: Context, input: Message) -> str:
    async def one(lane: Context) -> str:
        asked = ModelRequest(messages=(message_pb2.Message(role=message_pb2.ROLE_USER),), tools=tuple(lane.offers()))
        response = await lane.model(asked)
        made = [part.tool_call for part in response.message.parts if part.HasField("tool_call")]
        return text_of((await lane.tools(made))[0].result)

    return ", ".join(await ctx.gather(one, one))


async def answered_backwards(folder: Path) -> tuple[list[event_pb2.AgentEvent], ReplayOutcome]:
    """A run of two lanes, the last of which is answered first, each after a restart; and how its log is replayed."""
    turns = Scripts(script(lanes=[calls(call("pay", amount=0))]))
    run = None
    for count in (2, 1):
        async with open_harness(folder, models=turns, code_agents=[lanes], tools=[pay]) as it:
            run = run or await it.start("lanes")
            await _stopped(it, run)
            requests = (await it.runs.get(ME, run.run_id)).run.open_requests
            assert len(requests) == count
            await it.resume(run, approve(requests[-1], arguments_json=f'{{"amount": {count}}}'))
            await _stopped(it, run)
            log = await it.until_interrupted(run) if count == 2 else await it.log(run)
            replayed = await it.replay(log)
    return log, replayed


async def test_lanes_that_ask_models_and_wait_for_approvals_are_answered_in_any_order(tmp_path: Path) -> None:
    log, _ = await answered_backwards(tmp_path)
    check_laws(log)
    assert answer_of(log) == "paid 1, paid 2"
    assert names(log).count("lanes: llm.started") == 2
    assert [event.effect_key for event in having(log, "step_completed")] == ["e0.1/s0.m", "e0.0/s0.m"]


async def test_steps_of_lanes_that_end_in_another_order_than_they_began_are_replayed(tmp_path: Path) -> None:
    _, replayed = await answered_backwards(tmp_path)
    assert replayed.divergence == ""


def versioned(name: str, version: str) -> FunctionAgent:
    """An agent of a version that asks for as many seconds as it is told."""

    @agent(name=name, description="Asks for a while.", version=version)
    async def asking(ctx: Context, input: Message) -> str:
        return str(await ctx.ask("a?", expires=float(input.parts[0].text), default="none"))

    return asking


async def test_a_run_that_cannot_go_on_here_holds_up_no_expiry_of_another_s(tmp_path: Path) -> None:
    clock = HeldClock()
    async with harness(tmp_path, versioned("old", "1"), versioned("new", "1"), clock=clock) as it:
        first, second = await it.start("old", "10"), await it.start("new", "20")
        for run in (first, second):
            await it.until_interrupted(run)
            await it.until_over(run)
    clock.advance(60)
    async with harness(tmp_path, versioned("old", "2"), versioned("new", "1"), clock=clock) as it:
        await it.runs.recover()
        log = await it.log(second)
        assert answer_of(log) == "none"
        assert (await it.runs.get(ME, first.run_id)).run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
    async with harness(tmp_path, versioned("old", "1"), versioned("new", "1"), clock=clock) as it:
        await it.runs.recover()
        assert answer_of(await it.log(first)) == "none"
