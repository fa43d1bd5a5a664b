"""Token counts of texts, messages and requests: by the model's own tokenizer if it has one, else estimated.

The estimate is four bytes of UTF-8 per token, which fits English prose and is off by up to a half for other scripts,
and 1,000 tokens per image or file.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol, runtime_checkable

from bough.v1 import message_pb2
from bough_server.models.model import MessageForms, Model, ModelRequest, forms_of
from bough_server.truncation import size_of

BYTES_PER_TOKEN: Final = 4
FILE_TOKENS: Final = 1_000
FRAME_TOKENS: Final = 4
"""Tokens that a provider adds around each message."""

_COUNTING_SECONDS: Final = 5.0


@runtime_checkable
class CountsTokens(Protocol):
    """A model that has its own tokenizer."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Return the tokens of a request, with files estimated; None if it cannot count them. May raise anything."""
        ...


async def count_request_tokens(model: Model | None, request: ModelRequest) -> int:
    """Return the tokens of a request by the model's tokenizer, or the estimate if it has none, fails or takes 5 s."""
    if isinstance(model, CountsTokens):
        try:
            async with asyncio.timeout(_COUNTING_SECONDS):
                tokens = await model.count_tokens(request)
        except Exception:  # a count that fails must not fail the call that it is for
            tokens = None
        if tokens is not None:
            return tokens
    return request_tokens(request)


def text_tokens(text: str) -> int:
    """Return the estimated tokens of a text."""
    return -(-size_of(text) // BYTES_PER_TOKEN)


def message_tokens(message: message_pb2.Message) -> int:
    """Return the estimated tokens of a message, tool calls and results included."""
    return FRAME_TOKENS + _parts_tokens(message.parts)


def form_tokens(form: MessageForms) -> int:
    """Return the estimated tokens of a message, which is counted once."""
    if form.tokens is None:
        form.tokens = message_tokens(form.message)
    return form.tokens


def request_tokens(request: ModelRequest) -> int:
    """Return the estimated input tokens of a request, tools included; its answer comes on top of them."""
    tools = (tool.name + tool.description + tool.input_schema_json for tool in request.tools)
    texts = text_tokens(request.instruction) + text_tokens(request.output_schema_json)
    return texts + sum(map(text_tokens, tools)) + sum(map(form_tokens, forms_of(request)))


def _parts_tokens(parts: Iterable[message_pb2.Part]) -> int:
    return sum(_part_tokens(part) for part in parts)


def _part_tokens(part: message_pb2.Part) -> int:
    content = part.WhichOneof("content")
    if content == "blob":
        return FILE_TOKENS
    if content == "tool_call":
        return text_tokens(part.tool_call.name + part.tool_call.arguments_json)
    if content == "tool_result":
        return text_tokens(part.tool_result.error.message) + _parts_tokens(part.tool_result.parts)
    return text_tokens(part.text or part.data_json)
