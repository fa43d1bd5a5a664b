"""Code of an agent that does several things at once: `gather` and `map`."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bough.v1 import event_pb2
from bough_server import Context, ModelRequest, RunError, agent, text_of, tool
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import call, calls, llm, open_team, script


@tool
async def look(what: str) -> str:
    """Looks at something."""
    return f"{what} is red"


PLACES = ["Oslo", "Bergen"]


async def forecast(ctx: Context, place: str, unit: str = "C") -> str:
    return f"{place}: {text_of(await ctx.dispatch('forecaster', place))} in {unit}"


async def with_pairs(ctx: Context) -> list[str]:
    return await ctx.gather(*((forecast, place) for place in PLACES))


async def with_callables(ctx: Context) -> list[str]:
    return await ctx.gather(lambda ctx: forecast(ctx, "Oslo"), lambda ctx: forecast(ctx, "Bergen"))


async def with_map(ctx: Context) -> list[str]:
    return await ctx.map(forecast, (place for place in PLACES))


async def run_of(tmp_path: Path, code: Callable[[Context], Awaitable[object]]) -> list[event_pb2.AgentEvent]:
    @agent(agents=["forecaster"])
    async def lead(ctx: Context, input: str) -> str:
        """Does several things at once."""
        return str(await code(ctx))

    turns = script(forecaster=["It is dry."] * 9)
    async with open_team(tmp_path, turns, llm("forecaster"), code_agents=[lead]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    return log


@pytest.mark.parametrize("code", [with_pairs, with_callables, with_map])
async def test_each_has_a_context_for_itself_and_results_come_in_the_order_given(
    tmp_path: Path, code: Callable[[Context], Awaitable[object]]
) -> None:
    log = await run_of(tmp_path, code)
    assert answer_of(log) == "['Oslo: It is dry. in C', 'Bergen: It is dry. in C']"
    assert sorted(event.effect_key for event in having(log, "sub_agent_started")) == ["e0.0/e0", "e0.1/e0"]


async def test_further_arguments_are_passed_on(tmp_path: Path) -> None:
    log = await run_of(tmp_path, lambda ctx: ctx.gather((forecast, "Oslo", "F"), (forecast, "Bergen")))
    assert answer_of(log) == "['Oslo: It is dry. in F', 'Bergen: It is dry. in C']"


async def test_nothing_at_once_is_no_effect(tmp_path: Path) -> None:
    async def code(ctx: Context) -> object:
        return [*await ctx.map(forecast, []), *await ctx.gather(), await forecast(ctx, "Oslo")]

    log = await run_of(tmp_path, code)
    assert [event.effect_key for event in having(log, "sub_agent_started")] == ["e0"]


async def test_the_first_failure_in_order_is_raised_after_all_have_ended(tmp_path: Path) -> None:
    async def fail(ctx: Context, place: str) -> str:
        if place == "nowhere":
            raise ValueError(place)
        return await forecast(ctx, place)

    async def code(ctx: Context) -> str:
        with pytest.raises(ValueError, match="nowhere"):
            await ctx.map(fail, ["nowhere", "Oslo"])
        return await forecast(ctx, "Bergen")

    log = await run_of(tmp_path, code)
    assert [event.effect_key for event in having(log, "sub_agent_completed")] == ["e0.1/e0", "e1"]


async def test_the_context_outside_is_held_meanwhile(tmp_path: Path) -> None:
    async def code(ctx: Context) -> str:
        async def outside(_: Context, place: str) -> str:
            return await forecast(ctx, place)

        with pytest.raises(RunError, match=r"ctx\.gather"):
            await ctx.map(outside, PLACES)
        return await forecast(ctx, "Oslo")

    assert answer_of(await run_of(tmp_path, code)) == "Oslo: It is dry. in C"


async def steps_of(tmp_path: Path, code: Callable[[Context], Awaitable[object]]) -> list[event_pb2.AgentEvent]:
    """Run code whose models answer at once, and check that each step of the log has an id for itself."""

    @agent(tools=["look"])
    async def lead(ctx: Context, input: str) -> str:
        """Asks models in branches."""
        return str(await code(ctx))

    turns = script(lead=[calls(call("look", what="leaf"))] * 20)
    async with open_team(tmp_path, turns, tools=[look], code_agents=[lead]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    check_laws(log)
    started = having(log, "llm_started")
    assert len({event.step_id for event in started}) == len(started) == len(having(log, "step_completed"))
    made = [(event.invocation_id, event.tool_started.call.call_id) for event in having(log, "tool_started")]
    assert len(set(made)) == len(made)
    return log


async def ask(ctx: Context) -> int:
    response = await ctx.model(ModelRequest(messages=ctx.history(), tools=ctx.offers()))
    await ctx.tools([part.tool_call for part in response.message.parts])
    return ctx.step_index


async def test_each_branch_counts_its_steps_and_so_does_the_context_outside(tmp_path: Path) -> None:
    async def twice(ctx: Context, _: int) -> list[int]:
        return [await ask(ctx), await ask(ctx)]

    async def code(ctx: Context) -> object:
        return [ctx.step_index, await ask(ctx), await ctx.map(twice, range(3)), ctx.step_index, await ask(ctx)]

    log = await steps_of(tmp_path, code)
    assert answer_of(log) == "[-1, 0, [[0, 1], [0, 1], [0, 1]], 0, 1]"
    assert {event.effect_key for event in having(log, "step_completed")} == {
        *("s0.m", "s1.m"),
        *(f"e0.{branch}/s{index}.m" for branch in range(3) for index in range(2)),
    }


async def test_a_loop_over_the_steps_ends_in_a_branch_as_it_does_outside(tmp_path: Path) -> None:
    async def loop(ctx: Context, _: int) -> int:
        asked = 0
        while ctx.step_index < 3:
            asked += 1
            await ask(ctx)
        return asked

    assert answer_of(await steps_of(tmp_path, lambda ctx: ctx.map(loop, range(5)))) == "[4, 4, 4, 4, 4]"


async def test_steps_stay_few_however_deep_and_wide_branches_are_nested(tmp_path: Path) -> None:
    """Sixteen branches at each of nine depths are more paths than a step_index has numbers."""

    async def dive(ctx: Context, depth: int) -> int:
        own = await ask(ctx)
        return max([own, *await ctx.map(dive, [0] * 15 + [depth - 1])] if depth else [own])

    log = await steps_of(tmp_path, lambda ctx: dive(ctx, 9))
    assert answer_of(log) == "0"
    assert len(having(log, "step_completed")) == 1 + 9 * 16
