"""A run whose own steps are summarized on the way is finished from every prefix of its log with the same summaries."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bough.v1 import agent_pb2, event_pb2
from bough_server import events
from tests.durability.prefixes.finishing import Finished, record, recover
from tests.durability.prefixes.judging import check_kept
from tests.durability.prefixes.props import asks, looking, said
from tests.durability.prefixes.scenario import Scenario, Team
from tests.support.composites import sequence
from tests.support.readings import having, text_of
from tests.support.teams import call, llm

AT_ONCE: Final = 4
"""How many houses stand at the same time."""

PATIENCE: Final = 10.0
"""Seconds after which a run is stuck."""

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
        (event.effect_key, one.from_position, one.to_position, one.run_messages, text_of(one.summary))
        for event in sorted(having(log, "history_compacted"), key=lambda event: event.effect_key)
        for one in [event.history_compacted]
    ]


async def _check(whole: Finished, through: int, folder: Path) -> None:
    prefix = whole.log[:through]
    try:
        async with asyncio.timeout(PATIENCE):
            finished = await recover(whole, through, folder)
        check_kept(finished, prefix, whole)
        assert finished.log[-1].run_completed.final_answer.parts == whole.log[-1].run_completed.final_answer.parts
        assert _summaries(finished.log) == _summaries(whole.log)
        asked = sum(event.HasField("llm_completed") for event in finished.log[through:])
        assert len(finished.world.heard) == asked, "what is answered is asked once"
    except Exception as error:
        error.add_note(f"cut after {through}, {events.name_of(prefix[-1])}")
        raise


async def _check_every_prefix(folder: Path) -> Finished:
    whole = await record(STEPS, folder / "whole", is_cancelled=False)
    places = asyncio.Semaphore(AT_ONCE)

    async def check(through: int) -> None:
        async with places:
            await _check(whole, through, folder / str(through))

    ended = await asyncio.gather(*map(check, range(1, len(whole.log) + 1)), return_exceptions=True)
    failures = [error for error in ended if isinstance(error, Exception)]
    if failures:
        raise ExceptionGroup(f"of {len(whole.log)} prefixes", failures)
    return whole


def test_every_prefix_is_finished_with_the_same_summaries(tmp_path: Path) -> None:
    whole = asyncio.run(_check_every_prefix(tmp_path))
    made = [(key, of_run > 0) for key, _, _, of_run, _ in _summaries(whole.log)]
    assert len(made) == 4
    assert ("c0/s2.compact", True) in made
