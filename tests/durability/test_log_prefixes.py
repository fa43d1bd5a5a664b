"""Every prefix of a log is enough to finish its run: the same answer, the same tree, and nothing done twice."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from bough.v1 import event_pb2
from tests.durability.prefixes.checks import check_finished, check_kept
from tests.durability.prefixes.cuts import cuts, finish, finish_each, run_in_a_loop
from tests.durability.prefixes.recovery import Finished, record
from tests.durability.prefixes.scenario import Scenario, Team
from tests.durability.prefixes.scenarios import SCENARIOS
from tests.support.agent_kinds import KINDS
from tests.support.databases import on_postgres
from tests.support.examples import examples
from tests.support.graph_kinds import GRAPH_KINDS
from tests.support.random_graphs import GraphPlan, graph_plans, scenario_of
from tests.support.random_teams import Plan, definition, named, plans, turns

RUNS = (*SCENARIOS, *KINDS, *GRAPH_KINDS)

Check = Callable[[Finished, Sequence[event_pb2.AgentEvent], Finished], None]

ONCE = (Phase.explicit, Phase.reuse, Phase.generate)
"""A run that is stuck takes too long to be tried again and again."""


class Recorded:
    """A run from its beginning to its end and, if it was cancelled, the same run without the cancellation."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.run = run_in_a_loop(record(scenario, folder / "run", is_cancelled=True))
        self._left_alone = (
            run_in_a_loop(record(scenario, folder / "alone", is_cancelled=False)) if scenario.cancelled_at else self.run
        )

    def whole(self, prefix: Sequence[event_pb2.AgentEvent]) -> Finished:
        """What a run comes to that has come this far."""
        wished = (event.cancel_requested for event in prefix if event.HasField("cancel_requested"))
        return self._left_alone if all(wish.effect_scope for wish in wished) else self.run

    def judge(self, check: Check) -> Callable[[Finished, Sequence[event_pb2.AgentEvent]], None]:
        """Compares a run that went on from a prefix with what it comes to."""
        return lambda finished, prefix: check(finished, prefix, self.whole(prefix))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], Recorded]:
    """Gives the recording of a scenario, made once."""
    made: dict[str, Recorded] = {}

    def get(scenario: Scenario) -> Recorded:
        if scenario.name not in made:
            folder = tmp_path_factory.mktemp("recorded") / "runs"
            made[scenario.name] = Recorded(scenario, folder)
        return made[scenario.name]

    return get


async def _check_crashes(
    recording: Recorded, places: Sequence[float], folder: Path, *, check: Check = check_finished
) -> None:
    """Crashes a run, then what recovers it, and so on: each time that far into what was still to come."""
    broken, begun = recording.run, 1
    for number, place in enumerate(places):
        through = begun + round(place * (len(broken.log) - begun))
        broken, begun = await finish(broken, through, folder / str(number), recording.judge(check)), through


@pytest.mark.grid
@pytest.mark.parametrize("scenario", RUNS, ids=str)
def test_every_prefix_of_a_log_is_enough_to_finish_its_run(
    scenario: Scenario, recorded: Callable[[Scenario], Recorded], whole_grid: bool, tmp_path: Path
) -> None:
    recording = recorded(scenario)
    whole = recording.run
    run_in_a_loop(finish_each(whole, cuts(whole.log, whole_grid=whole_grid), tmp_path, recording.judge(check_finished)))


@pytest.mark.grid
@pytest.mark.parametrize("scenario", RUNS[::8], ids=str)
def test_some_prefixes_of_some_logs_are_enough_on_postgresql(
    scenario: Scenario, whole_grid: bool, tmp_path: Path
) -> None:
    with on_postgres(tmp_path):
        recording = Recorded(scenario, tmp_path / "recorded")
        whole = recording.run
        places = cuts(whole.log, whole_grid=whole_grid)[:: 1 if whole_grid else 3]
        run_in_a_loop(finish_each(whole, places, tmp_path, recording.judge(check_finished)))


@pytest.mark.grid
@settings(examples(12), phases=ONCE)
@given(st.sampled_from(RUNS), st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_a_recovery_that_crashes_anywhere_is_recovered_like_the_first(
    recorded: Callable[[Scenario], Recorded], scenario: Scenario, places: list[float]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_in_a_loop(_check_crashes(recorded(scenario), places, Path(folder)))


def _plan(*children: Plan, fails: bool = False, aborts: bool = False) -> Plan:
    return Plan(name="", fails=fails, aborts=aborts, parallel=True, children=children)


@pytest.mark.grid
@settings(examples(12), phases=ONCE)
@given(plans(2).map(named), st.lists(st.floats(0, 1), min_size=1, max_size=3))
@example(
    # The server dies when a sibling has failed whose failure ends one that calls a model meanwhile.
    named(_plan(_plan(fails=True, aborts=True), _plan(fails=True), _plan(_plan(fails=True, aborts=True), _plan()))),
    [0.56],
)
def test_any_team_that_crashes_anywhere_is_finished(plan: Plan, places: list[float]) -> None:
    everybody = list(plan.everybody())
    scenario = Scenario(
        name="random",
        root=plan.name,
        turns={one.name: turns(one) for one in everybody},
        team=lambda _: Team(definitions=[definition(one) for one in everybody]),
    )
    with tempfile.TemporaryDirectory() as folder:
        recording = Recorded(scenario, Path(folder) / "whole")
        is_certain = all(one.is_certain() for one in everybody)
        run_in_a_loop(
            _check_crashes(recording, places, Path(folder), check=check_finished if is_certain else check_kept)
        )


@pytest.mark.grid
@settings(examples(14), phases=ONCE)
@given(graph_plans(), st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_any_graph_that_crashes_anywhere_is_finished(plan: GraphPlan, places: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recording = Recorded(scenario_of(plan), Path(folder) / "whole")
        check = check_finished if plan.is_certain else check_kept
        run_in_a_loop(_check_crashes(recording, places, Path(folder), check=check))
