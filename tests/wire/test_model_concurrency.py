"""Many calls at once against a model that takes few: how many are in flight, and who is next."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import TextDelta
from tests.support.model_calls import answer, asking, failure, user
from tests.support.model_scenarios import TEXT, Reply, Request, plain, scenario
from tests.support.model_server import ModelServer, serving_model
from tests.support.openai_models import OpenAIModel


class Arrivals:
    """Fifty words for everybody, and who asked, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, request: Request) -> Reply:
        self.numbers.append(int(request["messages"][-1]["content"]))
        return plain(request)


@asynccontextmanager
async def limited(most: int, server: ModelServer) -> AsyncIterator[OpenAIModel]:
    """A model that takes so many calls at once."""
    limiter = ModelLimiter(max_concurrency=most)
    model = OpenAIModel(name="large", model="scenario-1", base_url=server.base_url, limiter=limiter)
    try:
        yield model
    finally:
        await model.close()


async def said(model: OpenAIModel, number: int) -> str:
    """The text of one call."""
    _, response = await answer(model, asking(user(str(number))))
    return response.message.parts[0].text


async def test_of_two_hundred_calls_no_more_than_four_are_in_flight_and_none_overtakes_those_before_it() -> None:
    arrivals = Arrivals()
    async with serving_model(arrivals, delta_interval=0.0001) as server, limited(4, server) as model:
        texts = await asyncio.gather(*(said(model, number) for number in range(200)))
        assert (texts, server.count, server.most_open) == ([TEXT] * 200, 200, 4)
    assert sorted(arrivals.numbers) == list(range(200))
    # Of those in flight together, which arrives first is the network's choice.
    assert all(number < place + 4 for place, number in enumerate(arrivals.numbers))


async def test_with_one_place_calls_are_made_in_the_order_they_came() -> None:
    arrivals = Arrivals()
    async with serving_model(arrivals) as server, limited(1, server) as model:
        await asyncio.gather(*(said(model, number) for number in range(50)))
    assert arrivals.numbers == list(range(50))


async def test_a_waiter_that_is_cancelled_is_skipped_and_asks_nobody() -> None:
    async with serving_model(scenario("stall-once")) as server, limited(1, server) as model:
        async with aclosing(model.stream(asking())) as first:
            assert (await anext(first))[0] == TextDelta("word0 ")
            gone, waiting = (asyncio.create_task(said(model, number)) for number in (1, 2))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait([gone])
        assert (gone.cancelled(), await waiting, server.count) == (True, TEXT, 2)


async def test_a_waiter_that_is_cancelled_just_when_it_is_its_turn_hands_the_turn_on() -> None:
    async with serving_model(scenario("stall-once")) as server, limited(1, server) as model:
        async with aclosing(model.stream(asking())) as first:
            assert (await anext(first))[0] == TextDelta("word0 ")
            gone, waiting = (asyncio.create_task(said(model, number)) for number in (1, 2))
            await asyncio.sleep(0)
        gone.cancel()
        assert (await waiting, server.count) == (TEXT, 2)
        await asyncio.wait([gone])
        assert gone.cancelled()


async def test_a_call_that_is_cancelled_again_while_it_ends_gives_its_place_back() -> None:
    async with serving_model(scenario("stall-once")) as server, limited(1, server) as model:
        call = asyncio.create_task(failure(model, asking()))
        await server.arrived.wait()
        while not call.done():
            call.cancel()
            await asyncio.sleep(0)
        assert (call.cancelled(), await said(model, 1)) == (True, TEXT)
