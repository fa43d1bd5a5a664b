"""The peers' benchmark at its smallest: Bough and a bare loop, without a peer; the model answers at the wire."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.peers import environments, graphs
from bench.peers.contestants import BOUGH, PEERS, RAW, Ground, Runner
from bench.peers.graph_shapes import VISITS
from bench.peers.race import race, shapes


async def test_bough_and_a_bare_loop_run_the_same_desk_and_every_turn_is_measured(tmp_path: Path) -> None:
    report = await race(tmp_path, (RAW, BOUGH), shapes(2, at_once=2))
    assert (report["failures"], report["left_out"]) == ([], [])
    assert [one["name"] for one in report["results"]] == [RAW.name, BOUGH.name]
    for result in report["results"]:
        assert result["peak"] > 10
        assert list(result["laps"]) == ["1 at a time", "2 at once"]
        for turns, laps in zip((1, 2), result["laps"].values(), strict=True):
            assert (laps["turns"], laps["failed"]) == (2 * turns, 0)
            assert all(len(laps[name]) == 2 and min(laps[name]) > 0 for name in ("cpu", "p50", "first"))


async def test_what_cannot_be_installed_or_started_is_left_out_aloud_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> str:
        raise environments.EnvironmentFailed("pip found no network")

    @asynccontextmanager
    async def start(ground: Ground) -> AsyncIterator[Runner]:
        raise TimeoutError
        yield

    monkeypatch.setattr(environments, "python_of", fail)
    broken = dataclasses.replace(RAW, name="broken", start=lambda ground: BOUGH.start(_nowhere(ground)))
    slow = dataclasses.replace(RAW, name="slow", start=start)
    report = await race(tmp_path, (PEERS[0], broken, slow, RAW), shapes(1, at_once=1))
    assert [one["name"] for one in report["results"]] == [RAW.name]
    not_installed, not_started, not_in_time = report["left_out"]
    assert not_installed == "openai-agents could not be installed. pip found no network"
    assert not_started.startswith("broken: A program ended before it served")
    assert not_in_time == "slow: it did not start in time"
    said = capsys.readouterr().err
    assert all(f"LEFT OUT: {why}\n" in said for why in report["left_out"])


def _nowhere(ground: Ground) -> Ground:
    """The same ground with an address that no configuration takes."""
    return dataclasses.replace(ground, base_url="nowhere")


def test_visits_of_graphs_are_a_table_of_milliseconds() -> None:
    assert graphs.markdown([("`bough serve`", [(1.234, 5.0)] * len(VISITS))]).splitlines()[-1] == (
        "| `bough serve` | " + " | ".join(["1.23 | 5.00"] * len(VISITS)) + " |"
    )
