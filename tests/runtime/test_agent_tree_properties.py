"""Properties of whole runs: random trees of scripted agents keep the laws, replay, and add up."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import execution_pb2, invocation_pb2, usage_pb2
from tests.support.examples import examples
from tests.support.log_readings import check_replay
from tests.support.random_teams import Plan, definition, named, plans, turns
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import open_team, script
from tests.support.usages import summed


def expected(plan: Plan, caller: str = "") -> tuple[list[tuple[str, str, bool]], bool]:
    """Who is called by whom and ends well, in preorder, where every call is made in order; and whether `plan` does."""
    below: list[tuple[str, str, bool]] = []
    ends_well = True
    for child in plan.children:
        called, child_ends_well = expected(child, plan.name)
        below.extend(called)
        if child.aborts and not child_ends_well:
            ends_well = False
            break
    ends_well = ends_well and not plan.fails
    return [(caller, plan.name, ends_well), *below], ends_well


def edges(tree: invocation_pb2.Invocation) -> list[tuple[str, str, bool]]:
    names = {one.invocation_id: one.name for one in tree.agents}
    return [
        (names.get(one.parent_invocation_id, ""), one.name, one.state == execution_pb2.EXECUTION_STATE_SUCCEEDED)
        for one in tree.agents
    ]


async def check(harness: RunHarness, plan: Plan) -> None:
    log = await harness.turn(plan.name)
    await check_replay(harness, log)
    tree = await harness.tree(log)
    should_be, _ = expected(plan)
    if all(one.is_certain() for one in plan.everybody()):
        assert sorted(edges(tree)) == sorted(should_be)
    else:
        assert {edge[:2] for edge in edges(tree)} <= {(above.name, one.name) for above, one in _pairs(plan)} | {
            ("", plan.name)
        }
    ledger = summed(entry.usage for entry in await harness.store.usage.list_for_run(log[0].run_id))
    total, own = usage_pb2.Usage(), summed(one.usage for one in tree.agents)
    total.CopyFrom(tree.tree_usage)
    assert own == total
    total.ClearField("tool_calls")
    assert total == ledger


def _pairs(plan: Plan) -> Iterator[tuple[Plan, Plan]]:
    for one in plan.everybody():
        for child in one.children:
            yield one, child


async def run(plan: Plan, work: Callable[[RunHarness, Plan], Awaitable[None]]) -> None:
    everybody = list(plan.everybody())
    said = script(**{one.name: turns(one) for one in everybody})
    with tempfile.TemporaryDirectory() as folder:
        async with open_team(Path(folder), said, *map(definition, everybody)) as harness:
            await work(harness, plan)


@pytest.mark.grid
@examples(25)
@given(plans(2).map(named))
def test_any_team_keeps_the_laws_replays_and_adds_up(plan: Plan) -> None:
    asyncio.run(run(plan, check))


@pytest.mark.grid
@examples(20)
@given(plans(2).map(named), st.integers(1, 120))
def test_any_team_that_is_cancelled_anywhere_keeps_the_laws_and_replays(plan: Plan, after: int) -> None:
    async def cancel(harness: RunHarness, plan: Plan) -> None:
        started = await harness.start(plan.name)
        log = []
        async for event in harness.follow(started):
            log.append(event)
            if len(log) == after:
                await harness.runs.cancel(ME, started.run_id)
        await check_replay(harness, log)

    asyncio.run(run(plan, cancel))
