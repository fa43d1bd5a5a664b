"""Models behind an open circuit breaker or at their rate limits, on the wire and in runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bough.v1 import error_pb2, event_pb2, model_pb2
from bough_server.models.config import ModelSection
from bough_server.models.model import Model
from bough_server.models.registry import build_models
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.model_calls import answer, asking, failure
from tests.support.model_scenarios import TEXT, Reply, Request, Scenario, plain, refusing, scenario
from tests.support.model_server import ModelServer, serving_model
from tests.support.run_harness import ME, open_harness
from tests.support.teams import llm


class Moody:
    """Fails until it is told to be well."""

    def __init__(self, fault: Reply) -> None:
        self.fault = fault
        self.is_well = False

    def __call__(self, request: Request) -> Reply:
        return plain(request) if self.is_well else self.fault


@asynccontextmanager
async def configured(
    folder: Path, answering: Scenario, **facts: object
) -> AsyncIterator[tuple[Model, ModelServer, HeldClock]]:
    """A configured model at a server, on a clock that stands still."""
    clock = HeldClock()
    async with serving_model(answering) as server:
        section = {"provider": "openai", "model": "scenario-1", "base_url": server.base_url, **facts}
        models = build_models({"large": ModelSection.model_validate(section)}, secrets={}, folder=folder, clock=clock)
        try:
            yield models.get("large"), server, clock
        finally:
            await models.close()


async def test_a_model_that_fails_again_and_again_is_not_asked_until_its_cooldown_is_over(tmp_path: Path) -> None:
    moody = Moody(refusing(500, "Overloaded."))
    async with configured(tmp_path, moody, breaker={"failures": 2, "cooldown": 30.0}) as (model, server, clock):
        for _ in range(2):
            await failure(model, asking())
        _, error = await failure(model, asking())
        assert server.count == 2
        assert (error.reason, error.retry) == (
            error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
            event_pb2.RETRY_REASON_CIRCUIT_OPEN,
        )
        assert (error.retryable, "circuit breaker is open: for 30 more seconds" in error.message) == (True, True)
        clock.advance(30.0)
        moody.is_well = True
        await answer(model, asking())
        await answer(model, asking())
        assert server.count == 4


async def test_a_model_is_left_alone_after_five_failures_where_the_configuration_does_not_say(tmp_path: Path) -> None:
    async with configured(tmp_path, Moody(refusing(503, "Away."))) as (model, server, _):
        for _ in range(6):
            await failure(model, asking())
        assert server.count == 5


async def test_refusals_and_limited_rates_are_answers_and_open_nothing(tmp_path: Path) -> None:
    for fault in (refusing(401, "No key."), refusing(429, "Slow down.")):
        async with configured(tmp_path, Moody(fault), breaker={"failures": 1}) as (model, server, _):
            for _ in range(3):
                await failure(model, asking())
            assert server.count == 3


async def test_calls_that_wait_for_a_place_do_not_ask_a_model_that_fails_meanwhile(tmp_path: Path) -> None:
    async with configured(
        tmp_path, Moody(refusing(500, "Overloaded.")), breaker={"failures": 1}, max_concurrency=1
    ) as (model, server, _):
        failures = await asyncio.gather(*(failure(model, asking()) for _ in range(10)))
        assert server.count == 1
    retries = [error.retry for _, error in failures]
    assert retries.count(event_pb2.RETRY_REASON_CIRCUIT_OPEN) == 9


async def test_an_open_breaker_hands_the_call_on_at_once_and_replay_asks_no_breaker(tmp_path: Path) -> None:
    async with serving_model(scenario("server-error")) as here, serving_model("plain") as there:
        facts = {"provider": "openai", "model": "scenario-1", "retries": 2}
        breaker = {"failures": 1, "cooldown": 60.0}
        one = {**facts, "base_url": here.base_url, "fallbacks": ["two"], "breaker": breaker}
        two = {**facts, "base_url": there.base_url}
        configs = {"one": ModelSection.model_validate(one), "two": ModelSection.model_validate(two)}
        clock = HeldClock()
        models = build_models(configs, secrets={}, folder=tmp_path, clock=clock)
        async with open_harness(tmp_path, models=models, definitions=[llm("p", model="one")], clock=clock) as harness:
            first = await harness.start("p")
            clock.advance(await clock.next_sleep())
            opening = await harness.log(first)
            quick = await harness.turn("p")
            await check_replay(harness, quick)
        await models.close()
        assert here.count == 1
    said = [(each.llm_retrying.reason, each.llm_retrying.next_model) for each in having(opening, "llm_retrying")]
    shut = event_pb2.RETRY_REASON_CIRCUIT_OPEN
    assert said == [(event_pb2.RETRY_REASON_PROVIDER_ERROR, "one"), (shut, "two")]
    (retry,) = having(quick, "llm_retrying")
    assert (retry.llm_retrying.reason, retry.llm_retrying.next_model, retry.llm_retrying.not_sent) == (
        shut,
        "two",
        True,
    )
    assert (answer_of(opening), answer_of(quick), quick[-1].run_completed.usage.model_calls) == (TEXT, TEXT, 1)


async def test_requests_wait_until_the_minute_has_room_first_in_first_out(tmp_path: Path) -> None:
    async with configured(tmp_path, plain, requests_per_minute=2, max_wait=600.0) as (model, server, clock):
        calls = [asyncio.create_task(answer(model, asking())) for _ in range(4)]
        await asyncio.wait(calls[:2])
        assert (server.count, [call.done() for call in calls]) == (2, [True, True, False, False])
        clock.advance(await clock.next_sleep())
        await asyncio.wait(calls)
        assert server.count == 4


async def test_a_request_whose_turn_would_come_too_late_fails_at_once(tmp_path: Path) -> None:
    async with configured(tmp_path, plain, requests_per_minute=1, max_wait=10.0) as (model, server, _):
        await answer(model, asking())
        _, error = await failure(model, asking())
        assert server.count == 1
    assert (error.reason, error.retry) == (
        error_pb2.ERROR_REASON_MODEL_RATE_LIMITED,
        event_pb2.RETRY_REASON_RATE_LIMITED,
    )
    assert "would wait 60 seconds" in error.message


async def test_tokens_are_estimated_before_and_counted_as_the_provider_reports_them(tmp_path: Path) -> None:
    settings = model_pb2.ModelSettings(max_output_tokens=90)
    async with configured(tmp_path, plain, tokens_per_minute=170) as (model, server, clock):
        await answer(model, asking(settings=settings))  # estimated at 96, reported as 70
        await answer(model, asking(settings=settings))  # 96 fit beside 70, and not beside 96
        waiting = asyncio.create_task(answer(model, asking(settings=settings)))
        assert await clock.next_sleep() == 60.0
        assert server.count == 2
        clock.advance(60.0)
        await waiting
        assert server.count == 3


async def test_a_run_is_cancelled_while_its_call_waits_for_its_turn_and_counts_no_call(tmp_path: Path) -> None:
    async with serving_model("plain") as server:
        clock = HeldClock()
        section = {"provider": "openai", "model": "m", "base_url": server.base_url, "requests_per_minute": 1}
        models = build_models({"m": ModelSection.model_validate(section)}, secrets={}, folder=tmp_path, clock=clock)
        async with open_harness(tmp_path, models=models, definitions=[llm("p", model="m")], clock=clock) as harness:
            await harness.turn("p")
            run = await harness.start("p")
            await clock.next_sleep()
            await harness.runs.cancel(ME, run.run_id)
            log = await harness.log(run)
            tree = await harness.tree(log)
            await check_replay(harness, log)
        await models.close()
        assert server.count == 1
    assert having(log, "llm_failed")[0].llm_failed.not_sent
    assert (log[-1].run_cancelled.usage.model_calls, tree.agents[0].usage.model_calls) == (0, 0)
