"""Mocks in forks: those of the origin apply again, those that a case brings replace them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bough import tool_outcome
from bough.v1 import event_pb2, execution_pb2, input_pb2
from bough_server.errors import ForkRefused
from bough_server.tools.tool import Tool, tool
from tests.support.fork_agents import World, open_forked, place, run_of
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.payment_agents import PAY, Till, team, waiting, whole
from tests.support.run_harness import ME
from tests.support.teams import call, calls
from tests.support.tool_mocks import TURN, case_of, mock


@tool(execution="client")
def scan(page: int) -> str:
    """Scans in the client."""
    raise AssertionError("the client scans")


def said(log: Sequence[event_pb2.AgentEvent], name: str = "look") -> list[str]:
    """What calls of a tool were answered, in the order of their agents."""
    results = [result for result in results_of(log) if result.call.name == name]
    return [text_of(result) for result in sorted(results, key=lambda result: result.agent)]


async def test_a_fork_from_every_sequence_is_answered_by_the_mocks_of_its_origin(tmp_path: Path) -> None:
    world = World()
    case = case_of(mock("look", "c's", agent="c"), mock("look", "p's"))
    async with open_forked(tmp_path, world) as it:
        origin = await it.log(await it.start("p", case=case))
        for after in range(1, len(origin)):
            fork = await it.log(await it.fork(run_of(origin), after))
            await check_replay(it, fork)
            forked = fork[after].run_forked
            assert (said(fork), answer_of(fork)) == (["c's", "p's"], "Done.")
            assert (forked.HasField("evaluation"), forked.HasField("mocks")) == (False, False)
    assert world.looked.total() == 0


async def test_the_last_fork_that_brings_mocks_replaces_all_before_it(tmp_path: Path) -> None:
    world = World()
    async with open_forked(tmp_path, world) as it:
        origin = await it.turn("p")
        first = await it.fork(run_of(origin), 1, case=case_of(mock("look", "first")))
        first_log = await it.log(first)
        second = await it.fork(first, place(first_log, "run_forked"), case=case_of(mock("look", "second", agent="c")))
        second_log = await it.log(second)
        third_log = await it.log(await it.fork(second, place(second_log, "run_forked", 1)))
        none = await it.log(await it.fork(first, place(first_log, "run_forked"), case=case_of()))
        for log in (first_log, second_log, third_log, none):
            await check_replay(it, log)
    forked = having(first_log, "run_forked")[0].run_forked
    assert forked.evaluation == TURN
    assert said(first_log) == ["first", "first"]
    assert said(second_log) == said(third_log) == ["second", "leaf is red"]
    assert said(none) == ["root is red", "leaf is red"]


async def test_a_used_request_id_returns_the_earlier_fork_whatever_the_case(tmp_path: Path) -> None:
    async with open_forked(tmp_path, World()) as it:
        origin = await it.turn("p")
        first = await it.fork(run_of(origin), 1, request_id="once", case=case_of(mock("look", "first")))
        again = await it.fork(run_of(origin), 1, request_id="once", case=case_of(mock("look", "second")))
        log = await it.log(first)
    assert (again.run_id, said(log)) == (first.run_id, ["first", "first"])


@pytest.mark.parametrize("rule", ["fail", "ask"])
async def test_a_tool_that_was_open_is_answered_by_a_mock_whatever_its_rule_for_recovery(
    tmp_path: Path, rule: str
) -> None:
    till = Till()
    tools: list[Tool] = [till.pay(on_recovery=rule)]
    async with team(tmp_path, PAY, *tools) as it:
        origin = await it.turn("p")
        begun = place(origin, "tool_started")
        with pytest.raises(ForkRefused):
            await it.fork(run_of(origin), begun)
        with pytest.raises(ForkRefused):
            await it.fork(run_of(origin), begun, case=case_of(mock("pay", "other", amount=8)))
        log = await whole(it, await it.fork(run_of(origin), begun, case=case_of(mock("pay", "mocked", amount=7))))
        strict = await whole(it, await it.fork(run_of(origin), begun, case=case_of(strict=True)))
    assert (till.paid, said(log, "pay")) == ([7], ["mocked"])
    assert [result.error.message.startswith("No mock answers") for result in results_of(strict)] == [True]


async def test_a_tool_that_asked_after_a_crash_is_answered_by_a_mock_of_a_fork(tmp_path: Path) -> None:
    till = Till()
    tools: list[Tool] = [till.pay(waits=True, on_recovery="ask")]
    async with team(tmp_path, PAY, *tools) as it:
        origin = await it.start("p")
        await till.began.wait()
        await it.crash()
    async with team(tmp_path, PAY, *tools) as it:
        await it.runs.recover()
        (request,) = (await waiting(it, origin)).values()
        asked = (await it.runs.get(ME, origin.run_id)).run.last_sequence
        log = await whole(it, await it.fork(origin, asked, case=case_of(mock("pay", "mocked"))))
        row = (await it.runs.get(ME, log[0].run_id)).run
    assert request.kind == input_pb2.INPUT_KIND_RECOVERY
    assert (till.paid, said(log, "pay")) == ([], ["mocked"])
    assert (row.state, list(row.open_requests)) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, [])


async def test_a_fork_without_the_mock_of_a_client_s_open_call_asks_the_client(tmp_path: Path) -> None:
    turns = [calls(call("scan", page=1)), "Done."]
    async with team(tmp_path, turns, scan) as it:
        origin = await it.log(await it.start("p", case=case_of(mock("scan", "mocked"))))
        fork = await it.fork(run_of(origin), place(origin, "tool_started"), case=case_of())
        request = (await waiting(it, fork))["scan"]
        await it.crash()
    async with team(tmp_path, turns, scan) as it:
        await it.runs.recover()
        await it.resume(fork, tool_outcome(request, "from the client"))
        log = await whole(it, fork)
    assert (said(origin, "scan"), said(log, "scan")) == (["mocked"], ["from the client"])
    assert len(having(log, "tool_started")) == len(having(log, "input_requested")) == 1
    assert log[-1].run_completed.tree_usage.tool_calls == 1


async def test_a_server_that_takes_a_run_over_answers_by_its_mocks(tmp_path: Path) -> None:
    till = Till()
    asks = [calls(call("pay", amount=7), call("scan", page=1)), calls(call("pay", amount=8)), "Done."]
    async with team(tmp_path, asks, till.pay(), scan) as it:
        run = await it.start("p", case=case_of(mock("pay", "mocked")))
        request = (await waiting(it, run))["scan"]
        await it.crash()
    async with team(tmp_path, asks, till.pay(), scan, worker="another") as it:
        await it.resume(run, tool_outcome(request, "a page"))
        log = await whole(it, run)
    assert (till.paid, said(log, "pay")) == ([], ["mocked", "mocked"])
    assert having(log, "run_resumed")[0].run_resumed.owner == "another"
