"""The first-piece case of the benchmark at its smallest; the model answers at the wire."""

from pathlib import Path

from bench.desk import Shape
from bench.first_piece import measure


async def test_the_first_piece_is_timed_from_the_models_socket_to_the_client(tmp_path: Path) -> None:
    result = await measure(tmp_path, shapes=[Shape(name="1 at a time", turns=2, at_once=1, rounds=1)])
    assert [(figure.what, figure.floor) for figure in result.figures] == [
        ("model to client, 1 at a time: p50", "bare openai, raw stream"),
        ("model to client, 1 at a time: p90", "bare openai, raw stream"),
    ]
    assert all(0 < figure.median < 60_000 and (figure.floor_median or 0) > 0 for figure in result.figures)
