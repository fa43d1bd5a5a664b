"""Calls with forged access tokens, for the callers case; a program that answers lines.

python -m bench.forger ADDRESS

The line `TOKEN PER_SECOND SECONDS` makes so many calls, each with another signature in place of that of a valid token;
the answer has how many were made, and how many of them were not refused.
"""

import asyncio
import base64
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc import aio

from bench.lines import answer_lines
from bough.v1.access_service_pb2 import GetCallerRequest
from bough.v1.access_service_pb2_grpc import AccessServiceStub

if TYPE_CHECKING:
    from bough.v1.access_service_pb2_grpc import AccessServiceAsyncStub

_SIGNATURE_BYTES: Final = 256


async def _forge(agents: "AccessServiceAsyncStub", token: str) -> bool:
    """Make a call with a forged token; return whether it was refused."""
    signature = base64.urlsafe_b64encode(os.urandom(_SIGNATURE_BYTES)).decode().rstrip("=")
    forged = f"{token.rpartition('.')[0]}.{signature}"
    code = await agents.GetCaller(GetCallerRequest(), metadata=[("authorization", f"Bearer {forged}")]).code()
    return code == grpc.StatusCode.UNAUTHENTICATED


async def _main(address: str) -> None:
    async with aio.insecure_channel(address) as channel:
        agents: AccessServiceAsyncStub = AccessServiceStub(channel)

        async def answer(words: list[str]) -> Mapping[str, Any]:
            token, per_second, seconds = words[0], int(words[1]), float(words[2])
            loop = asyncio.get_running_loop()
            begin, calls = loop.time(), list[asyncio.Task[bool]]()
            while (passed := loop.time() - begin) < seconds:
                calls += [
                    asyncio.create_task(_forge(agents, token)) for _ in range(int(passed * per_second) - len(calls))
                ]
                await asyncio.sleep(0.005)
            refused = await asyncio.gather(*calls)
            return {"calls": len(refused), "accepted": refused.count(False), "seconds": loop.time() - begin}

        await answer_lines(answer)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
