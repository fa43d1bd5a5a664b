"""Emoji whose halves come in two events, and events of many megabytes, through both APIs."""

import json
from collections.abc import Mapping

import pytest

from bough.v1 import message_pb2
from bough_server.models.model import ReasoningDelta, TextDelta, ToolCallDelta
from bough_server.models.openai.client import ChatApi, ResponsesApi
from tests.support import response_scenarios as responses
from tests.support.model_calls import answer, asking
from tests.support.model_scenarios import Reply, chunk, ending
from tests.support.model_server import serving_model
from tests.support.openai_models import OpenAIModel

OWL = "\U0001f989"
HALVES = ("\ud83e", "\udd89")


def escaped(value: object) -> bytes:
    """An event as providers write it that escape every character beyond ASCII."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chat(delta: Mapping[str, object]) -> bytes:
    return escaped(json.loads(chunk({})[6:]) | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def called(arguments: str, **head: object) -> dict[str, object]:
    return {"tool_calls": [{"index": 0, **head, "function": {"name": "f", "arguments": arguments}}]}


async def test_halves_of_a_chat_completion_are_joined() -> None:
    first, second = HALVES
    pieces = (
        chat({"reasoning_content": f"hm {first}"}),
        chat({"reasoning_content": f"{second} hm"}),
        chat({"content": f"an {first}"}),
        chat({"content": f"{second}!"}),
        chat(called(f'{{"a": "{first}', id="c1")),
        chat(called(f'{second}"}}')),
        *ending("tool_calls"),
    )
    async with serving_model(lambda _: Reply(pieces=pieces)) as server:
        model = OpenAIModel(name="m", model="m", api=ChatApi(), base_url=server.base_url)
        deltas, response = await answer(model, asking())
        await model.close()
    assert deltas == [
        ReasoningDelta("hm "),
        ReasoningDelta(f"{OWL} hm"),
        TextDelta("an "),
        TextDelta(f"{OWL}!"),
        ToolCallDelta(0, '{"a": "', "c1", "f"),
        ToolCallDelta(0, f'{OWL}"}}'),
    ]
    thought, text, made = response.message.parts
    assert (thought.reasoning.text, text.text) == (f"hm {OWL} hm", f"an {OWL}!")
    assert made.tool_call.arguments_json == f'{{"a": "{OWL}"}}'
    assert OWL in response.raw_json


async def test_halves_of_a_response_are_joined_and_counted_as_one_character() -> None:
    first, second = HALVES
    deltas = [{"type": "response.output_text.delta", "delta": piece} for piece in (f"an {first}", f"{second}!")]
    item = responses.message(f"an {OWL}!")
    place = {"output_index": 0, "item_id": "msg"}
    pieces = (
        responses.beginning(),
        *(escaped({**place, **delta}) for delta in deltas),
        responses.ending([item]),
    )
    async with serving_model(lambda _: Reply(pieces=pieces)) as server:
        model = OpenAIModel(name="m", model="m", api=ResponsesApi(), base_url=server.base_url)
        shown, response = await answer(model, asking())
        await model.close()
    assert shown == [TextDelta("an "), TextDelta(f"{OWL}!")]
    assert list(response.message.parts) == [message_pb2.Part(text=f"an {OWL}!")]


@pytest.mark.parametrize("api", [ChatApi(), ResponsesApi()], ids=["chat", "responses"])
async def test_an_event_of_30_mb_arrives(api: ChatApi | ResponsesApi) -> None:
    text = "a" * (30 * 2**20)
    event = {"type": "response.output_text.delta", "output_index": 0, "delta": text}
    whole = chunk({"content": text}) if isinstance(api, ChatApi) else escaped(event)
    rest = ending("stop") if isinstance(api, ChatApi) else (responses.ending([responses.message()]),)
    async with serving_model(lambda _: Reply(pieces=(whole, *rest))) as server:
        model = OpenAIModel(name="m", model="m", api=api, base_url=server.base_url)
        deltas, _ = await answer(model, asking())
        await model.close()
    assert deltas == [TextDelta(text)]
