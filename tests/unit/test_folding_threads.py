"""Folding beside everything else that a server does: long work leaves the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from bough.v1 import event_pb2, message_pb2
from bough_server.errors import InvalidRequest
from bough_server.evals.trees.folding import TreeBuilder
from bough_server.store.ports.log import StoredEvent
from bough_server.tree.fold import Tree, fold
from tests.support.logs import AgentEvent, desk, stored


async def turns_of_the_loop(work: Callable[[], Awaitable[object]]) -> int:
    """How often something else got its turn while the work was done."""
    turns = 0
    is_done = False

    async def others() -> None:
        nonlocal turns
        while not is_done:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await asyncio.sleep(0)
    turns = 0
    await work()
    is_done = True
    counted = turns
    await beside
    return counted


def of_many_parts() -> AgentEvent:
    parts = [message_pb2.Part(text="x" * 10)] * 30_000
    started = event_pb2.RunStarted(agent="a", input=message_pb2.Message(parts=parts))
    return AgentEvent(invocation_id="R", sequence=1, run_started=started)


async def test_one_event_of_many_parts_is_folded_beside_the_loop() -> None:
    event = of_many_parts()
    builder = TreeBuilder(Tree())
    assert await turns_of_the_loop(partial(builder.add, [event], size=event.ByteSize())) > 0
    assert await turns_of_the_loop(builder.invocation) > 0
    assert (await builder.invocation()).user_content == event.run_started.input


async def test_a_page_of_a_log_with_one_long_event_is_folded_beside_the_loop() -> None:
    builder = TreeBuilder(Tree(run_id="r", session_id="s"))
    assert await turns_of_the_loop(partial(builder.add_page, stored([of_many_parts()]))) > 0
    assert await turns_of_the_loop(builder.invocation) > 0


async def test_many_small_events_are_folded_beside_the_loop() -> None:
    log = [StoredEvent(sequence, 0, b"") for sequence in range(1, 2_001)]
    builder = TreeBuilder(Tree(run_id="r", session_id="s"))
    assert await turns_of_the_loop(partial(builder.add_page, log)) > 0
    assert (builder.count, builder.size) == (2_000, 0)


async def test_events_of_more_items_than_are_worth_their_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough_server.evals.trees.folding.MAX_ITEMS", 50_000)
    builder, event = TreeBuilder(Tree()), of_many_parts()
    await builder.add([event], size=event.ByteSize())
    with pytest.raises(InvalidRequest) as refused:
        await builder.add([event], size=event.ByteSize())
    assert [one.field for one in refused.value.violations] == ["events"]


async def test_a_short_log_is_folded_at_once() -> None:
    builder = TreeBuilder(Tree())
    assert await turns_of_the_loop(partial(builder.add, desk(), size=sum(event.ByteSize() for event in desk()))) == 0
    assert await turns_of_the_loop(builder.invocation) == 0
    assert await builder.invocation() == fold(desk())
