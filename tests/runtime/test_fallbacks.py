"""Model calls that go on with another model: who answers, in what order, at whose price, and over crashes."""

import asyncio
from pathlib import Path

from bough.v1 import error_pb2, event_pb2, usage_pb2
from bough_server.models.model import ModelRequest, RetryPolicy
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, llm, open_team, script

USED = {"input_tokens": 10, "output_tokens": 2}
AT_ONCE = RetryPolicy(retries=0, base=0.0, longest=0.0)


def failing(reason: str, **facts: object) -> str:
    """The script of a model that says a word and fails."""
    return script(p=[{"text": "half an answer", "error": {"reason": reason, "after_chunks": 1, **facts}}])


async def test_a_call_whose_retries_are_used_up_goes_on_with_the_next_model_in_mid_stream(tmp_path: Path) -> None:
    told = script(p=[{"text": "Whole from b.", "usage": USED}])
    scripts = {"a": failing("PROVIDER_ERROR", usage={"input_tokens": 7, "output_tokens": 1}), "b": told}
    async with open_team(tmp_path, told, llm("p", model="a"), fallbacks={"a": ["b"]}, scripts=scripts) as harness:
        log = await harness.turn("p")
        entries = await harness.store.usage.list_for_run(log[0].run_id)
        tree = await harness.tree(log, include_steps=True)
        await check_replay(harness, log)
    retries = [(event.attempt, event.llm_retrying) for event in having(log, "llm_retrying")]
    assert [(attempt, retrying.next_model) for attempt, retrying in retries] == [(2, "a"), (3, "a"), (4, "b")]
    assert {retrying.reason for _, retrying in retries} == {event_pb2.RETRY_REASON_PROVIDER_ERROR}
    assert retries[-1][1].delay.ToNanoseconds() == 0
    completed = having(log, "llm_completed")[0]
    assert (completed.attempt, answer_of(log)) == (4, "Whole from b.")
    response = completed.llm_completed.response
    assert (response.provider, response.model) == ("scripted", "b-1")
    deltas = {event.attempt: "" for event in having(log, "llm_output_text_delta")}
    for event in having(log, "llm_output_text_delta"):
        deltas[event.attempt] += event.llm_output_text_delta.text
    assert deltas == {1: "half ", 2: "half ", 3: "half ", 4: "Whole from b."}
    assert [(entry.model, entry.usage.input_tokens) for entry in entries] == [("a", 7)] * 3 + [("b", 10)]
    assert log[-1].run_completed.usage.model_calls == 4
    assert tree.agents[0].usage == log[-1].run_completed.usage
    assert [(step.attempt, step.llm_response.model) for step in tree.steps] == [(4, "b-1")]


async def test_a_refusal_that_no_retry_heals_goes_on_with_another_model_at_once(tmp_path: Path) -> None:
    scripts = {"a": failing("UNAVAILABLE", message="The key is wrong.")}
    said = script(p=["Done."])
    async with open_team(tmp_path, said, llm("p", model="a"), fallbacks={"a": ["b"]}, scripts=scripts) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    (event,) = having(log, "llm_retrying")
    assert (event.llm_retrying.reason, event.llm_retrying.next_model) == (event_pb2.RETRY_REASON_REFUSED, "b")
    assert event.llm_retrying.error.message == "The model 'a' failed: The key is wrong."
    assert answer_of(log) == "Done."


async def test_every_model_has_its_own_retries_and_the_last_ones_error_is_the_calls(tmp_path: Path) -> None:
    scripts = {name: failing("TIMEOUT", message=f"{name} sleeps.") for name in "abc"}
    fallbacks = {"a": ["b", "c"]}
    once = RetryPolicy(retries=1, base=0.0, longest=0.0)
    async with open_team(
        tmp_path, script(), llm("p", model="a"), fallbacks=fallbacks, scripts=scripts, retry=once
    ) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    order = [event.llm_retrying.next_model for event in having(log, "llm_retrying")]
    assert order == ["a", "b", "b", "c", "c"]
    error = log[-1].run_failed.error
    assert (error.reason, error.message) == (error_pb2.ERROR_REASON_MODEL_TIMEOUT, "The model 'c' failed: c sleeps.")
    assert (having(log, "llm_failed")[0].attempt, log[-1].run_failed.usage.model_calls) == (6, 6)


async def test_delays_begin_anew_with_each_model(tmp_path: Path) -> None:
    clock = HeldClock()
    scripts = {"a": failing("TRANSPORT"), "b": failing("TRANSPORT", times=2)}
    patient = RetryPolicy(retries=2, base=2.0, longest=60.0)
    async with open_team(
        tmp_path,
        script(),
        llm("p", model="a"),
        fallbacks={"a": ["b"]},
        scripts=scripts,
        retry=patient,
        clock=clock,
    ) as harness:
        run = await harness.start("p")
        slept = []
        for _ in range(4):
            slept.append(await clock.next_sleep())
            clock.advance(slept[-1])
        log = await harness.log(run)
    bounds = [(1.0, 2.0), (2.0, 4.0)] * 2
    assert all(low <= delay <= high for delay, (low, high) in zip(slept, bounds, strict=True))
    assert answer_of(log) == "half an answer"


async def test_an_answer_that_is_too_long_is_not_asked_of_another_model(tmp_path: Path) -> None:
    scripts = {"a": script(p=[{"chunks": ["x" * 600_000]}])}
    said = script(p=["Done."])
    async with open_team(tmp_path, said, llm("p", model="a"), fallbacks={"a": ["b"]}, scripts=scripts) as harness:
        log = await harness.turn("p")
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE
    assert having(log, "llm_retrying") == []


async def test_calls_of_a_model_that_failed_leave_no_ids_behind(tmp_path: Path) -> None:
    turn = calls(call("call_c", message="x"))
    scripts = {"a": script(p=[{**turn, "error": {"reason": "UNAVAILABLE", "after_chunks": 2}}])}
    said = script(p=[turn, "Done."], c=["c"])
    team = (llm("p", model="a", links=["c"]), llm("c"))
    async with open_team(tmp_path, said, *team, fallbacks={"a": ["b"]}, scripts=scripts) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    ids = [event.tool_started.call.call_id for event in having(log, "tool_started")]
    assert ids == ["call_0_0"]


async def test_after_a_crash_the_call_goes_on_with_the_model_of_its_last_attempt_and_its_tries(tmp_path: Path) -> None:
    arrived, never = asyncio.Event(), asyncio.Event()
    asked: list[str] = []

    async def hold(agent: str, place: int, piece: int) -> None:
        asked.append(agent)
        if len(asked) == 3:
            arrived.set()
            await never.wait()

    scripts = {"a": failing("PROVIDER_ERROR"), "b": failing("PROVIDER_ERROR"), "c": script(p=["From c."])}
    team = {"fallbacks": {"a": ["b", "c"]}, "scripts": scripts}
    once = RetryPolicy(retries=1, base=0.0, longest=0.0)
    async with open_team(tmp_path, script(), llm("p", model="a"), gate=hold, retry=once, **team) as harness:
        run = await harness.start("p")
        await arrived.wait()
        await harness.crash()
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, script(), llm("p", model="a"), heard=heard, retry=once, **team) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    began = [(e.attempt, e.llm_retrying.next_model, e.llm_retrying.reason) for e in having(log, "llm_retrying")]
    failed, lost = event_pb2.RETRY_REASON_PROVIDER_ERROR, event_pb2.RETRY_REASON_RECOVERED
    assert began == [(2, "a", failed), (3, "b", failed), (4, "b", lost), (5, "c", failed)]
    assert (len(heard), answer_of(log)) == (2, "From c.")


async def test_a_run_that_is_cancelled_while_another_model_answers_is_charged_to_that(tmp_path: Path) -> None:
    arrived, never = asyncio.Event(), asyncio.Event()

    async def hold(agent: str, place: int, piece: int) -> None:
        if piece == 1:
            arrived.set()
            await never.wait()

    scripts = {"a": failing("UNAVAILABLE"), "b": script(p=[{"text": "a b", "usage": USED}])}
    async with open_team(
        tmp_path, script(), llm("p", model="a"), fallbacks={"a": ["b"]}, scripts=scripts, gate=hold
    ) as harness:
        run = await harness.start("p")
        await arrived.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        entries = await harness.store.usage.list_for_run(run.run_id)
        await check_replay(harness, log)
    assert [(entry.model, entry.usage.input_tokens) for entry in entries] == [("a", 0), ("b", 10)]
    assert names(log)[-1] == "p: run.cancelled"
    assert log[-1].run_cancelled.usage == usage_pb2.Usage(
        input_tokens=10,
        output_tokens=2,
        model_calls=2,
        model_calls_without_usage=1,
        model_calls_without_cost=1,
        cost_nanos=14_000,
        currency_code="USD",
    )


async def test_a_run_names_the_fallbacks_of_its_models_among_what_it_began_with(tmp_path: Path) -> None:
    said = script(p=["Done."])
    fallbacks = {"a": ["b", "c"]}
    async with open_team(tmp_path, said, llm("p", model="a"), fallbacks=fallbacks) as harness:
        log = await harness.turn("p")
    assert sorted(log[0].run_started.versions.models) == ["a", "b", "c"]
