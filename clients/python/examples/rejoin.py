"""Follow a run over dropped connections and restarts of its server: python rejoin.py AGENT TEXT [ADDRESS].

Restart the server while it follows: the stream goes on after its last sequence.
"""

import asyncio
import sys

from bough import AsyncClient, CallFailed, Rejoining, text_of
from bough.channel import DEFAULT_ADDRESS


def say_drop(error: CallFailed) -> None:
    print(f"dropped, rejoining: {error}", file=sys.stderr, flush=True)


async def main(agent: str, text: str, address: str = DEFAULT_ADDRESS) -> int:
    async with AsyncClient(address, rejoining=Rejoining(on_drop=say_drop)) as client, client.run(agent, text) as stream:
        async for event in stream:
            payload = event.WhichOneof("payload")
            print(event.sequence, event.branch, payload, flush=True)
            if payload == "run_completed":
                print(text_of(event.run_completed.final_answer))
                return 0
    print(f"run {stream.run_id} has no answer", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
