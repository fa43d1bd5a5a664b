"""Torture in its short form, and its judge, which has to see what is wrong; `make torture` is the long form."""

from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM
from typing import Final

from tests.durability.torture import torment
from tests.durability.torture_clients import Faults
from tests.durability.torture_evaluations import trials_of
from tests.durability.torture_faults import Moment, Restart, moments
from tests.durability.torture_judge import Evidence, judge
from tests.store.sql import execute
from tests.support.postgres import own_cluster


async def test_clients_of_a_server_that_is_killed_see_every_event_once_and_nothing_that_ended_runs_again(
    tmp_path: Path,
) -> None:
    faults = Faults()
    evidence = await torment(tmp_path, faults, turns=4, when=[*moments(seed=24, kills=3)])
    await _check(evidence, faults, least=4)


async def test_so_do_clients_of_two_servers_that_are_killed_while_their_database_crashes(tmp_path: Path) -> None:
    faults = Faults()
    when = [Moment(seconds=2), Moment(seconds=1, signal=SIGTERM), Moment(seconds=0.5), Moment(seconds=1.5)]
    restarting = [Restart(seconds=2.5, mode="immediate", outage=0.5)]
    with own_cluster(keep_in=tmp_path) as database:
        evidence = await torment(
            tmp_path,
            faults,
            turns=4,
            when=when,
            servers=2,
            database=database,
            restarting=restarting,
            is_cold=False,
            evaluators=1,
        )
        await _check(evidence, faults, least=4)
    assert evidence.restarts == 1
    assert evidence.evaluations


async def _check(evidence: Evidence, faults: Faults, *, least: int) -> None:
    """Nothing is wrong, and the judge notices what is made wrong."""
    runs = await judge(evidence, faults)
    assert faults.said == []
    assert runs == len(evidence.turns) + sum(
        2 * sum(trials_of(seen[0].events).values()) for seen in evidence.evaluations
    )
    assert len(evidence.turns) >= least
    for tamper, kind in (
        (_leave_an_event_out, "lost"),
        (_leave_an_event_out_at_another_server, "lost"),
        (_see_an_event_twice, "duplicates"),
        (_forget_a_turn, "duplicates"),
        (_run_a_tool_again, "duplicates"),
        (_ask_a_model_again, "duplicates"),
        (_run_no_tool, "lost"),
    ):
        assert kind in await _found_after(tamper, evidence), f"the judge did not notice: {tamper.__name__}"
    for damage, repair in _DAMAGE.items():
        execute(evidence.url, damage)
        assert "lost" in await _found(evidence), f"the judge did not notice: {damage}"
        execute(evidence.url, repair)
    assert await _found(evidence) == {}


_DAMAGE: Final = {
    "UPDATE events SET run_id = 'lost-' || run_id WHERE sequence = 4": (
        "UPDATE events SET run_id = substr(run_id, 6) WHERE run_id LIKE 'lost-%'"
    ),
    "UPDATE runs SET epoch = epoch + 1": "UPDATE runs SET epoch = epoch - 1",
    "UPDATE runs SET ended = NOT ended": "UPDATE runs SET ended = NOT ended",
    "UPDATE messages SET agent = 'lost'": "SELECT 1",  # the judge has made it again from the logs
}
"""What is made wrong in the database, and what puts it right again."""


async def _found_after(tamper: Callable[[Evidence], None], evidence: Evidence) -> dict[str, int]:
    """What the judge finds once something was made wrong; everything is put right again."""
    effects, asked = evidence.effects.read_bytes(), evidence.asked.copy()
    turns = [(turn, list(turn.events), [list(each) for each in turn.watched]) for turn in evidence.turns]
    tamper(evidence)
    found = await _found(evidence)
    evidence.effects.write_bytes(effects)
    evidence.asked.update({call: count - evidence.asked[call] for call, count in asked.items()})
    for turn, events, watched in turns:
        turn.events, turn.watched = events, watched
    return found


async def _found(evidence: Evidence) -> dict[str, int]:
    faults = Faults()
    await judge(evidence, faults)
    return faults.counts


def _leave_an_event_out(evidence: Evidence) -> None:
    del evidence.turns[0].events[3]


def _leave_an_event_out_at_another_server(evidence: Evidence) -> None:
    del evidence.turns[0].watched[-1][3]


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
