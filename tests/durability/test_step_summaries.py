"""A run whose own steps are summarized on the way is finished from every prefix of its log with the same summaries."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from bough.v1 import agent_pb2, event_pb2
from tests.durability.prefixes.checks import check_kept
from tests.durability.prefixes.cuts import cuts, finish_each, run_in_a_loop
from tests.durability.prefixes.recovery import Finished, record
from tests.durability.prefixes.scenario import Scenario, Team
from tests.durability.prefixes.scenario_tools import asks, looking, said
from tests.support.composite_agents import sequence
from tests.support.log_readings import having, text_of
from tests.support.teams import call, llm

_LONG: Final = "word " * 40


def _forgetful(name: str, max_tokens: int, *links: str) -> agent_pb2.AgentDefinition:
    definition = llm(name, links=links, tools=["look"])
    definition.history.summarize.max_tokens = max_tokens
    return definition


STEPS: Final = Scenario(
    name="summaries of steps",
    turns={
        "a": [
            asks(call("look", what="leaf"), text=_LONG),
            asks(call("look", what="bark"), call("call_b", message="And you?"), text="Go on."),
            said("All is red."),
        ],
        "a.summary": [said("The leaf is red.")],
        "b": [said("I see.")],
        "b.summary": [said("It was about a leaf.")],
        "c": [said("So it is.")],
        "c.summary": [said("They looked.")],
    },
    team=lambda world: Team(
        definitions=[
            sequence("lead", "a", "c"),
            _forgetful("a", 180, "b"),
            _forgetful("b", 120),
            _forgetful("c", 150),
        ],
        tools=[looking(world)],
    ),
)


def _summaries(log: Sequence[event_pb2.AgentEvent]) -> list[tuple[str, int, int, int, str]]:
    return [
        (event.effect_key, stood_for.from_position, stood_for.to_position, one.run_message_count, text_of(one.summary))
        for event in sorted(having(log, "history_compacted"), key=lambda event: event.effect_key)
        for one, stood_for in [(event.history_compacted, event.history_compacted.summary.summary_range)]
    ]


def _check(finished: Finished, prefix: Sequence[event_pb2.AgentEvent], whole: Finished) -> None:
    check_kept(finished, prefix, whole)
    assert finished.log[-1].run_completed.final_answer.parts == whole.log[-1].run_completed.final_answer.parts
    assert _summaries(finished.log) == _summaries(whole.log)
    asked = sum(event.HasField("llm_completed") for event in finished.log[len(prefix) :])
    assert len(finished.world.heard) == asked, "what is answered is asked once"


@pytest.mark.grid
def test_every_prefix_is_finished_with_the_same_summaries(whole_grid: bool, tmp_path: Path) -> None:
    whole = run_in_a_loop(record(STEPS, tmp_path / "whole", is_cancelled=False))

    def check(finished: Finished, prefix: Sequence[event_pb2.AgentEvent]) -> None:
        _check(finished, prefix, whole)

    run_in_a_loop(finish_each(whole, cuts(whole.log, whole_grid=whole_grid), tmp_path, check))
    made = [(key, of_run > 0) for key, _, _, of_run, _ in _summaries(whole.log)]
    assert len(made) == 4
    assert ("c0/s2.compact", True) in made
