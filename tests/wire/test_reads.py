"""What one read of a connection brings is one item of a model's stream."""

import pytest

from bough.v1 import step_pb2
from bough_server.models.model import TextDelta
from tests.support.model_calls import asking, failure
from tests.support.model_scenarios import DONE, Reply, chunk, event, plain
from tests.support.model_server import serving_model
from tests.support.openai_models import OpenAIModel

WORDS = [TextDelta(f"word{number} ") for number in range(50)]


async def test_all_deltas_of_one_read_are_one_item_in_their_order() -> None:
    whole = b"".join(plain({}).pieces)
    async with serving_model(lambda _: Reply(pieces=(whole,))) as server:
        model = OpenAIModel(name="m", model="m", base_url=server.base_url)
        items = [item async for item in model.stream(asking())]
        await model.close()
    assert items[0] == WORDS
    assert isinstance(items[1], step_pb2.LlmResponse)
    assert len(items) == 2


async def test_reads_apart_are_items_apart() -> None:
    async with serving_model("plain", delta_interval=0.02) as server:
        model = OpenAIModel(name="m", model="m", base_url=server.base_url)
        items = [item async for item in model.stream(asking())]
        await model.close()
    assert len(items) > 10
    assert not any(item == [] for item in items)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (event({"error": {"message": "The model crashed."}}), "The model crashed."),
        (b"data: {nonsense\n\n", "not JSON"),
    ],
    ids=["error", "nonsense"],
)
async def test_what_a_read_brought_before_an_error_is_handed_on_first(fault: bytes, said: str) -> None:
    whole = b"".join((*plain({}).pieces[:4], fault, chunk({"content": "never"}), DONE))
    async with serving_model(lambda _: Reply(pieces=(whole,))) as server:
        model = OpenAIModel(name="m", model="m", base_url=server.base_url)
        deltas, error = await failure(model, asking())
        await model.close()
    assert deltas == WORDS[:3]
    assert said in error.message
