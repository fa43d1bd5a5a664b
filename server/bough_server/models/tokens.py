"""How many tokens a text, a message or a request takes: by a model's own tokenizer, else by a stated estimate.

The estimate takes four bytes of UTF-8 for a token, which fits English prose and is off by up to a half for other
scripts, and an image or a file for 1,000 tokens.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol, runtime_checkable

from bough.v1 import message_pb2
from bough_server.models.model import Model, ModelRequest
from bough_server.truncation import size_of

BYTES_PER_TOKEN: Final = 4
FILE_TOKENS: Final = 1_000
FRAME_TOKENS: Final = 4
"""What a provider puts around a message."""

_COUNTING_SECONDS: Final = 5.0


@runtime_checkable
class CountsTokens(Protocol):
    """A model that knows its own tokenizer."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """The tokens of a request, files as the estimate has them; None where it cannot say. It may raise anything."""
        ...


async def counted(model: Model | None, request: ModelRequest) -> int:
    """The tokens of a request by a model's own tokenizer; by the estimate where it has none, fails, or takes 5 s."""
    if isinstance(model, CountsTokens):
        try:
            async with asyncio.timeout(_COUNTING_SECONDS):
                tokens = await model.count_tokens(request)
        except Exception:  # nobody is refused a call because it could not be measured
            tokens = None
        if tokens is not None:
            return tokens
    return request_tokens(request)


def text_tokens(text: str) -> int:
    """The tokens of a text."""
    return -(-size_of(text) // BYTES_PER_TOKEN)


def message_tokens(message: message_pb2.Message) -> int:
    """The tokens of a message, calls and results included."""
    return FRAME_TOKENS + _parts_tokens(message.parts)


def request_tokens(request: ModelRequest) -> int:
    """The tokens that a request is made of, tools included; what is answered comes on top of them."""
    tools = (tool.name + tool.description + tool.input_schema_json for tool in request.tools)
    told = text_tokens(request.instruction) + text_tokens(request.output_schema_json)
    return told + sum(map(text_tokens, tools)) + sum(map(message_tokens, request.messages))


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
