"""Torture in its short form, and its judge, which has to see what is wrong; `make torture` is the long form."""

from collections.abc import Callable
from pathlib import Path

from tests.durability.torture import moments, torment
from tests.durability.torture_clients import Faults
from tests.durability.torture_judge import Evidence, judge


async def test_clients_of_a_server_that_is_killed_see_every_event_once_and_nothing_that_ended_runs_again(
    tmp_path: Path,
) -> None:
    faults = Faults()
    evidence = await torment(tmp_path, faults, turns=4, when=[*moments(seed=24, kills=3)])
    runs = await judge(evidence, faults)
    assert faults.said == []
    assert runs == len(evidence.turns) >= 4
    for tamper, kind in (
        (_leave_an_event_out, "lost"),
        (_see_an_event_twice, "duplicates"),
        (_forget_a_turn, "duplicates"),
        (_run_a_tool_again, "duplicates"),
        (_ask_a_model_again, "duplicates"),
        (_run_no_tool, "lost"),
    ):
        assert kind in await _found_after(tamper, evidence), f"the judge did not notice: {tamper.__name__}"


async def _found_after(tamper: Callable[[Evidence], None], evidence: Evidence) -> dict[str, int]:
    """What the judge finds once something was made wrong; everything is put right again."""
    faults, effects = Faults(), evidence.effects.read_bytes()
    turns, asked = [(turn, list(turn.events)) for turn in evidence.turns], evidence.asked.copy()
    tamper(evidence)
    await judge(evidence, faults)
    evidence.effects.write_bytes(effects)
    evidence.asked.update({call: count - evidence.asked[call] for call, count in asked.items()})
    for turn, events in turns:
        turn.events = events
    return faults.counts


def _leave_an_event_out(evidence: Evidence) -> None:
    del evidence.turns[0].events[3]


def _see_an_event_twice(evidence: Evidence) -> None:
    evidence.turns[0].events.append(evidence.turns[0].events[-1])


def _forget_a_turn(evidence: Evidence) -> None:
    evidence.turns[0].events.clear()


def _run_a_tool_again(evidence: Evidence) -> None:
    lines = evidence.effects.read_text()
    evidence.effects.write_text(lines + lines)


def _run_no_tool(evidence: Evidence) -> None:
    evidence.effects.write_text("")


def _ask_a_model_again(evidence: Evidence) -> None:
    for call in evidence.asked:
        evidence.asked[call] += 1
