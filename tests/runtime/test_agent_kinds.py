"""What holds of every kind of agent: the laws, the tree, one trace, a cancel anywhere, limits."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, policy_pb2
from tests.durability.prefixes.cuts import cuts, run_in_a_loop
from tests.durability.prefixes.recovery import Finished, record
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.support.agent_kinds import KINDS
from tests.support.held_clock import HeldClock
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, most_at_once
from tests.support.run_harness import ME
from tests.support.teams import call, calls, llm, open_team, script

PATIENCE = 30.0
"""Seconds after which a run is stuck."""

every_kind = pytest.mark.parametrize("scenario", KINDS, ids=str)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], Finished]:
    """Gives a whole run of a scenario, made once."""
    made: dict[str, Finished] = {}

    def get(scenario: Scenario) -> Finished:
        if scenario.name not in made:
            folder = tmp_path_factory.mktemp("recorded") / "run"
            made[scenario.name] = run_in_a_loop(record(scenario, folder, is_cancelled=False))
        return made[scenario.name]

    return get


@every_kind
def test_its_events_obey_the_laws_and_are_a_tree_of_one_trace(
    scenario: Scenario, recorded: Callable[[Scenario], Finished]
) -> None:
    whole = recorded(scenario)
    check_laws(whole.log)
    assert whole.replayed.divergence == ""
    assert not whole.tree.anomalies
    assert {one.state for one in whole.tree.agents} <= {
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
        execution_pb2.EXECUTION_STATE_FAILED,
        execution_pb2.EXECUTION_STATE_CANCELLED,
    }
    started = {event.invocation_id: event for event in having(whole.log, "sub_agent_started")}
    assert [one.invocation_id for one in whole.tree.agents[1:] if one.invocation_id not in started] == []
    assert len(whole.tree.agents) == len(started) + 1
    for one in whole.tree.agents[1:]:
        begun = started[one.invocation_id]
        assert (one.name, one.parent_invocation_id) == (begun.agent, begun.parent_invocation_id)
        assert (one.kind, one.trigger) == (begun.sub_agent_started.kind, begun.sub_agent_started.trigger)
    assert len({one.trace_id for one in whole.tree.agents}) == 1
    assert len({one.span_id for one in whole.tree.agents}) == len(whole.tree.agents)


def _folders(above: Path, count: int) -> list[Path]:
    made = [above / str(number) for number in range(count)]
    for folder in made:
        folder.mkdir()
    return made


async def _turn(
    scenario: Scenario, folder: Path, *, cancelled_after: int = 0, policy: policy_pb2.RunPolicy | None = None
) -> list[event_pb2.AgentEvent]:
    """A run of a scenario, cancelled after so many events where that is not 0; it keeps the laws and replays."""
    team = scenario.team(World(HeldClock(), is_patient=True))
    parts = {"tools": team.tools, "code_agents": team.code_agents, "functions": team.functions}
    async with open_team(folder, script(**scenario.turns), *team.definitions, **parts) as harness:
        run = await harness.start(scenario.root, policy=policy)
        log: list[event_pb2.AgentEvent] = []
        async for event in harness.follow(run):
            log.append(event)
            if len(log) == cancelled_after:
                await harness.runs.cancel(ME, run.run_id)
        await check_replay(harness, log)
        return log


@pytest.mark.grid
@every_kind
def test_a_cancel_anywhere_ends_each_of_its_agents_once(
    scenario: Scenario, recorded: Callable[[Scenario], Finished], whole_grid: bool, tmp_path: Path
) -> None:
    places = cuts(recorded(scenario).log[:-1], whole_grid=whole_grid)

    async def check() -> None:
        for after, folder in zip(places, _folders(tmp_path, len(places)), strict=True):
            async with asyncio.timeout(PATIENCE):
                await _turn(scenario, folder, cancelled_after=after)

    run_in_a_loop(check())


BOUNDS = (
    policy_pb2.Limits(model_calls=0),
    policy_pb2.Limits(model_calls=1),
    policy_pb2.Limits(depth=0),
    policy_pb2.Limits(tokens=1),
    policy_pb2.Limits(cost_nanos=1),
)
"""One call of a model is more than one token, and costs more than one billionth."""


@every_kind
async def test_limits_hold_for_all_of_it(scenario: Scenario, tmp_path: Path) -> None:
    for folder, limits in zip(_folders(tmp_path, len(BOUNDS)), BOUNDS, strict=True):
        log = await _turn(scenario, folder, policy=policy_pb2.RunPolicy(limits=limits))
        started = len(having(log, "llm_started"))
        assert started <= limits.model_calls or limits.HasField("depth")
        assert not (limits.HasField("depth") and having(log, "sub_agent_started"))
        told = [event.llm_failed.error for event in log if event.HasField("llm_failed")]
        told += [event.value_recorded.error for event in log if event.HasField("value_recorded")]
        told += [event.tool_failed.result.error for event in log if event.HasField("tool_failed")]
        assert error_pb2.ERROR_REASON_LIMIT_EXCEEDED in {error.reason for error in told}


@every_kind
async def test_it_runs_as_much_at_once_as_it_may(scenario: Scenario, tmp_path: Path) -> None:
    """Two, since tools of some wait for each other."""
    async with asyncio.timeout(PATIENCE):
        log = await _turn(scenario, tmp_path, policy=policy_pb2.RunPolicy(limits=policy_pb2.Limits(concurrency=2)))
    assert 1 <= most_at_once(log) <= 2


def _held(scenario: Scenario, owner: str, on_failure: policy_pb2.SubAgentFailurePolicy.ValueType) -> Scenario:
    """The scenario's lead, which is what it is about, as a sub-agent whose own time is five seconds."""
    link = agent_pb2.AgentLink(agent="lead", on_failure=on_failure)
    if owner == "link":
        link.limits.wall_duration.FromSeconds(5)

    def team(world: World) -> Team:
        made = scenario.team(world)
        for definition in made.definitions:
            if owner == "definition" and definition.name == "lead":
                definition.limits.wall_duration.FromSeconds(5)
        return replace(made, definitions=[*made.definitions, llm("above", links=[link])])

    above = [calls(call("call_lead", message="go")), "Going on."]
    return replace(scenario, root="above", turns={**scenario.turns, "above": above}, team=team)


@every_kind
@pytest.mark.parametrize("owner", ["link", "definition"])
@pytest.mark.parametrize(
    "on_failure",
    [policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE, policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT],
    ids=["go", "abort"],
)
async def test_its_own_time_ends_all_of_it_and_its_caller_goes_on_or_not(
    scenario: Scenario, owner: str, on_failure: policy_pb2.SubAgentFailurePolicy.ValueType, tmp_path: Path
) -> None:
    async def hangs(agent: str, turn: int, chunk: int) -> None:
        if agent != "above":
            await asyncio.Event().wait()

    clock, held = HeldClock(), _held(scenario, owner, on_failure)
    team = held.team(World(clock, is_patient=True))
    parts = {"tools": team.tools, "code_agents": team.code_agents, "functions": team.functions}
    async with (
        asyncio.timeout(PATIENCE),
        open_team(tmp_path, script(**held.turns), *team.definitions, gate=hangs, clock=clock, **parts) as harness,
    ):
        run = await harness.start("above")
        assert await clock.next_sleep() == 5
        clock.advance(5)
        log = await harness.log(run)
        await check_replay(harness, log)
    child = having(log, "sub_agent_failed")[-1]
    assert (child.agent, child.depth) == ("lead", 1)
    assert child.sub_agent_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert child.sub_agent_failed.end_reason == execution_pb2.END_REASON_LIMIT
    below = [event.sub_agent_failed.error.reason for event in having(log, "sub_agent_failed")[:-1]]
    assert set(below) <= {error_pb2.ERROR_REASON_CANCELLED}
    if on_failure == policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE:
        assert answer_of(log) == "Going on."
    else:
        assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
