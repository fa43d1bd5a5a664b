"""How many tokens the embedded model's own tokenizer makes of a request; the process around it is local_engine.py's."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import urlsplit

from bough.v1 import message_pb2
from bough_server.models.model import ModelRequest
from bough_server.models.tokens import FILE_TOKENS, FRAME_TOKENS

_MOST_BYTES: Final = 64 * 1024 * 1024


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
        answer = await reader.read(_MOST_BYTES)
        while piece := await reader.read(_MOST_BYTES):
            answer += piece
    finally:
        writer.close()
    return len(json.loads(answer.partition(b"\r\n\r\n")[2])["tokens"])
