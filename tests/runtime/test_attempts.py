"""Attempts of model calls: delays, retry-after, what is charged, and how much a model may say."""

from pathlib import Path

import pytest

from bough.v1 import error_pb2, event_pb2, usage_pb2
from bough_server.models.model import RetryPolicy
from bough_server.tools.tool import tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, llm, open_team, script

PATIENT = RetryPolicy(retries=3, base=2.0, longest=5.0)


async def test_delays_double_up_to_the_longest_with_jitter_and_are_recorded(tmp_path: Path) -> None:
    clock = HeldClock()
    turns = script(p=[{"text": "Done.", "error": {"reason": "TRANSPORT", "times": 3}}])
    async with open_team(tmp_path, turns, llm("p"), clock=clock, retry=PATIENT) as harness:
        run = await harness.start("p")
        slept = []
        for _ in range(3):
            slept.append(await clock.next_sleep())
            clock.advance(slept[-1])
        log = await harness.log(run)
        await check_replay(harness, log)
    bounds = [(1.0, 2.0), (2.0, 4.0), (2.5, 5.0)]
    assert all(low <= delay <= high for delay, (low, high) in zip(slept, bounds, strict=True))
    retries = having(log, "llm_retrying")
    assert [event.attempt for event in retries] == [2, 3, 4]
    recorded = [event.llm_retrying.delay.ToNanoseconds() / 1e9 for event in retries]
    assert recorded == pytest.approx(slept)
    assert {event.llm_retrying.reason for event in retries} == {event_pb2.RETRY_REASON_TRANSPORT}
    assert (answer_of(log), having(log, "llm_completed")[0].attempt) == ("Done.", 4)
    assert having(log, "step_completed")[0].step_completed.step.attempt == 4


async def test_a_provider_says_how_long_to_wait(tmp_path: Path) -> None:
    clock = HeldClock()
    turns = script(p=[{"text": "Done.", "error": {"reason": "RATE_LIMITED", "retry_after": 60, "times": 1}}])
    async with open_team(tmp_path, turns, llm("p"), clock=clock, retry=PATIENT) as harness:
        run = await harness.start("p")
        assert await clock.next_sleep() == 60
        clock.advance(60)
        log = await harness.log(run)
    assert having(log, "llm_retrying")[0].llm_retrying.reason == event_pb2.RETRY_REASON_RATE_LIMITED
    assert answer_of(log) == "Done."


async def test_a_run_is_cancelled_while_it_waits_for_its_next_attempt(tmp_path: Path) -> None:
    clock = HeldClock()
    turns = script(p=[{"text": "x", "error": {"reason": "TIMEOUT"}}])
    async with open_team(tmp_path, turns, llm("p"), clock=clock, retry=PATIENT) as harness:
        run = await harness.start("p")
        await clock.next_sleep()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert names(log)[-4:] == [
        "p: control.cancel_requested",
        "p: llm.failed",
        "p: step.failed",
        "p: run.cancelled",
    ]
    failed = having(log, "llm_failed")[0]
    assert (failed.attempt, failed.llm_failed.not_sent) == (2, True)
    assert log[-1].run_cancelled.usage == usage_pb2.Usage(model_calls=1, model_calls_without_usage=1)


async def test_a_call_whose_retries_are_used_up_fails_with_the_last_error(tmp_path: Path) -> None:
    turns = script(
        p=[{"text": "a b", "error": {"reason": "PROVIDER_ERROR", "message": "Overloaded.", "after_chunks": 1}}]
    )
    async with open_team(tmp_path, turns, llm("p")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert [event.attempt for event in having(log, "llm_retrying")] == [2, 3]
    assert having(log, "llm_failed")[0].attempt == 3
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_MODEL_UNAVAILABLE
    assert error.message.endswith("Overloaded.")
    assert log[-1].run_failed.usage.model_calls == 3


async def test_what_is_not_worth_trying_again_fails_at_once(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=[{"text": "x", "error": {"reason": "UNAVAILABLE"}}]), llm("p")) as harness:
        log = await harness.turn("p")
    assert having(log, "llm_retrying") == []


USED = {"input_tokens": 10, "output_tokens": 2}


def _costing(nanos: int, **counts: int) -> usage_pb2.Usage:
    usage = usage_pb2.Usage(cost_nanos=nanos, currency_code="USD")
    for name, count in counts.items():
        setattr(usage, name, count)
    return usage


async def test_every_attempt_that_reports_usage_is_charged_once_under_its_own_event(tmp_path: Path) -> None:
    lost = {"reason": "TRANSPORT", "after_chunks": 1, "times": 1, "usage": {"input_tokens": 7, "output_tokens": 1}}
    failed = {"reason": "UNAVAILABLE", "usage": {"input_tokens": 3, "output_tokens": 0}}
    turns = script(
        p=[
            calls(call("call_c", message="x"), call("call_d", message="x"), usage=USED),
            {"text": "Done.", "usage": USED},
        ],
        c=[{"text": "ok then", "usage": USED, "error": lost}],
        d=[{"text": "never", "error": failed}],
    )
    team = (llm("p", links=["c", "d"]), llm("c"), llm("d"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("p")
        entries = await harness.store.usage.list_for_run(log[0].run_id)
        tree = await harness.tree(log)
        await check_replay(harness, log)
    charged = {entry.sequence: (entry.agent, entry.usage.input_tokens, entry.usage.cost_nanos) for entry in entries}
    assert sorted(charged.values()) == [
        ("c", 7, 9_000),
        ("c", 10, 14_000),
        ("d", 3, 3_000),
        ("p", 10, 14_000),
        ("p", 10, 14_000),
    ]
    assert len(charged) == len(entries)
    carriers = {log[sequence - 1].WhichOneof("payload") for sequence in charged}
    assert carriers == {"llm_completed", "llm_retrying", "llm_failed"}
    assert {(entry.user_id, entry.session_id) for entry in entries} == {("local", log[0].session_id)}
    own = {one.name: one.usage for one in tree.agents}
    assert own["c"] == _costing(23_000, input_tokens=17, output_tokens=3, model_calls=2)
    assert own["d"] == _costing(3_000, input_tokens=3, output_tokens=0, model_calls=1)
    total = log[-1].run_completed.tree_usage
    assert total == _costing(54_000, input_tokens=40, output_tokens=7, model_calls=5, tool_calls=2)
    assert tree.tree_usage == total


async def test_usage_that_is_unknown_is_absent_and_what_is_zero_is_zero(tmp_path: Path) -> None:
    silent = script(p=["Done."])
    zero = script(p=[{"text": "Done.", "usage": {"input_tokens": 0, "output_tokens": 0}}])
    ends = []
    for name, turns in (("silent", silent), ("zero", zero)):
        folder = tmp_path / name
        folder.mkdir()
        async with open_team(folder, turns, llm("p")) as harness:
            log = await harness.turn("p")
            ends.append((log[-1].run_completed.usage, len(await harness.store.usage.list_for_run(log[0].run_id))))
    assert ends == [
        (usage_pb2.Usage(model_calls=1, model_calls_without_usage=1), 1),
        (_costing(0, input_tokens=0, output_tokens=0, model_calls=1), 1),
    ]


@pytest.mark.parametrize("character", ["x", "é", "語", "🍂"])
async def test_an_answer_longer_than_512_kib_fails_its_call_and_no_event_is_too_large(
    tmp_path: Path, character: str
) -> None:
    pieces = [character * (64 * 1024 // len(character.encode()))] * 9
    async with open_team(tmp_path, script(p=[{"chunks": pieces}]), llm("p")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE
    assert having(log, "llm_retrying") == []
    deltas = sum(len(event.llm_output_text_delta.text.encode()) for event in having(log, "llm_output_text_delta"))
    assert deltas <= 512 * 1024


async def test_an_answer_of_512_kib_in_one_piece_is_refused_where_its_bytes_are_too_many(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=[{"chunks": ["語" * 400_000]}]), llm("p")) as harness:
        log = await harness.turn("p")
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE
    assert max(event.ByteSize() for event in log) < 512 * 1024


@tool
def flood(size: int) -> str:
    """Says very much."""
    return "x" * size


async def test_huge_results_are_cut_and_marked_and_no_event_is_over_two_mebibytes(tmp_path: Path) -> None:
    turns = script(p=[calls(*[call("flood", size=700 * 1024)] * 20), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=["flood"]), tools=[flood]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert max(event.ByteSize() for event in log) < 2 * 1024 * 1024
    ended = results_of(log)
    assert all(500 * 1024 < len(text_of(result)) <= 512 * 1024 for result in ended)
    assert {part.original_bytes for result in ended for part in result.parts} == {700 * 1024}
    kept = having(log, "step_completed")[0].step_completed.step.tool_results
    assert {result.truncated for result in kept} == {True}
    assert sum(result.ByteSize() for result in kept) < 1024 * 1024
