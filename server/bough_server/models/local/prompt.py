"""Prompts of the embedded model, and counts of their tokens.

A token is at least one byte, so a prompt with fewer bytes than the context has tokens fits, whatever its language.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from bough.v1 import message_pb2
from bough_server.models.local.schema import Schema, example
from bough_server.models.model import ModelRequest
from bough_server.models.scripted.script import current_turn, join_text
from bough_server.models.structured_output import result_text
from bough_server.models.tokens import FILE_TOKENS, FRAME_TOKENS
from bough_server.truncation import fit_texts, truncate_text

Prompt = list[dict[str, object]]

ANSWER_TOKENS: Final = 160
_FRAME_BYTES: Final = 16
"""The most bytes that the model's template puts around a message."""
_MOST_BYTES: Final = 1280
"""Less than the context holds beside an answer: on shared cores, reading a thousand tokens takes ten seconds."""
_LEAST_ROOM: Final = 600
_MOST_OLDER: Final = 4
_DESCRIPTION_BYTES: Final = 80
_QUESTIONS: Final = ("How is paper made?", "Where do rivers begin?", "Who built the first clocks?", "What do bees eat?")

_MOST_READ_BYTES: Final = 64 * 1024 * 1024


def text_prompt(request: ModelRequest) -> Prompt:
    """Return the prompt for a text answer: the instruction, earlier messages as far as they fit, and the turn."""
    turn = current_turn(request.messages)
    instruction, question = _instruction_and_turn(request, turn, _MOST_BYTES)
    room = _MOST_BYTES - _size([instruction, question])
    older = _select_older(request.messages[: len(request.messages) - len(turn)], room)
    return [instruction, *older, question]


def call_prompt(request: ModelRequest, tools: Sequence[tuple[str, str, Schema]]) -> Prompt:
    """Return the prompt for a tool call: the tools, and an example call of each; cut down in steps until it fits."""
    # The examples are left out first, then the descriptions. The schema is enforced by the grammar, not by the prompt.
    for has_examples, has_descriptions in ((True, True), (False, True), (False, False)):
        examples = _examples(tools) if has_examples else []
        offers = _offers(tools, has_descriptions=has_descriptions)
        room = _MOST_BYTES - _size(examples) - len(offers.encode())
        if room >= _LEAST_ROOM:
            break
    instruction, question = _instruction_and_turn(request, current_turn(request.messages), room)
    instruction["content"] = f"{instruction['content']}\n\n{offers}"
    return [instruction, *examples, question]


def question_of(request: ModelRequest) -> str:
    """Return the turn's question as one line of at most 160 bytes."""
    turn = current_turn(request.messages)
    text = " ".join(join_text(turn[0]).split()) if turn else ""
    return text.encode()[:ANSWER_TOKENS].decode(errors="ignore")


def _instruction_and_turn(
    request: ModelRequest, turn: Sequence[message_pb2.Message], room: int
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the system message, and a user message with the turn's results in it; the longest texts are cut first."""
    texts = [request.instruction or "Answer briefly.", *_turn_texts(turn)]
    fitting = fit_texts(texts, room - 2 * _FRAME_BYTES - 2 * len(texts))
    content = "\n\n".join(text for text in fitting[1:] if text)
    return {"role": "system", "content": fitting[0]}, {"role": "user", "content": content or "Answer."}


def _turn_texts(turn: Sequence[message_pb2.Message]) -> list[str]:
    """Return the texts of a turn's messages and tool results, without the model's own messages."""
    texts: list[str] = []
    for message in turn:
        results = [part.tool_result for part in message.parts if part.HasField("tool_result")]
        if results:
            texts.extend(f"{result.call.name}: {result_text(result)}" for result in results)
        elif message.role != message_pb2.ROLE_ASSISTANT:
            texts.append(join_text(message))
    return texts


def _select_older(messages: Sequence[message_pb2.Message], room: int) -> Prompt:
    """Return the last few messages before the turn that have text and fit as a whole."""
    older: Prompt = []
    for message in reversed(messages):
        text = join_text(message)
        if message.role == message_pb2.ROLE_TOOL or not text:
            continue
        role = "assistant" if message.role == message_pb2.ROLE_ASSISTANT else "user"
        room -= len(text.encode()) + _FRAME_BYTES
        if room < 0 or len(older) == _MOST_OLDER:
            break
        older.insert(0, {"role": role, "content": text})
    return older


def _offers(tools: Sequence[tuple[str, str, Schema]], *, has_descriptions: bool) -> str:
    lines = ["You answer with one tool call as JSON. Tools:"]
    for name, description, _ in tools:
        words = truncate_text(" ".join(description.split()), _DESCRIPTION_BYTES).replace("\n", " ")
        lines.append(f"- {name}: {words}" if has_descriptions else f"- {name}")
    return "\n".join(lines)


def _examples(tools: Sequence[tuple[str, str, Schema]]) -> Prompt:
    examples: Prompt = []
    for (name, _, schema), question in zip(tools, _QUESTIONS, strict=False):
        call = json.dumps({"tool": name, "arguments": example(schema, question)}, ensure_ascii=False)
        examples += [{"role": "user", "content": question}, {"role": "assistant", "content": call}]
    return examples


def _size(messages: Prompt) -> int:
    return sum(len(str(message["content"]).encode()) + _FRAME_BYTES for message in messages)


async def count_tokens(base_url: str, request: ModelRequest) -> int:
    """Return the tokens of a request: the process counts its texts, files and message frames are estimated.

    Raises OSError, ValueError or KeyError if the process at `base_url` does not answer.
    """
    texts = [request.instruction, request.output_schema_json]
    texts += [tool.name + tool.description + tool.input_schema_json for tool in request.tools]
    parts = [part for message in request.messages for part in _flatten(message.parts)]
    files = sum(part.HasField("blob") for part in parts)
    text = "\n".join(filter(None, [*texts, *map(_text, parts)]))
    tokens = await _request_token_count(base_url, text)
    return tokens + files * FILE_TOKENS + len(request.messages) * FRAME_TOKENS


def _flatten(parts: Iterable[message_pb2.Part]) -> Iterator[message_pb2.Part]:
    for part in parts:
        yield part
        yield from part.tool_result.parts


def _text(part: message_pb2.Part) -> str:
    content = part.WhichOneof("content")
    if content == "tool_call":
        return part.tool_call.name + part.tool_call.arguments_json
    if content == "tool_result":
        return part.tool_result.error.message
    return part.text or part.data_json


async def _request_token_count(base_url: str, text: str) -> int:
    """Count the tokens of a text with one request of plain HTTP."""
    # HTTP/1.0 without a client: the process closes the connection after its response, so the response ends with it.
    address = urlsplit(base_url)
    body = json.dumps({"content": text}).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        head = f"POST /tokenize HTTP/1.0\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        answer = await reader.read(_MOST_READ_BYTES)
        while piece := await reader.read(_MOST_READ_BYTES):
            answer += piece
    finally:
        writer.close()
    return len(json.loads(answer.partition(b"\r\n\r\n")[2])["tokens"])
