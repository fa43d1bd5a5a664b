"""Whether the store can write, as its jobs and its thread tell."""

import asyncio

import pytest

from bough_server.errors import StorageFailed
from bough_server.store.sql.write_queue import Writing


async def _turn(writing: Writing, is_possible: bool) -> None:
    async with asyncio.timeout(10):
        async for now in writing.turns():
            if now is is_possible:
                return


async def test_a_job_that_does_not_end_is_a_stall_until_it_does() -> None:
    writing = Writing(stall_seconds=0.01)
    writing.begin()
    writing.check()
    await _turn(writing, False)
    with pytest.raises(StorageFailed, match="does not respond"):
        writing.check()
    writing.end(1)
    assert writing.is_possible
    writing.check()
    writing.close()


async def test_a_stall_behind_a_stall_is_seen() -> None:
    writing = Writing(stall_seconds=0.01)
    writing.begin()
    writing.begin()
    await _turn(writing, False)
    writing.end(1)
    await _turn(writing, False)
    writing.close()


async def test_what_ended_while_the_loop_was_held_up_is_no_stall() -> None:
    writing = Writing(stall_seconds=0.0)
    writing.begin()
    for _ in range(3):
        await asyncio.sleep(0)
    writing.check()
    writing.end(1)
    assert writing.is_possible
    writing.close()


async def test_who_is_refused_by_the_disk_is_told_and_tried_again() -> None:
    writing = Writing()
    writing.report_health(is_failing=True)
    assert not writing.is_possible
    writing.check()
    writing.report_health(is_failing=False)
    assert writing.is_possible
