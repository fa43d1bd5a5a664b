"""The tables of the peers' benchmark, its environments and what counts as a failed turn; nothing is measured here."""

import re
from pathlib import Path

import pytest

from bench.peers import environments
from bench.peers.__main__ import has_failed
from bench.peers.adk_client import take
from bench.peers.contestants import ALL, BOUGH
from bench.peers.desk_turns import Turn, run
from bench.peers.race import Laps, PeersReport, Result
from bench.peers.table import BEGIN, END, markdown, rewritten
from tests.support.model_scenarios import TEXT


def laps(*cpu: float, failed: int = 0) -> Laps:
    return Laps(cpu=list(cpu), p50=[10 * one for one in cpu], first=[one / 2 for one in cpu], turns=8, failed=failed)


def result(name: str, one: Laps, many: Laps, *, is_peer: bool = True, is_streamed: bool = True) -> Result:
    return Result(
        name=name,
        version="1.2",
        kept="all",
        durable="yes",
        tree="no",
        is_peer=is_peer,
        is_streamed=is_streamed,
        laps={"1 at a time": one, "4 at once": many},
        peak=150.4,
    )


OURS = result(BOUGH.name, laps(30.0, 10.0, 20.0), laps(10.0), is_peer=False)
FLOOR = result("floor", laps(5.0), laps(5.0), is_peer=False, is_streamed=False)
PEER = result("peer", laps(1000.0, 2000.0), laps(40.0, failed=3))


def report(*results: Result, failures: tuple[str, ...] = (), left_out: tuple[str, ...] = ()) -> PeersReport:
    return PeersReport(
        date="2026-01-02",
        machine={"cores": "2"},
        versions={"python": "3.11.7", "sqlite": "3.40.1", "openai": "3.54.0"},
        rounds=3,
        results=list(results),
        failures=list(failures),
        left_out=list(left_out),
    )


def test_the_tables_show_medians_with_ranges_ratios_to_bough_and_what_failed() -> None:
    shown = markdown(report(OURS, FLOOR, PEER, failures=("peer: a|b\n<c>",), left_out=("other: no network",)))
    assert shown == (
        "Measured on 2026-01-02. cores 2; python 3.11.7; sqlite 3.40.1."
        " Rounds: 3; medians, and their range in brackets.\n"
        "\n"
        "| CPU of a turn | version | ms, 1 at a time | x Bough | ms, 4 at once | x Bough | peak memory, MB |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| `bough serve` | 1.2 | 20.0 (10.0-30.0) | 1.00 | 10.0 (10.0-10.0) | 1.00 | 150 |\n"
        "| floor | 1.2 | 5.0 (5.0-5.0) | 0.25 | 5.0 (5.0-5.0) | 0.50 | 150 |\n"
        "| peer | 1.2 | 1,500 (1,000-2,000) | 75.00 | 3 of 8 failed |  | 150 |\n"
        "\n"
        "| time of a turn, p50 | ms, 1 at a time | ms, 4 at once | first text, 1 at a time | first text, 4 at once |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| `bough serve` | 200 (100-300) | 100 (100-100) | 10.0 (5.0-15.0) | 5.0 (5.0-5.0) |\n"
        "| floor | 50.0 (50.0-50.0) | 50.0 (50.0-50.0) |  |  |\n"
        "| peer | 15,000 (10,000-20,000) |  | 750 (500-1,000) |  |\n"
        "\n"
        "| what remains | texts of sub-agents streamed | kept of a turn | durable | tree of agents |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| `bough serve` | yes | all | yes | no |\n"
        "| floor | no | all | yes | no |\n"
        "| peer | yes | all | yes | no |\n"
        "\n"
        "- Left out: other: no network\n"
        "- peer: a/b (c)"
    )


def test_the_page_gets_the_tables_between_its_marks_and_keeps_the_rest() -> None:
    page = f"Before\n{BEGIN}\nold\n{END}\nafter\n"
    assert rewritten(page, report(OURS)) == f"Before\n{BEGIN}\n{markdown(report(OURS))}\n{END}\nafter\n"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        rewritten("nothing", report(OURS))


@pytest.mark.parametrize(
    ("results", "failed"),
    [
        ((OURS, PEER), False),
        ((OURS,), True),
        ((result(BOUGH.name, laps(1.0, failed=1), laps(1.0), is_peer=False), PEER), True),
        ((result("floor", laps(1.0), laps(1.0, failed=1), is_peer=False), PEER), True),
    ],
)
def test_the_benchmark_fails_by_its_own_turns_or_if_no_peer_ran_but_not_by_a_peers_turns(
    results: tuple[Result, ...], failed: bool
) -> None:
    assert has_failed(report(*results)) is failed


def test_every_package_of_every_environment_has_an_exact_version() -> None:
    for name in environments.names():
        lines = (environments.REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+|#.*|", line)] == []


def test_every_contestant_with_an_environment_is_installed_from_requirements_that_pin_its_package() -> None:
    environments_used = {one.environment for one in ALL if one.environment}
    assert environments_used == set(environments.names())
    assert all(one.package in environments.pins(one.environment) for one in ALL if one.environment)


def test_an_environment_that_cannot_be_installed_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(environments.EnvironmentFailed, match="No matching distribution found"):
        environments.python_of("openai-agents", tmp_path)
    assert not (tmp_path / "openai-agents" / ".requirements").exists()


async def test_a_turn_fails_by_its_answer_by_its_streamed_text_and_by_an_error_and_the_others_count() -> None:
    async def good(turn: Turn) -> None:
        turn.answer = TEXT
        for _ in range(4):
            turn.take(TEXT)

    async def wrong(turn: Turn) -> None:
        turn.answer = "Oak."

    async def unstreamed(turn: Turn) -> None:
        turn.answer = TEXT
        turn.take(TEXT)

    async def broken(turn: Turn) -> None:
        raise ConnectionError("refused")

    kinds = iter((good, wrong, unstreamed, broken))

    async def each(turn: Turn) -> None:
        await next(kinds)(turn)

    lap = await run(each, 4, 1)
    assert lap.failures == [
        "The answer is 'Oak.'.",
        f"{len(TEXT)} characters were streamed instead of {4 * len(TEXT)}.",
        "ConnectionError: refused",
    ]
    assert lap.p50 >= lap.first_p50 > 0


def test_pieces_of_any_agent_are_streamed_and_the_leads_whole_text_is_the_answer() -> None:
    turn = Turn()
    for author, text, partial in (
        ("call_botanist", "Oak", True),
        ("call_botanist", "Oak.", False),
        ("lead", "It is ", True),
        ("lead", "It is an oak.", False),
    ):
        take({"author": author, "partial": partial, "content": {"parts": [{"text": text}]}}, turn)
    assert (turn.streamed, turn.answer) == (len("OakIt is "), "It is an oak.")


def test_an_error_in_the_stream_of_events_is_raised() -> None:
    with pytest.raises(RuntimeError, match="database is locked"):
        take({"error": "OperationalError: database is locked"}, Turn())
