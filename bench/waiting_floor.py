"""The waiting case's floor: bare model calls on the `openai` client, all at once; a program that answers lines.

python -m bench.waiting_floor BASE_URL

`hold COUNT` begins so many calls and leaves them to wait; `run COUNT` makes so many and tells how many failed and how
many seconds half of them, and all but a hundredth, took at most.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Final

import openai

from bench.desk_floor import Call, raw
from bench.desk_team import INSTRUCTIONS, LOOKUP, QUESTION
from bench.lines import answer_lines
from bench.waiting_calls import AGENT, TEXT, spread

_BODY: Final = {
    "model": "m",
    "messages": [{"role": "system", "content": INSTRUCTIONS[AGENT]}, {"role": "user", "content": QUESTION}],
    "tools": [LOOKUP],
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def _timed(call: Call) -> float | None:
    """Seconds that a call took; None where it failed."""
    start = time.perf_counter()
    try:
        said = await call({**_BODY})
    except openai.OpenAIError:
        return None
    return time.perf_counter() - start if said.text == TEXT else None


async def _main(base_url: str) -> None:
    held: list[asyncio.Task[float | None]] = []
    transport = openai.DefaultAioHttpClient(trust_env=False, timeout=None)
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=None, http_client=transport
    ) as client:
        call = raw(client)

        async def answer(words: list[str]) -> Mapping[str, float]:
            count = int(words[1])
            tasks = [asyncio.create_task(_timed(call)) for _ in range(count)]
            if words[0] == "hold":
                held.extend(tasks)
                return {"held": len(held)}
            return spread(await asyncio.gather(*tasks))

        await answer_lines(answer)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
