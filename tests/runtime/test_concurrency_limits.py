"""How much runs at once in a subtree: further calls of models and tools wait, in order, and can be ended there."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bough import approve, tool_outcome
from bough.v1 import agent_pb2, error_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.composite_agents import parallel
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, most_at_once, results_of, text_of
from tests.support.run_harness import ME
from tests.support.teams import call, calls, llm, open_team, script


def at_once(most: int) -> policy_pb2.RunPolicy:
    return policy_pb2.RunPolicy(limits=policy_pb2.Limits(concurrency=most))


def bounded(name: str, **limits: Any) -> agent_pb2.AgentLink:
    return agent_pb2.AgentLink(agent=name, limits=policy_pb2.Limits(**limits))


class Desk:
    """A tool that counts its running calls and holds them until the test releases them."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.came: list[int] = []
        self.go_on = asyncio.Event()
        self.arrived = asyncio.Event()

    def tool(self) -> Any:
        @tool
        async def sit(number: int) -> str:
            """Sits."""
            self.inside.append(number)
            self.came.append(number)
            self.arrived.set()
            try:
                await self.go_on.wait()
            finally:
                self.inside.remove(number)
            return f"sat {number}"

        return sit


SIT = [call("sit", number=number) for number in range(6)]


@pytest.mark.parametrize("most", [1, 2, 6, 9])
async def test_tools_beyond_the_bound_wait_and_begin_in_the_order_of_their_calls(tmp_path: Path, most: int) -> None:
    desk = Desk()
    async with open_team(
        tmp_path, script(p=[calls(*SIT), "Done."]), llm("p", tools=["sit"]), tools=[desk.tool()]
    ) as harness:
        run = await harness.start("p", policy=at_once(most))
        began = 0
        async for event in harness.follow(run):
            began += event.HasField("tool_started")
            if began == min(most, 6):
                break
        await desk.arrived.wait()
        assert len(desk.came) <= most
        desk.go_on.set()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert desk.came == [0, 1, 2, 3, 4, 5]
    assert most_at_once(log) == min(most, 6)
    assert [text_of(result) for result in results_of(log)] == [f"sat {number}" for number in range(6)]


async def test_bounds_of_the_run_and_of_a_link_hold_together(tmp_path: Path) -> None:
    async def breathe(agent: str, turn: int, chunk: int) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    looking = [calls(call("look"), call("look"), call("look")), "done"]
    turns = script(b=looking, c=looking, d=looking)

    @tool
    async def look() -> str:
        """Looks."""
        for _ in range(20):
            await asyncio.sleep(0)
        return "seen"

    team = (
        parallel("p", bounded("b", concurrency=1), bounded("c", concurrency=2), "d"),
        *(llm(name, tools=["look"]) for name in "bcd"),
    )
    async with open_team(tmp_path, turns, *team, tools=[look], gate=breathe) as harness:
        log = await harness.turn("p", policy=at_once(3))
        await check_replay(harness, log)
    assert log[-1].HasField("run_completed")
    assert most_at_once(log, "b") == 1
    assert most_at_once(log, "c") <= 2
    assert 2 <= most_at_once(log) <= 3


async def test_an_agent_that_waits_for_its_children_holds_no_place(tmp_path: Path) -> None:
    turns = script(
        a=[calls(call("call_b", message="go"), call("call_b", message="go")), "a"],
        b=[calls(call("call_c", message="go")), "b"],
        c=["c"],
    )
    async with open_team(tmp_path, turns, llm("a", links=["b"]), llm("b", links=["c"]), llm("c")) as harness:
        log = await harness.turn("a", policy=at_once(1))
        await check_replay(harness, log)
    assert answer_of(log) == "a"
    assert most_at_once(log) == 1
    assert len(having(log, "sub_agent_completed")) == 4


async def test_what_waits_for_an_approval_or_a_client_holds_no_place_and_the_run_is_interrupted(
    tmp_path: Path,
) -> None:
    @tool(approval=True)
    async def pay() -> str:
        """Pays."""
        return "paid"

    @tool(execution="client")
    async def show() -> str:  # type: ignore[empty-body]
        """Shows."""

    @tool
    async def look() -> str:
        """Looks."""
        return "seen"

    turns = script(p=[calls(call("pay"), call("show"), call("look"), call("pay")), "Done."])
    tools = ["pay", "show", "look"]
    async with open_team(tmp_path, turns, llm("p", tools=tools), tools=[pay, show, look]) as harness:
        run = await harness.start("p", policy=at_once(1))
        log = await harness.until_interrupted(run)
        requests = list(log[-1].run_interrupted.requests)
        assert sorted(request.call.name for request in requests) == ["pay", "pay", "show"]
        assert [text_of(result) for result in results_of(log)] == ["seen"]
        answers = [
            tool_outcome(request, "shown") if request.call.name == "show" else approve(request) for request in requests
        ]
        await harness.resume(run, *answers)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert most_at_once(log) == 1


async def test_a_run_that_is_cancelled_while_calls_wait_ends_and_begins_none_of_them(tmp_path: Path) -> None:
    desk = Desk()
    async with open_team(
        tmp_path, script(p=[calls(*SIT), "never"]), llm("p", tools=["sit"]), tools=[desk.tool()]
    ) as harness:
        run = await harness.start("p", policy=at_once(2))
        await desk.arrived.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert log[-1].HasField("run_cancelled")
    assert len(having(log, "tool_started")) <= 2
    assert desk.inside == []


async def test_a_child_whose_time_is_up_while_it_waits_leaves_its_place_in_the_row(tmp_path: Path) -> None:
    """p's own tool has the only place; c waits behind it until its time is up, and then there is room for p."""
    clock, desk = HeldClock(), Desk()
    turns = script(p=[calls(call("sit", number=0), call("call_c", message="go")), "Done."], c=["never"])
    link = agent_pb2.AgentLink(agent="c")
    link.limits.wall_duration.FromSeconds(5)
    team = (llm("p", links=[link], tools=["sit"]), llm("c"))
    async with open_team(tmp_path, turns, *team, tools=[desk.tool()], clock=clock) as harness:
        run = await harness.start("p", policy=at_once(1))
        await desk.arrived.wait()
        assert await clock.next_sleep() == 5
        clock.advance(5)
        async for event in harness.follow(run):
            if event.HasField("sub_agent_failed"):
                desk.go_on.set()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert [event.agent for event in having(log, "llm_started")] == ["p", "p"]


async def test_code_that_will_not_end_keeps_no_place_from_those_that_go_on(tmp_path: Path) -> None:
    clock, let_go, began = HeldClock(), asyncio.Event(), asyncio.Event()

    @tool
    async def cling() -> str:
        """Ignores every cancellation."""
        began.set()
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return "gone"

    turns = script(p=[calls(call("call_c", message="go")), "Done."], c=[calls(call("cling")), "never"])
    link = agent_pb2.AgentLink(agent="c")
    link.limits.wall_duration.FromSeconds(5)
    team = (llm("p", links=[link]), llm("c", tools=["cling"]))
    async with open_team(tmp_path, turns, *team, tools=[cling], clock=clock) as harness:
        run = await harness.start("p", policy=at_once(1))
        await began.wait()
        assert await clock.next_sleep() == 5
        clock.advance(5)
        log = await harness.log(run)
        let_go.set()
        await check_replay(harness, log)
    assert answer_of(log) == "Done."


async def test_an_abort_ends_who_waits_for_a_place(tmp_path: Path) -> None:
    """c's model has the only place while those of d and e wait; d's gets it when c fails, and then all are ended."""
    may_fail = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent in "cd":
            await may_fail.wait()
        if agent == "d":
            await asyncio.Event().wait()

    link = agent_pb2.AgentLink(agent="c", on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)
    turns = script(
        p=[calls(*[call(f"call_{name}", message="go") for name in "cde"]), "never"],
        c=[{"text": "This much", "error": {"reason": "UNAVAILABLE", "after_chunks": 1}}],
        d=["never"],
        e=["never"],
    )
    team = (llm("p", links=[link, "d", "e"]), llm("c"), llm("d"), llm("e"))
    async with open_team(tmp_path, turns, *team, gate=gate) as harness:
        run = await harness.start("p", policy=at_once(1))
        async for event in harness.follow(run):
            if event.agent == "e":
                may_fail.set()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert "e" not in {event.agent for event in having(log, "llm_started")}
    assert len(having(log, "sub_agent_failed")) == 3


async def test_a_drain_begins_nothing_that_waits_and_the_run_goes_on_later(tmp_path: Path) -> None:
    desk = Desk()
    turns, p = script(p=[calls(*SIT), "Done."]), llm("p", tools=["sit"])
    async with open_team(tmp_path, turns, p, tools=[desk.tool()]) as harness:
        run = await harness.start("p", policy=at_once(1))
        await desk.arrived.wait()
        draining = asyncio.create_task(harness.runs.drain(10))
        await asyncio.sleep(0)
        desk.go_on.set()
        await draining
        assert desk.came == [0]
    async with open_team(tmp_path, turns, p, tools=[desk.tool()]) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert desk.came == [0, 1, 2, 3, 4, 5]
    assert most_at_once(log) == 1


async def test_a_drain_interrupts_no_run_in_which_a_call_still_waits(tmp_path: Path) -> None:
    desk = Desk()

    @tool(approval=True)
    async def pay() -> str:
        """Pays."""
        return "paid"

    turns = script(p=[calls(call("pay"), call("sit", number=0), call("sit", number=1)), "Done."])
    p = llm("p", tools=["pay", "sit"])
    async with open_team(tmp_path, turns, p, tools=[desk.tool(), pay]) as harness:
        run = await harness.start("p", policy=at_once(1))
        await desk.arrived.wait()
        draining = asyncio.create_task(harness.runs.drain(10))
        await asyncio.sleep(0)
        desk.go_on.set()
        await draining
    async with open_team(tmp_path, turns, p, tools=[desk.tool(), pay]) as harness:
        await harness.runs.recover()
        log = await harness.until_interrupted(run)
        await harness.resume(run, *[approve(request) for request in log[-1].run_interrupted.requests])
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert len(having(log, "run_interrupted")) == 1
    assert desk.came == [0, 1]


async def test_code_that_dispatches_at_once_waits_with_its_childrens_models(tmp_path: Path) -> None:
    @agent(description="Calls.", agents=["c"])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        said = await ctx.gather(*[lambda lane: lane.dispatch("c", "go") for _ in range(5)])
        return f"{len(said)} answers"

    async with open_team(tmp_path, script(c=["c"]), llm("c"), code_agents=[caller]) as harness:
        log = await harness.turn("caller", policy=at_once(2))
        await check_replay(harness, log)
    assert answer_of(log) == "5 answers"
    assert most_at_once(log) == 2


async def test_a_bound_of_nothing_at_once_refuses_what_would_wait_for_ever(tmp_path: Path) -> None:
    """No call, definition or setting may say so; a log of another server might."""
    async with open_team(tmp_path, script(p=["never"]), llm("p")) as harness:
        log = await harness.turn("p", policy=at_once(0))
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
