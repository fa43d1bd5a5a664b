"""Prompts that a very small model understands and that always fit its context; nothing is sent from here.

A token is at least one byte: a prompt of fewer bytes than there are tokens fits, whatever its language.
"""

import json
from collections.abc import Sequence
from typing import Final

from bough.v1 import message_pb2
from bough_server.cutting import cut_text, fit_texts
from bough_server.models.conversation import current_turn, text_of
from bough_server.models.local_schema import Schema, example
from bough_server.models.model import ModelRequest
from bough_server.models.wording import result_text

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
