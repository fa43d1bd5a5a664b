"""A photo to a model and an image back from a tool: a server on a socket, and each provider's API at the wire."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import event_pb2, message_pb2, session_service_pb2
from bough_server.log.blobs import blobs_anywhere, file_part
from tests.rpc.run_server import Served, Turn, served, settings
from tests.support import anthropic_rules, chat_rules, gemini_rules
from tests.support.file_tools import DRAWING
from tests.support.model_scenarios import Reply, Scenario, desk
from tests.support.model_server import ModelServer, serving_model

PHOTO = bytes(range(256)) * (5 * 1024 * 1024 // 256)

Request = dict[str, Any]


def of_chat(request: Request) -> Iterator[str]:
    """The images of a request of Chat Completions, as base64."""
    for message in request["messages"]:
        if isinstance(message["content"], list):
            for piece in message["content"]:
                if piece["type"] == "image_url":
                    yield piece["image_url"]["url"].removeprefix("data:image/png;base64,")


def of_responses(request: Request) -> Iterator[str]:
    """The same of Responses."""
    for item in request["input"]:
        pieces = item.get("content", item.get("output"))
        for piece in pieces if isinstance(pieces, list) else []:
            if piece["type"] == "input_image":
                yield piece["image_url"].removeprefix("data:image/png;base64,")


def of_messages(request: Request) -> Iterator[str]:
    """The same of Anthropic's Messages."""
    blocks = [block for message in request["messages"] for block in message["content"] if isinstance(block, dict)]
    for block in blocks:
        inside = block.get("content")
        blocks += inside if isinstance(inside, list) else []
        if block["type"] == "image":
            assert block["source"]["media_type"] == "image/png"
            yield block["source"]["data"]


def of_gemini(request: Request) -> Iterator[str]:
    """The same of Gemini."""
    for content in request["contents"]:
        for part in content["parts"]:
            if "inlineData" in part:
                assert part["inlineData"]["mimeType"] == "image/png"
                yield part["inlineData"]["data"]


def looking(rules: Scenario, name: str, texts: str) -> Scenario:
    """A model by some rules that takes a message with the files of its calls for a part of their results.

    `name` and `texts` are where an API has its messages, and their parts.
    """

    def answer(request: Request) -> Reply:
        reply = rules(request)
        said = [message for message in request[name] if not _is_of_files(message[texts])]
        return rules({**request, name: said}) if reply.status == 200 else reply

    return answer


def _is_of_files(parts: Any) -> bool:
    return isinstance(parts, list) and parts[0].get("text", "").startswith("[files of")


Images = Callable[[Request], Iterator[str]]
PROVIDERS: dict[str, tuple[str | Scenario, Images, Request]] = {
    "chat": (looking(desk, "messages", "content"), of_chat, {"provider": "openai"}),
    "deepseek": (looking(chat_rules.deepseek, "messages", "content"), of_chat, {"preset": "deepseek"}),
    "responses": ("desk", of_responses, {"provider": "openai", "api": "responses"}),
    "anthropic": (anthropic_rules.rules, of_messages, {"provider": "anthropic"}),
    "gemini": (looking(gemini_rules.rules, "contents", "parts"), of_gemini, {"provider": "gemini"}),
}


def configured(folder: Path, server: ModelServer, facts: Request) -> Any:
    """Settings of a server whose one agent sees, and calls a tool that draws."""
    (folder / "eye.yaml").write_text("name: eye\ndescription: Sees.\nllm: {instruction: Look., tools: [lookup]}\n")
    is_openai = "preset" in facts or facts["provider"] == "openai"
    model = {"model": "m", "base_url": server.base_url if is_openai else server.root, "api_key_env": "", **facts}
    return settings(
        folder, base=folder, python=["tests.support.file_tools"], agents=["eye.yaml"], models={"default": model}
    )


async def run(server: Served, *parts: message_pb2.Part, session_id: str = "") -> list[event_pb2.AgentEvent]:
    """The events of a run."""
    message = message_pb2.Message(parts=[message_pb2.Part(text="What is an oak?"), *parts])
    request = pb.RunRequest(agent="eye", input=message, session_id=session_id)
    return (await Turn(call=server.agents.Run(request)).to_the_end()).events


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_photo_reaches_the_model_and_an_image_of_a_tool_too(tmp_path: Path, provider: str) -> None:
    scenario, images, facts = PROVIDERS[provider]
    async with serving_model(scenario) as model, served(configured(tmp_path, model, facts)) as server:
        events = await run(server, file_part(PHOTO, "image/png", filename="a.png"))
        assert events[-1].WhichOneof("payload") == "run_completed", events[-1]
        sent = [[base64.b64decode(image) for image in images(request)] for request in model.requests]
        assert (sent[0], len(sent) > 1) == ([PHOTO], True)
        assert all(images[:2] == [PHOTO, DRAWING] and {*images[2:]} <= {DRAWING} for images in sent[1:])
        assert not any(event.WhichOneof("payload") in ("tool_failed", "llm_failed") for event in events)
        files = {blob.sha256: blob for event in events for blob in blobs_anywhere(event)}
        assert sorted((blob.filename, blob.size_bytes) for blob in files.values()) == [
            ("a.png", len(PHOTO)),
            ("tree.png", len(DRAWING)),
        ]
        assert max(event.ByteSize() for event in events) < 64 * 1024
        for blob in files.values():
            request = session_service_pb2.ReadBlobRequest(session_id=events[0].session_id, sha256=blob.sha256)
            data = b"".join([piece.data async for piece in server.sessions.ReadBlob(request)])
            assert data == (PHOTO if blob.filename == "a.png" else DRAWING)


async def test_a_later_turn_sends_the_files_of_the_session_again(tmp_path: Path) -> None:
    scenario, images, facts = PROVIDERS["anthropic"]
    async with serving_model(scenario) as model, served(configured(tmp_path, model, facts)) as server:
        first = await run(server, file_part(PHOTO, "image/png"))
        calls = len(model.requests)
        await run(server, session_id=first[0].session_id)
        before, after = ([*images(model.requests[number])] for number in (calls - 1, calls))
        assert [base64.b64decode(image) for image in after[:2]] == [PHOTO, DRAWING]
        assert after == before


async def test_the_requests_are_json_of_the_files_once(tmp_path: Path) -> None:
    scenario, _, facts = PROVIDERS["chat"]
    async with serving_model(scenario) as model, served(configured(tmp_path, model, facts)) as server:
        await run(server, file_part(PHOTO, "image/png"))
        assert len(json.dumps(model.requests[0])) < len(PHOTO) * 4 / 3 + 16 * 1024
