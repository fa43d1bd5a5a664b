"""Hostile code in its short form; `python -m tests.durability.hostile --minutes 5` is the long one."""

from pathlib import Path

from tests.durability.hostile import AGENTS, torment


async def test_a_server_lives_through_everything_that_its_code_does(tmp_path: Path) -> None:
    report = await torment(tmp_path, seconds=1, seed=1)
    assert report.faults == []
    assert sum(report.ended.values()) >= len(AGENTS)
    assert report.health >= 1
