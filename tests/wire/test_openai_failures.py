"""The real client against faults on the wire: each becomes one ModelError that says whether to try again."""

import asyncio

import pytest

from bough.v1 import error_pb2, event_pb2, step_pb2
from bough_server.models.endpoint import Timeouts
from tests.support.model_calls import answer, asking, failure
from tests.support.model_scenarios import refusing
from tests.support.model_server import serving_model
from tests.support.openai_models import OpenAIModel

UNAVAILABLE = error_pb2.ERROR_REASON_MODEL_UNAVAILABLE


def model_at(base_url: str, *, key: str = "", timeouts: Timeouts | None = None) -> OpenAIModel:
    return OpenAIModel(name="large", model="scenario-1", base_url=base_url, key=key, timeouts=timeouts)


async def test_a_rate_limit_says_when_to_come_back_and_the_next_call_may_succeed() -> None:
    async with serving_model("rate-limited-once") as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        assert error.retry_after == 1.0
        await answer(model, asking())
        await model.close()


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
