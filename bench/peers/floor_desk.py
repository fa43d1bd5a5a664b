"""The desk as bare loops on the `openai` client, in Bough's environment; a program that answers lines.

python -m bench.peers.floor_desk typed|raw BASE_URL
"""

import sys
from functools import partial

import openai
import uvloop

from bench import desk_floor
from bench.desk_floor import Body, Said
from bench.lines import answer_lines
from bench.peers.desk_turns import TURN_SECONDS, Turn, answer


async def main(kind: str, base_url: str) -> None:
    """Answer lines until the input ends."""
    transport = openai.DefaultAioHttpClient(trust_env=False) if kind == "raw" else None
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", timeout=TURN_SECONDS, max_retries=0, http_client=transport
    ) as client:
        call = {"typed": desk_floor.typed, "raw": desk_floor.raw}[kind](client)

        async def turn(one: Turn) -> None:
            async def counted(body: Body) -> Said:
                said = await call(body)
                one.take(said.text)
                return said

            one.answer = await desk_floor.turn(counted)

        await answer_lines(partial(answer, turn))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
