"""Calls that were running when their server was lost: run again, failed, or asked about."""

from pathlib import Path

import pytest

from bough import approve, refuse, tool_outcome
from bough.v1 import error_pb2, input_pb2, message_pb2, run_pb2
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import Tool
from tests.support.log_readings import answer_of, having, results_of, text_of
from tests.support.payment_agents import PAY, Till, team, waiting, whole

Request = input_pb2.InputRequest
Run = run_pb2.Run


async def lost(folder: Path, till: Till, *tools: Tool) -> Run:
    """A run whose server is lost while its tool runs."""
    async with team(folder, PAY, *tools) as it:
        run = await it.start("p")
        await till.began.wait()
        await it.crash()
    till.began.clear()
    till.go_on.set()
    return run


async def test_a_call_that_was_running_is_run_again_under_its_key(tmp_path: Path) -> None:
    till = Till()
    tools = [till.pay(waits=True)]
    run = await lost(tmp_path, till, *tools)
    async with team(tmp_path, PAY, *tools) as it:
        await it.runs.recover()
        log = await whole(it, run)
    assert (till.paid, len(till.keys), len(set(till.keys))) == ([7], 2, 1)
    assert [event.attempt for event in having(log, "tool_started")] == [1, 2]
    assert log[-1].run_completed.tree_usage.tool_calls == 1


async def test_a_call_that_was_running_and_must_not_run_twice_fails(tmp_path: Path) -> None:
    till = Till()
    tools = [till.pay(waits=True, on_recovery="fail")]
    run = await lost(tmp_path, till, *tools)
    async with team(tmp_path, PAY, *tools) as it:
        await it.runs.recover()
        log = await whole(it, run)
    assert (till.paid, len(till.keys), answer_of(log)) == ([], 1, "Done.")
    assert results_of(log)[0].error.reason == error_pb2.ERROR_REASON_TOOL_OUTCOME_UNKNOWN


@pytest.mark.parametrize("said", ["again", "edited", "no", "result", "error"])
@pytest.mark.parametrize("crashes", [False, True])
async def test_an_answer_decides_about_a_call_that_was_running(tmp_path: Path, said: str, crashes: bool) -> None:
    till, heard = Till(), list[ModelRequest]()
    tools = [till.pay(waits=True, on_recovery="ask")]
    run = await lost(tmp_path, till, *tools)
    if crashes:
        async with team(tmp_path, PAY, *tools) as it:
            await it.runs.recover()
            await waiting(it, run)
    async with team(tmp_path, PAY, *tools, heard=heard) as it:
        await it.runs.recover()
        request = (await waiting(it, run))["pay"]
        failed = message_pb2.ToolFailure(message="it broke")
        answers = {
            "again": approve(request),
            "edited": approve(request, arguments_json='{"amount": 3}'),
            "no": refuse(request, note="twice is too much"),
            "result": tool_outcome(request, "paid before"),
            "error": tool_outcome(request, failed),
        }
        await it.resume(run, answers[said])
        log = await whole(it, run)
    assert request.kind == input_pb2.INPUT_KIND_RECOVERY
    assert len(having(log, "input_requested")) == 1
    (result,) = results_of(log)
    told = {"again": "paid 7", "edited": "paid 3", "result": "paid before"}.get(said, "")
    assert text_of(result) == told
    assert till.paid == {"again": [7], "edited": [3]}.get(said, [])
    assert len(set(till.keys)) == 1
    attempts = [1, 2] if said in ("again", "edited") else [1]
    assert [event.attempt for event in having(log, "tool_started")] == attempts
    end = (having(log, "tool_completed") or having(log, "tool_failed"))[0]
    assert end.attempt == attempts[-1]
    assert len(heard) == 1
    assert log[-1].run_completed.tree_usage.tool_calls == 1
    if said == "no":
        assert result.error.reason == error_pb2.ERROR_REASON_NOT_APPROVED
        assert "twice is too much" in result.error.message


async def test_what_was_run_again_with_other_arguments_and_lost_again_keeps_them(tmp_path: Path) -> None:
    till = Till()
    tools = [till.pay(waits=True, on_recovery="ask")]
    run = await lost(tmp_path, till, *tools)
    till.go_on.clear()
    async with team(tmp_path, PAY, *tools) as it:
        await it.runs.recover()
        request = (await waiting(it, run))["pay"]
        await it.resume(run, approve(request, arguments_json='{"amount": 3}'))
        await till.began.wait()
    till.go_on.set()
    async with team(tmp_path, PAY, *tools) as it:
        await it.runs.recover()
        again = (await waiting(it, run, 2))["pay"]
        assert (again.input_id != request.input_id, again.call.arguments_json) == (True, '{"amount": 3}')
        await it.resume(run, approve(again))
        log = await whole(it, run)
    assert (till.paid, len(set(till.keys))) == ([3], 1)
    assert [event.attempt for event in having(log, "tool_started")] == [1, 2, 3]
