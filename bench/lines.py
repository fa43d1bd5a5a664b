"""The far side of `Program.ask`: a line in, a line of JSON out, until the input ends; it knows no line's meaning."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Answer = Callable[[list[str]], Awaitable[Mapping[str, Any]]]


async def answer_lines(answer: Answer) -> None:
    """Answers the words of every line of standard input, one line at a time."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await answer(line.split())), flush=True)
