"""Faults that a case of an evaluation injects into a share of the calls of tools and of the attempts of models."""

from math import comb, fsum
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from bough.v1 import error_pb2, event_pb2
from bough.v1.error_pb2 import AgentError
from bough.v1.eval_set_pb2 import EvalFault
from bough_server import tool
from bough_server.errors import InvalidRequest
from bough_server.models.model import RetryPolicy
from bough_server.runs.admission import EvaluationRun
from bough_server.runtime.faults import is_drawn
from tests.durability.prefixes.recovery import cut_off
from tests.support.fork_agents import run_of
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.payment_agents import team, whole
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script
from tests.support.tool_mocks import case_of, mock

RATE_LIMITED = error_pb2.ERROR_REASON_MODEL_RATE_LIMITED
MANY = [calls(*(call("look", what=f"leaf {number}") for number in range(20))), "Done."]


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


@tool(name="look", timeout=5)
async def patient(what: str) -> str:
    """Looks something up within five seconds."""
    return f"{what} is red"


@tool(execution="client", name="look")
def scan(what: str) -> str:
    """Looks in the client."""
    raise AssertionError("the client looks")


def fail(message: str = "", *, share: float = 1, **fields: str) -> EvalFault:
    return EvalFault(fail=AgentError(message=message), share=share, **fields)  # type: ignore[arg-type]


def delay(seconds: int) -> EvalFault:
    return EvalFault(tool="look", share=1, delay=Duration(seconds=seconds))


async def run(harness: RunHarness, case: EvaluationRun) -> list[event_pb2.AgentEvent]:
    """The log of a run of a case, which keeps the laws and replays."""
    log = await harness.log(await harness.start("p", case=case))
    await check_replay(harness, log)
    return log


def injected(log: list[event_pb2.AgentEvent]) -> list[tuple[str, int]]:
    """The calls that have faults, by their arguments, and the number of each fault."""
    starts = [event.tool_started for event in having(log, "tool_started")]
    return sorted((start.call.arguments_json, start.fault_index) for start in starts if start.HasField("fault_index"))


def binomial_bounds(count: int, share: float, risk: float) -> tuple[int, int]:
    """The fewest and the most of so many draws that are exceeded with at most this probability on either side."""
    weights = [comb(count, drawn) * share**drawn * (1 - share) ** (count - drawn) for drawn in range(count + 1)]
    least = next(drawn for drawn in range(count + 1) if fsum(weights[: drawn + 1]) > risk)
    most = next(drawn for drawn in range(count, -1, -1) if fsum(weights[drawn:]) > risk)
    return least, most


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.97])
def test_the_share_of_the_calls_is_within_the_bounds_of_a_binomial(share: float) -> None:
    count, risk = 1_000, 1e-6
    keys = [f"s{number}.t0" for number in range(count)]
    drawn = [is_drawn("a seed", 0, key, share) for key in keys]
    least, most = binomial_bounds(count, share, risk)
    assert least <= sum(drawn) <= most
    assert drawn == [is_drawn("a seed", 0, key, share) for key in keys]
    assert drawn != [is_drawn("a seed", 1, key, share) for key in keys], "each fault has draws apart"
    assert drawn != [is_drawn("another", 0, key, share) for key in keys]


def test_a_share_of_1_has_every_call() -> None:
    assert all(is_drawn("a seed", 0, f"s{number}.m", 1) for number in range(1_000))


async def test_a_share_of_the_calls_fails_and_the_others_run(tmp_path: Path) -> None:
    async with team(tmp_path, MANY, look) as it:
        log = await run(it, case_of(faults=[fail("503 Service Unavailable", tool="look", share=0.3)], seed="one"))
        tree = await it.tree(log)
    failed = {result.call.arguments_json for result in results_of(log) if result.HasField("error")}
    assert failed == {arguments for arguments, _ in injected(log)}
    assert 0 < len(failed) < 20
    errors = [result.error for result in results_of(log) if result.HasField("error")]
    assert {(error.message, error.reason, error.agent) for error in errors} == {
        ("503 Service Unavailable", error_pb2.ERROR_REASON_TOOL_FAILED, "p")
    }
    assert {call.arguments_json for call in tree.tools if call.HasField("fault_index")} == failed
    assert len(tree.tools) == log[-1].run_completed.tree_usage.tool_calls == 20
    assert answer_of(log) == "Done."


async def test_the_first_fault_that_is_drawn_for_a_call_of_its_agent_is_injected(tmp_path: Path) -> None:
    faults = [
        fail(tool="look", agent="other"),
        EvalFault(tool="look", share=1, answer_json='{"error": "no such thing"}'),
        fail(tool="look"),
    ]
    async with team(tmp_path, [calls(call("look", what="leaf")), "Done."], look) as it:
        log = await run(it, case_of(mock("look", "mocked"), strict=True, faults=faults))
    (result,) = results_of(log)
    assert injected(log) == [('{"what": "leaf"}', 1)]
    assert [part.data_json for part in result.parts] == ['{"error": "no such thing"}']
    assert not having(log, "tool_started")[0].tool_started.HasField("mock_index")


async def test_a_failure_without_a_message_has_a_general_one_and_the_client_is_not_asked(tmp_path: Path) -> None:
    fault = EvalFault(tool="look", share=1, fail=AgentError(reason=error_pb2.ERROR_REASON_TOOL_TIMEOUT))
    async with team(tmp_path, [calls(call("look", what="leaf")), "Done."], scan) as it:
        (result,) = results_of(await run(it, case_of(faults=[fault])))
    assert (result.error.message, result.error.reason) == ("The tool look failed.", fault.fail.reason)


@pytest.mark.parametrize("is_mocked", [False, True])
async def test_a_delay_counts_towards_the_timeout_of_the_tool(tmp_path: Path, is_mocked: bool) -> None:
    turns = [calls(call("look", what="leaf")), "Done."]
    mocks = [mock("look", "leaf is red")] if is_mocked else []
    for seconds, waits, said in ((3, 3, "leaf is red"), (60, 5, "The tool look did not end within 5 s.")):
        clock, folder = HeldClock(), tmp_path / str(seconds)
        folder.mkdir()
        async with team(folder, turns, patient, clock=clock) as it:
            started = await it.start("p", case=case_of(*mocks, faults=[delay(seconds)]))
            assert await clock.next_sleep() == waits
            clock.advance(waits)
            log = await it.log(started)
        (result,) = results_of(log)
        assert (text_of(result) or result.error.message) == said
        assert injected(log) == [('{"what": "leaf"}', 0)]


async def test_the_draws_are_the_same_after_a_crash_at_any_event(tmp_path: Path) -> None:
    turns = [calls(call("look", what="leaf"), call("look", what="root"), call("look", what="moss")), "Done."]
    case = case_of(faults=[fail("down", tool="look", share=0.5), fail(model="default", share=0.5)], seed="two")
    (tmp_path / "whole").mkdir()
    async with team(tmp_path / "whole", turns, look) as it:
        origin = await run(it, case)
    assert 0 < len(injected(origin)) < 3
    for through in range(1, len(origin)):
        folder = tmp_path / str(through)
        cut_off(tmp_path / "whole", origin[:through], folder)
        async with team(folder, turns, look) as it:
            await it.runs.recover()
            log = await whole(it, run_of(origin))
        assert set(injected(log)) == set(injected(origin)), "a call that was running has its fault again"
        final = {result.call.arguments_json: result.error.message for result in results_of(log)}
        assert final == {result.call.arguments_json: result.error.message for result in results_of(origin)}


async def test_attempts_of_a_model_fail_as_rate_limited_and_are_tried_again(tmp_path: Path) -> None:
    once = RetryPolicy(retries=2, base=0.0, longest=0.0)
    async with open_team(tmp_path, script(p=["Done."]), llm("p"), retry=once) as it:
        log = await run(it, case_of(faults=[fail(model="default", share=0.5)], seed="4"))
        tree = await it.tree(log)
    retries = [event.llm_retrying for event in having(log, "llm_retrying")]
    assert retries, "the seed has a fault in the first attempt"
    for retry in retries:
        assert (retry.reason, retry.fault_index, retry.not_sent) == (
            event_pb2.RETRY_REASON_RATE_LIMITED,
            0,
            False,
        )
        assert (retry.error.reason, retry.error.provider_status) == (RATE_LIMITED, 429)
        assert retry.error.message == "The model 'default' is rate limited."
    assert answer_of(log) == "Done."
    assert [(fault.index, fault.count) for fault in tree.agents[0].model_faults] == [(0, len(retries))]
    assert log[-1].run_completed.tree_usage.model_calls == 1 + len(retries)


async def test_a_model_that_is_always_rate_limited_falls_back_or_fails(tmp_path: Path) -> None:
    once = RetryPolicy(retries=1, base=0.0, longest=0.0)
    options = {"retry": once, "fallbacks": {"a": ["b"]}, "scripts": {"b": script(p=["From b."])}}
    for faults, answer in (([fail(model="a")], "From b."), ([fail(model="a"), fail("Slow down.", model="b")], None)):
        folder = tmp_path / str(answer)
        folder.mkdir()
        async with open_team(folder, script(), llm("p", model="a"), **options) as it:  # type: ignore[arg-type]
            log = await run(it, case_of(faults=faults))
            tree = await it.tree(log)
        assert [event.llm_retrying.fault_index for event in having(log, "llm_retrying")][:2] == [0, 0]
        if answer is not None:
            assert answer_of(log) == answer
            continue
        (failed,) = having(log, "llm_failed")
        assert (failed.llm_failed.fault_index, failed.llm_failed.error.message) == (1, "Slow down.")
        assert [(fault.index, fault.count) for fault in tree.agents[0].model_faults] == [(0, 2), (1, 2)]


async def test_a_fork_that_brings_nothing_but_faults_has_the_mocks_of_its_origin(tmp_path: Path) -> None:
    turns = [calls(call("look", what="leaf")), calls(call("look", what="root")), "Done."]
    async with team(tmp_path, turns, scan) as it:
        origin = await run(it, case_of(mock("look", "mocked"), strict=True))
        after = having(origin, "tool_completed")[0].sequence
        fork = await it.fork(run_of(origin), after, case=case_of(faults=[fail("down", tool="look")]))
        log = await whole(it, fork)
        plain = await whole(it, await it.fork(run_of(origin), after))
    assert [text_of(result) or result.error.message for result in results_of(log)] == ["mocked", "down"]
    assert [text_of(result) for result in results_of(plain)] == ["mocked", "mocked"]


async def test_faults_that_cannot_be_injected_are_refused(tmp_path: Path) -> None:
    faults = [EvalFault(tool="look", share=2, delay=Duration(seconds=1)), EvalFault(model="default", share=1)]
    async with team(tmp_path, MANY, look) as it:
        with pytest.raises(InvalidRequest) as refused:
            await it.start("p", case=case_of(faults=faults))
    assert [violation.field for violation in refused.value.violations] == ["mocks.faults[0].share", "mocks.faults[1]"]
