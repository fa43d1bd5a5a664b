"""Values in graphs: results, routes and lists that are none, and what is too large."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import event_pb2
from bough_server import Snapshot, node, router
from bough_server.engine.recorder import Recorder
from tests.support.graph_runs import error_of, giving, run_of
from tests.support.log_readings import answer_of, having


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda value: {1, 2}, "is not JSON that a graph can pass on"),
        (lambda value: float("nan"), "is not JSON that a graph can pass on"),
        (lambda value: "x" * 600_000, "is longer than 512 KiB"),
        (lambda value: json.loads("[" * 500 + "]" * 500), "is not JSON that a graph can pass on"),
    ],
    ids=["no JSON", "NaN", "large", "deep"],
)
async def test_results_that_no_graph_can_pass_on_fail_that_graph_alone(
    tmp_path: Path, function: Callable[[Any], Any], message: str
) -> None:
    bad = node(name="bad")(function)
    text = "graph: {nodes: [{name: n, function: bad}], edges: [[START, n, END]]}"
    log = await run_of(tmp_path, text, bad)
    assert message in error_of(log)[1]


@router(name="lies")
def lie(output: Any, snapshot: Snapshot) -> str:
    return "nowhere"


@router(name="raises")
def raising(output: Any, snapshot: Snapshot) -> str:
    raise RuntimeError("lost")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lies", ("NO_ROUTE", "n: The router 'lies' chose 'nowhere'; its targets are END.")),
        ("raises", ("INTERNAL", "n: The router 'raises' raised RuntimeError: lost.")),
    ],
)
async def test_routers_that_lie_or_raise_fail_the_visit(tmp_path: Path, name: str, expected: tuple[str, str]) -> None:
    branch = f"{{source: n, function: {name}, targets: [END]}}"
    text = f"graph: {{nodes: [{{name: n}}], edges: [[START, n]], branches: [{branch}]}}"
    assert error_of(await run_of(tmp_path, text, lie, raising)) == expected


async def test_a_map_of_too_many_items_and_of_no_list_is_refused_and_of_none_is_empty(tmp_path: Path) -> None:
    text = "graph: {nodes: [{name: s, function: s}, {name: m, function: echo, map: true}], edges: [[START, s, m, END]]}"
    many, none, wrong = [
        await run_of(tmp_path / str(n), text, giving("s", value)) for n, value in enumerate([[0] * 1001, [], "x"])
    ]
    assert error_of(many) == ("LIMIT_EXCEEDED", "m: s -> m runs once for each of at most 1,000 items, and got 1,001.")
    assert answer_of(none) == "[]"
    assert error_of(wrong) == ("TYPE_MISMATCH", "m: s -> m takes a list, and runs once for each item: x.")


async def test_channels_that_grow_too_large_fail_the_graph(tmp_path: Path) -> None:
    text = """
    graph:
      channels: [{name: log, reducer: APPEND}]
      nodes: [{name: big, function: big, writes: [{channel: log}]}, {name: next}]
      edges: [[START, big, next, END]]
    """
    reason, message = error_of(await run_of(tmp_path, text, giving("big", "x" * 300_000)))
    assert (reason, message[:48]) == ("OUTPUT_TOO_LARGE", "big: The channels are larger than 256 KiB togeth")


async def test_mappings_that_make_more_than_a_value_may_be_stop_at_its_bound(tmp_path: Path) -> None:
    fields = ", ".join(f"f{number}: big" for number in range(200))
    text = f"""
    graph:
      nodes: [{{name: big, function: big}}, {{name: all, input: {{{fields}}}}}]
      edges: [[START, big, all, END]]
    """
    reason, message = error_of(await run_of(tmp_path, text, giving("big", "x" * 300_000)))
    assert (reason, message[:53]) == ("OUTPUT_TOO_LARGE", "all: What the mappings make is longer than 512 KiB as")


@router(name="thirty")
def go_round(output: Any, snapshot: Snapshot) -> str:
    return "END" if snapshot.visit == 30 else "n"


async def test_a_cycle_of_nodes_that_do_no_work_waits_for_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_early: list[Sequence[event_pb2.AgentEvent]] = []

    def record(recorder: Recorder, batch: Sequence[event_pb2.AgentEvent]) -> None:
        if recorder.is_full:
            too_early.append(batch)
        append(recorder, batch)

    append = Recorder.record
    monkeypatch.setattr(Recorder, "record", record)
    monkeypatch.setattr("bough_server.engine.recorder.MAX_DELAY", 3600)
    monkeypatch.setattr("bough_server.engine.recorder.MAX_PENDING_BYTES", 50_000)
    branch = "{source: n, function: thirty, targets: [n, END]}"
    text = f"graph: {{max_supersteps: 99, nodes: [{{name: n}}], edges: [[START, n]], branches: [{branch}]}}"
    log = await run_of(tmp_path, text, go_round, said="x" * 40_000)
    assert len(having(log, "node_completed")) == 31
    assert len(too_early) < 3  # the start and the end of the run wait for nothing
