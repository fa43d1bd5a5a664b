"""The real client against faults on the wire: each becomes one ModelError that says whether to try again."""

import asyncio

import pytest

from bough.v1 import error_pb2, event_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.endpoint import Timeouts
from tests.support.model_calls import answer, asking, failure, text_of
from tests.support.model_scenarios import refusing
from tests.support.model_server import serving_model
from tests.support.openai_models import OpenAIModel

UNAVAILABLE = error_pb2.ERROR_REASON_MODEL_UNAVAILABLE
BAD_RESPONSE = error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE
TIMEOUT = error_pb2.ERROR_REASON_MODEL_TIMEOUT
FIRST_WORDS = "word0 word1 word2 "


def model_at(base_url: str, *, key: str = "", timeouts: Timeouts | None = None) -> OpenAIModel:
    return OpenAIModel(name="large", model="scenario-1", base_url=base_url, key=key, timeouts=timeouts)


@pytest.mark.parametrize(
    ("scenario", "reason", "retry", "text", "said"),
    [
        (
            "rate-limited",
            error_pb2.ERROR_REASON_MODEL_RATE_LIMITED,
            event_pb2.RETRY_REASON_RATE_LIMITED,
            "",
            "Slow down.",
        ),
        ("out-of-quota", error_pb2.ERROR_REASON_MODEL_QUOTA_EXCEEDED, None, "", "You exceeded your quota."),
        ("server-error", UNAVAILABLE, event_pb2.RETRY_REASON_PROVIDER_ERROR, "", "The server had an error."),
        ("unauthorized", error_pb2.ERROR_REASON_MODEL_AUTHENTICATION, None, "", "Incorrect API key provided: ***"),
        ("garbage", BAD_RESPONSE, event_pb2.RETRY_REASON_BAD_RESPONSE, "", "not JSON"),
        ("page", BAD_RESPONSE, event_pb2.RETRY_REASON_BAD_RESPONSE, "", "before its answer was complete"),
        ("cut", BAD_RESPONSE, event_pb2.RETRY_REASON_BAD_RESPONSE, FIRST_WORDS, "before its answer was complete"),
        ("error-event", UNAVAILABLE, event_pb2.RETRY_REASON_PROVIDER_ERROR, FIRST_WORDS, "The model crashed."),
        ("drop", UNAVAILABLE, event_pb2.RETRY_REASON_TRANSPORT, FIRST_WORDS, "could not be reached"),
        ("drop-before-answer", UNAVAILABLE, event_pb2.RETRY_REASON_TRANSPORT, "", "could not be reached"),
    ],
)
async def test_a_fault_on_the_wire_is_a_model_error_that_says_whether_to_try_again(
    scenario: str,
    reason: error_pb2.ErrorReason.ValueType,
    retry: event_pb2.RetryReason.ValueType | None,
    text: str,
    said: str,
) -> None:
    async with serving_model(scenario) as server:
        model = model_at(server.base_url)
        deltas, error = await failure(model, asking())
        await model.close()
        assert server.count == 1
    assert (error.reason, error.retry, text_of(deltas)) == (reason, retry, text)
    assert "'large'" in error.message
    assert said in error.message


async def test_a_rate_limit_says_when_to_come_back_and_the_next_call_may_succeed() -> None:
    async with serving_model("rate-limited-once") as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        assert error.retry_after == 1.0
        await answer(model, asking())
        await model.close()


async def test_usage_that_was_reported_before_a_failure_is_not_lost() -> None:
    async with serving_model("cut-after-usage") as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        await model.close()
    assert error.lost_usage == usage_pb2.Usage(
        input_tokens=20, cached_input_tokens=5, output_tokens=50, reasoning_tokens=3, total_tokens=70
    )


async def test_usage_that_was_never_reported_is_none() -> None:
    async with serving_model("cut") as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        await model.close()
    assert error.lost_usage is None


async def test_an_answer_that_does_not_begin_is_a_timeout() -> None:
    async with serving_model("slow-start") as server:
        model = model_at(server.base_url, timeouts=Timeouts(start=0.5, idle=60))
        _, error = await failure(model, asking())
        await server.left.wait()
        await model.close()
    assert (error.reason, error.retry) == (TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT)
    assert "sent no response for 0.5 seconds" in error.message


async def test_an_answer_that_pauses_too_long_is_a_timeout() -> None:
    async with serving_model("stall") as server:
        model = model_at(server.base_url, timeouts=Timeouts(start=60, idle=0.5))
        deltas, error = await failure(model, asking())
        await server.left.wait()
        await model.close()
    assert (error.reason, error.retry) == (TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT)
    assert text_of(deltas) == FIRST_WORDS


async def test_the_idle_timeout_stops_while_nobody_reads() -> None:
    async with serving_model("plain", delta_interval=0.005) as server:
        model = model_at(server.base_url, timeouts=Timeouts(start=60, idle=0.3))
        read_on = asyncio.Event()
        items = []
        async for item in model.stream(asking()):
            items.append(item)
            if len(items) == 1:
                asyncio.get_running_loop().call_later(0.6, read_on.set)
                await read_on.wait()
        await model.close()
    assert len(items) > 2
    assert isinstance(items[-1], step_pb2.LlmResponse)


async def test_a_port_where_nobody_listens_is_a_transport_error() -> None:
    async with serving_model("plain") as server:
        base_url = server.base_url
    model = model_at(base_url)
    _, error = await failure(model, asking())
    await model.close()
    assert (error.reason, error.retry) == (UNAVAILABLE, event_pb2.RETRY_REASON_TRANSPORT)


@pytest.mark.parametrize("base_url", ["not a url", "ftp://127.0.0.1/v1", "http://"])
async def test_an_address_that_is_none_is_a_model_error(base_url: str) -> None:
    model = model_at(base_url)
    _, error = await failure(model, asking())
    await model.close()
    assert error.reason == UNAVAILABLE


async def test_a_missing_key_says_what_to_do_and_asks_nobody() -> None:
    async with serving_model("plain") as server:
        model = OpenAIModel(name="large", model="m", base_url=server.base_url, missing_key="DESK_KEY is not set.")
        _, error = await failure(model, asking())
        await model.close()
        assert server.count == 0
    assert (error.reason, error.retry) == (UNAVAILABLE, None)
    assert error.message == "The model 'large' has no key: DESK_KEY is not set."


async def test_a_key_that_the_provider_repeats_is_masked() -> None:
    key = "not-shaped-like-a-key"
    async with serving_model(lambda request: refusing(401, f"Bad key: {key}.")) as server:
        model = model_at(server.base_url, key=key)
        _, error = await failure(model, asking())
        await model.close()
    assert error.message == f"The model 'large' at {server.base_url} refused with status 401: Bad key: ***."
    assert key not in repr(error)
    assert key not in repr(model)


async def test_a_key_beside_a_password_in_the_address_is_a_model_error_without_either() -> None:
    async with serving_model("plain") as server:
        model = model_at(server.base_url.replace("://", "://user:hidden-password@"), key="not-shaped-like-a-key")
        _, error = await failure(model, asking())
        await model.close()
        assert server.count == 0
    assert (error.reason, error.retry) == (UNAVAILABLE, None)
    assert "hidden-password" not in error.message
    assert "not-shaped-like-a-key" not in error.message


async def test_settings_that_cannot_be_sent_ask_nobody() -> None:
    async with serving_model("plain") as server:
        model = model_at(server.base_url)
        settings = model_pb2.ModelSettings(extra_json='{"model": "another", "seed": 1}')
        _, error = await failure(model, asking(settings=settings))
        await model.close()
        assert server.count == 0
    assert (error.retry, "may not set model" in error.message) == (None, True)
