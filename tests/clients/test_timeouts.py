"""One meaning of `timeout`: by default the client's, None for no limit, else seconds."""

import asyncio
from typing import Any

import pytest

from bough import AsyncClient, Client, DeadlineExceeded
from tests.clients.run_events import RUN_ID, desk
from tests.clients.stream_server import LoopbackService, listening

CALL, RUN, OWN = 10, 100, 1000
"""Timeouts of calls and of runs that the clients have, and one that a call has."""

GIVEN: list[dict[str, Any]] = [{}, {"timeout": None}, {"timeout": OWN}]


class Deadlines(LoopbackService):
    """Collects the seconds that calls have left."""

    def __init__(self) -> None:
        super().__init__(desk(), runs=["run-1", "run-2"])
        self.left: list[float | None] = []

    async def WatchRun(self, request, context):
        self.left.append(context.time_remaining())
        async for response in super().WatchRun(request, context):
            yield response

    async def GetRun(self, request, context):
        self.left.append(context.time_remaining())
        return await super().GetRun(request, context)

    async def ListRuns(self, request, context):
        self.left.append(context.time_remaining())
        return await super().ListRuns(request, context)


def bound(left: float | None) -> int | None:
    """Return the timeout that a call with so many seconds left had."""
    return None if left is None else next(seconds for seconds in (CALL, RUN, OWN) if left < 2 * seconds)


async def test_a_call_takes_as_long_as_it_says_else_as_long_as_the_client_says() -> None:
    service = Deadlines()

    def read(address: str) -> None:
        with Client(address, timeout=RUN, call_timeout=CALL) as client:
            for given in GIVEN:
                client.get_run(RUN_ID, **given)
                assert len(list(client.list_runs(page_size=1, **given))) == 2
                assert len(list(client.watch(RUN_ID, **given))) == len(desk())

    async with listening(service) as port, AsyncClient(f"127.0.0.1:{port}", timeout=RUN, call_timeout=CALL) as client:
        for given in GIVEN:
            await client.get_run(RUN_ID, **given)
            assert len([run async for run in client.list_runs(page_size=1, **given)]) == 2
            assert len([event async for event in client.watch(RUN_ID, **given)]) == len(desk())
        await asyncio.to_thread(read, client.address)
    each = [[CALL] * 3 + [RUN], [None] * 4, [OWN] * 4]
    assert [bound(left) for left in service.left] == [seconds for calls in each * 2 for seconds in calls]


async def test_without_any_time_left_no_call_is_made() -> None:
    service = Deadlines()

    def read(address: str) -> None:
        with Client(address) as client:
            with pytest.raises(DeadlineExceeded):
                client.get_run(RUN_ID, timeout=0)
            with pytest.raises(DeadlineExceeded):
                list(client.watch(RUN_ID, timeout=0))
            with pytest.raises(DeadlineExceeded):
                client.aggregate(desk(), timeout=0)

    async with listening(service) as port, AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(DeadlineExceeded):
            await client.get_run(RUN_ID, timeout=0)
        with pytest.raises(DeadlineExceeded):
            await anext(client.watch(RUN_ID, timeout=0))
        with pytest.raises(DeadlineExceeded):
            await client.aggregate(desk(), timeout=0)
        await asyncio.to_thread(read, client.address)
    assert service.left == []
