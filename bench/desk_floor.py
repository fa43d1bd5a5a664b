"""The desk's floor: the same eight model calls in a bare loop on the `openai` client; a program that answers lines.

python -m bench.desk_floor typed|raw BASE_URL

A line `TURNS` runs that many turns at once; `raw` uses the aiohttp transport. No events, no log, no server: what a
service adds comes on top.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import openai
from openai.types.chat import ChatCompletionChunk

from bench.desk_team import INSTRUCTIONS, LOOKUP, QUESTION, SPECIALISTS, lookup
from bench.lines import answer_lines
from tests.support.model_scenarios import TEXT

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: its text, and its calls as id, name and arguments."""

    text: str
    calls: list[list[str]]


Call = Callable[[Body], Awaitable[Said]]

_CALL_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": f"call_{name}",
            "description": f"Answers as the {name}.",
            "parameters": {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]},
        },
    }
    for name in SPECIALISTS
]


async def turn(call: Call) -> str:
    """One turn of the desk; gives its answer."""

    async def specialist(name: str, message: str) -> str:
        async def use(tool: str, arguments: str) -> str:
            return await lookup(**json.loads(arguments))

        return await _agent(call, name, message, [LOOKUP], use)

    async def dispatch(tool: str, arguments: str) -> str:
        return await specialist(tool.removeprefix("call_"), json.loads(arguments)["message"])

    return await _agent(call, "lead", QUESTION, _CALL_TOOLS, dispatch)


async def _agent(
    call: Call, name: str, message: str, tools: list[Body], use: Callable[[str, str], Awaitable[str]]
) -> str:
    messages: list[Body] = [
        {"role": "system", "content": INSTRUCTIONS[name]},
        {"role": "user", "content": message},
    ]
    while True:
        body = {"model": "m", "messages": messages, "tools": tools, "stream": True}
        said = await call({**body, "stream_options": {"include_usage": True}})
        if not said.calls:
            return said.text
        messages.append(_assistant(said))
        results = await asyncio.gather(*(use(tool, arguments) for _, tool, arguments in said.calls))
        for (call_id, _, _), result in zip(said.calls, results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})


def _assistant(said: Said) -> Body:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in said.calls
    ]
    return {"role": "assistant", "content": said.text or None, "tool_calls": calls}


def typed(client: openai.AsyncOpenAI) -> Call:
    """(a) The client as its documentation shows it: a typed object for every chunk."""

    async def call(body: Body) -> Said:
        pieces: list[str] = []
        calls: list[list[str]] = []
        stream = await client.chat.completions.create(**body)
        async for chunk in cast(openai.AsyncStream[ChatCompletionChunk], stream):
            if not chunk.choices:
                continue
            delta = chunk.choices[0].delta
            if delta.content:
                pieces.append(delta.content)
            for piece in delta.tool_calls or ():
                function = piece.function
                if function is None:
                    continue
                if piece.index == len(calls):
                    calls.append([piece.id or "", function.name or "", ""])
                calls[piece.index][2] += function.arguments or ""
        return Said("".join(pieces), calls)

    return call


def raw(client: openai.AsyncOpenAI) -> Call:
    """(b) The client's raw streaming response, and no more parsing than it takes."""

    async def call(body: Body) -> Said:
        pieces: list[str] = []
        calls: list[list[str]] = []
        async with client.chat.completions.with_streaming_response.create(**body) as response:
            rest = b""
            async for data in response.iter_bytes():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    if event != b"data: [DONE]":
                        _take(json.loads(event[6:]), pieces, calls)
        return Said("".join(pieces), calls)

    return call


def _take(chunk: Body, pieces: list[str], calls: list[list[str]]) -> None:
    if not chunk["choices"]:
        return
    delta = chunk["choices"][0]["delta"]
    if content := delta.get("content"):
        pieces.append(content)
    for piece in delta.get("tool_calls", ()):
        if piece["index"] == len(calls):
            calls.append([piece["id"], piece["function"]["name"], ""])
        calls[piece["index"]][2] += piece["function"]["arguments"]


async def _main(kind: str, base_url: str) -> None:
    transport = openai.DefaultAioHttpClient(trust_env=False) if kind == "raw" else None
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=transport) as client:
        call = {"typed": typed, "raw": raw}[kind](client)

        async def answer(words: list[str]) -> Mapping[str, float]:
            answers = await asyncio.gather(*(turn(call) for _ in range(int(words[0]))))
            return {"failed": sum(text != TEXT for text in answers)}

        await answer_lines(answer)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
