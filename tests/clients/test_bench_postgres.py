"""The cases of the benchmark on PostgreSQL at their smallest."""

from pathlib import Path

from bench.desk import Shape
from bench.desk_postgres import measure
from tests.support.postgres import programs
from tests.support.toolchains import skip_or_fail


async def test_a_turn_on_postgresql_is_measured_beside_one_on_sqlite_and_postgresql_apart(tmp_path: Path) -> None:
    if programs() is None:
        skip_or_fail("postgres", ["initdb (Debian's package postgresql)"])
    result = await measure(tmp_path, shapes=[Shape(name="1 at a time", turns=2, at_once=1, rounds=1)])
    assert result.failures == []
    assert [(figure.what, figure.floor) for figure in result.figures] == [
        ("CPU of a turn, 1 at a time", "the same server on SQLite"),
        ("CPU of PostgreSQL for a turn, 1 at a time", ""),
        ("CPU of a turn, 1 at a time, PASSTHROUGH", "the same server on SQLite"),
        ("CPU of PostgreSQL for a turn, 1 at a time, PASSTHROUGH", ""),
    ]
    assert all(figure.median > 0 for figure in result.figures)
