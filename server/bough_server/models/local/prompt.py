"""Prompts of the embedded model, and counts of their tokens.

A token is at least one byte: a prompt of fewer bytes than there are tokens fits, whatever its language.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from bough.v1 import message_pb2
from bough_server.models.local.schema import Schema, example
from bough_server.models.model import ModelRequest
from bough_server.models.scripted.script import current_turn, text_of
from bough_server.models.structured_output import result_text
from bough_server.models.tokens import FILE_TOKENS, FRAME_TOKENS
from bough_server.truncation import cut_text, fit_texts

Prompt = list[dict[str, object]]

ANSWER_TOKENS: Final = 160
_FRAME_BYTES: Final = 16
"""What the model's template puts around a message, at most."""
_MOST_BYTES: Final = 1280
"""Below what the context holds beside an answer: where cores are shared, a thousand tokens are read in ten seconds."""
_LEAST_ROOM: Final = 600
_MOST_OLDER: Final = 4
_DESCRIPTION_BYTES: Final = 80
_QUESTIONS: Final = ("How is paper made?", "Where do rivers begin?", "Who built the first clocks?", "What do bees eat?")

_MOST_READ_BYTES: Final = 64 * 1024 * 1024


def text_prompt(request: ModelRequest) -> Prompt:
    """The prompt for an answer in words: the instruction, what came before as far as there is room, and the turn."""
    turn = current_turn(request.messages)
    instruction, asked = _instruction_and_turn(request, turn, _MOST_BYTES)
    room = _MOST_BYTES - _size([instruction, asked])
    older = _older(request.messages[: len(request.messages) - len(turn)], room)
    return [instruction, *older, asked]


def call_prompt(request: ModelRequest, tools: Sequence[tuple[str, str, Schema]]) -> Prompt:
    """The prompt for a tool call: the tools by name, description and schema, and an example of each where it fits."""
    for has_examples, has_descriptions in ((True, True), (False, True), (False, False)):
        examples = _examples(tools) if has_examples else []
        offers = _offers(tools, has_descriptions=has_descriptions)
        room = _MOST_BYTES - _size(examples) - len(offers.encode())
        if room >= _LEAST_ROOM:
            break
    instruction, asked = _instruction_and_turn(request, current_turn(request.messages), room)
    instruction["content"] = f"{instruction['content']}\n\n{offers}"
    return [instruction, *examples, asked]


def question_of(request: ModelRequest) -> str:
    """What the turn asks, in one line of at most 160 bytes."""
    turn = current_turn(request.messages)
    text = " ".join(text_of(turn[0]).split()) if turn else ""
    return text.encode()[:ANSWER_TOKENS].decode(errors="ignore")


def _instruction_and_turn(
    request: ModelRequest, turn: Sequence[message_pb2.Message], room: int
) -> tuple[dict[str, object], dict[str, object]]:
    """The system message and the user's, with the turn's results in it; the longest texts are cut first."""
    texts = [request.instruction or "Answer briefly.", *_said(turn)]
    fitting = fit_texts(texts, room - 2 * _FRAME_BYTES - 2 * len(texts))
    said = "\n\n".join(text for text in fitting[1:] if text)
    return {"role": "system", "content": fitting[0]}, {"role": "user", "content": said or "Answer."}


def _said(turn: Sequence[message_pb2.Message]) -> list[str]:
    """What the turn's user and others said, and what tools gave; the model's own calls are left out."""
    said: list[str] = []
    for message in turn:
        results = [part.tool_result for part in message.parts if part.HasField("tool_result")]
        if results:
            said.extend(f"{result.call.name}: {result_text(result)}" for result in results)
        elif message.role != message_pb2.ROLE_ASSISTANT:
            said.append(text_of(message))
    return said


def _older(messages: Sequence[message_pb2.Message], room: int) -> Prompt:
    """The last few messages with text that came before the turn and fit whole."""
    older: Prompt = []
    for message in reversed(messages):
        text = text_of(message)
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
        words = cut_text(" ".join(description.split()), _DESCRIPTION_BYTES).replace("\n", " ")
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
    """The tokens of a request's texts, with an estimate for files and what stands around messages.

    It is asked of the process at its address. Raises OSError, ValueError or KeyError where that does not answer.
    """
    texts = [request.instruction, request.output_schema_json]
    texts += [tool.name + tool.description + tool.input_schema_json for tool in request.tools]
    parts = [part for message in request.messages for part in _flat(message.parts)]
    files = sum(part.HasField("blob") for part in parts)
    text = "\n".join(filter(None, [*texts, *map(_text, parts)]))
    tokens = await _tokenized(base_url, text)
    return tokens + files * FILE_TOKENS + len(request.messages) * FRAME_TOKENS


def _flat(parts: Iterable[message_pb2.Part]) -> Iterator[message_pb2.Part]:
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


async def _tokenized(base_url: str, text: str) -> int:
    """One request of plain HTTP: the process keeps no connections, and its answer ends with one."""
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
