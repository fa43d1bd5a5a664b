"""Pages of runs and sessions: every filter is read through an index, and labels search a bounded number of rows."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from bough.v1 import execution_pb2
from bough_server.errors import InvalidRequest
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.sql import pages
from tests.store.logs import ALL, ANNE, START_NS, Made, completed
from tests.store.sql import plans_of, seen_statements

RUNNING, SUCCEEDED = execution_pb2.EXECUTION_STATE_RUNNING, execution_pb2.EXECUTION_STATE_SUCCEEDED


async def _all_pages(store: Store, run_filter: RunFilter, *, size: int) -> tuple[list[str], list[int]]:
    """The ids of all runs of a list, and how many each of its pages had."""
    found: list[str] = []
    counts: list[int] = []
    token = ""
    while token or not counts:
        shown, token = await store.runs.list(ALL, run_filter, Page(size=size, token=token))
        counts.append(len(shown))
        found += [run.run_id for run in shown]
    return found, counts


async def _made(store: Store, count: int, labels: Callable[[int], dict[str, str]] = lambda _: {}) -> list[Made]:
    """Runs, oldest first; each second one has ended."""
    runs = [Made(number=number, labels=labels(number)) for number in range(1, count + 1)]
    for run in runs:
        await store.log.create(run.new())
        if run.number % 2:
            await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    return runs


async def test_a_page_of_labels_and_other_filters_searches_a_bounded_number_of_rows_and_none_is_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_SCANNED", 4)
    runs = await _made(
        store, 11, lambda number: {"all": "1", "of": "three" if number in (2, 3, 11) else f"{number % 2}"}
    )
    newest = [runs[10].run_id, runs[2].run_id, runs[1].run_id]
    running = frozenset({RUNNING})
    assert await _all_pages(store, RunFilter(labels={"of": "three"}), size=2) == (newest, [2, 1])
    assert await _all_pages(store, RunFilter(labels={"all": "1", "of": "three"}), size=4) == (newest, [3])
    assert await _all_pages(store, RunFilter(labels={"all": "1", "of": "none"}), size=2) == ([], [0])
    assert await _all_pages(store, RunFilter(labels={"of": "three"}, states=running), size=2) == (newest[2:], [1])
    monkeypatch.setattr(pages, "MAX_COUNTED", 1)  # so that the frequent label is read, not the rare one
    found = await _all_pages(store, RunFilter(labels={"all": "1", "of": "0"}), size=2)
    assert found == ([runs[number - 1].run_id for number in (10, 8, 6, 4)], [2, 2, 0])


async def test_pages_of_one_user_have_all_its_rows_and_their_tokens_name_no_row_of_another(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_SCANNED", 3)
    monkeypatch.setattr(pages, "MAX_COUNTED", 4)
    other = replace(ANNE, user_id="bert")
    runs = [
        Made(number=number, principal=ANNE if number in (2, 9) else other, labels={"all": "1", "n": str(number)})
        for number in range(1, 10)
    ]
    for run in runs:
        await store.log.create(run.new())
    own = [run.run_id for run in runs if run.principal == ANNE]
    for labels, expected in (({}, own), ({"all": "1"}, own), ({"n": "2"}, own[:1]), ({"n": "3"}, [])):
        found: list[str] = []
        token, is_first = "", True
        while token or is_first:
            shown, token = await store.runs.list(ANNE, RunFilter(labels=labels), Page(size=1, token=token))
            found, is_first = [*found, *(run.run_id for run in shown)], False
            assert not token or json.loads(base64.b64decode(token))[1] in own
        assert found == expected[::-1]
    _, of_anne = await store.runs.list(ANNE, RunFilter(), Page(size=1))
    for scope in (ALL, other):
        with pytest.raises(InvalidRequest, match="is not a token of this list"):
            await store.runs.list(scope, RunFilter(), Page(size=1, token=of_anne))


async def test_runs_of_several_states_come_in_one_order_over_pages_of_any_size(store: Store) -> None:
    runs = await _made(store, 7)
    newest = [run.run_id for run in reversed(runs)]
    for size in (1, 2, 3, 7, 8):
        found, _ = await _all_pages(store, RunFilter(states=frozenset({RUNNING, SUCCEEDED})), size=size)
        assert found == newest


async def test_sessions_are_found_by_the_labels_that_they_have_now(store: Store) -> None:
    async def find(labels: dict[str, str]) -> list[str]:
        found, _ = await store.sessions.list(ANNE, labels=labels, page=Page(size=9))
        return [session.session_id for session in found]

    for number in range(5):
        labels = {"odd": str(number % 2), "n": str(number)}
        await store.sessions.create(ANNE, session_id=f"s{number}", labels=labels, now_ns=START_NS + number)
    assert await find({"odd": "1"}) == ["s3", "s1"]
    await store.sessions.set_labels(ANNE, "s3", {"odd": "no", "n": "3"})
    await store.sessions.set_labels(ANNE, "s2", {"odd": "1"})
    assert [await find({"odd": value}) for value in "10"] == [["s2", "s1"], ["s4", "s0"]]
    await store.sessions.delete(ANNE, "s2")
    assert await find({"odd": "1"}) == await find({"odd": "1", "n": "1"}) == ["s1"]


async def test_every_filter_is_read_through_an_index(file_url: str) -> None:
    one, several = frozenset({RUNNING}), frozenset({RUNNING, SUCCEEDED})
    used = {
        "runs_newest_first": RunFilter(),
        "runs_of_session": RunFilter(session_id="s1", agent="lead", states=several),
        "runs_of_agent": RunFilter(agent="lead", states=one),
        "runs_by_state": RunFilter(states=several),
    }
    of_user = [RunFilter(), RunFilter(agent="lead", states=several), RunFilter(states=one)]
    async with open_store(file_url, durability="process") as store:
        with seen_statements() as seen:
            for run_filter in used.values():
                await store.runs.list(ALL, run_filter, Page(size=10))
            for run_filter in of_user:
                await store.runs.list(ANNE, run_filter, Page(size=10))
            await store.runs.list(ANNE, used["runs_of_session"], Page(size=10))
    plans = plans_of(file_url, [each for each in seen if each[0].startswith("SELECT")])
    for index, plan in zip([*used, *["runs_of_user"] * len(of_user), "runs_of_session"], plans, strict=True):
        searched = {step for step in plan if step.startswith(("SEARCH runs", "SCAN runs"))}
        assert searched, plan
        assert all("USING" in step and (f"INDEX {index} " in step or "run_id=?" in step) for step in searched), plan
