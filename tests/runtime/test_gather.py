"""Code of an agent that does several things at once: `gather` and `map`."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bough.v1 import event_pb2
from bough_server import Context, RunError, agent, text_of
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import llm, open_team, script

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
