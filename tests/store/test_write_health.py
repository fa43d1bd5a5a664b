"""Whether the store can write, as its jobs and its thread tell."""

import asyncio

import pytest

from bough_server.errors import StorageFailed
from bough_server.store.sql.write_queue import WriteHealth


async def _turn(write_health: WriteHealth, is_possible: bool) -> None:
    async with asyncio.timeout(10):
        async for now in write_health.changes():
            if now is is_possible:
                return


async def test_a_job_that_does_not_end_is_a_stall_until_it_does() -> None:
    write_health = WriteHealth(stall_seconds=0.01)
    write_health.on_job_queued()
    write_health.check()
    await _turn(write_health, False)
    with pytest.raises(StorageFailed, match="does not respond"):
        write_health.check()
    write_health.on_jobs_done(1)
    assert write_health.is_possible
    write_health.check()
    write_health.close()


async def test_a_stall_behind_a_stall_is_seen() -> None:
    write_health = WriteHealth(stall_seconds=0.01)
    write_health.on_job_queued()
    write_health.on_job_queued()
    await _turn(write_health, False)
    write_health.on_jobs_done(1)
    await _turn(write_health, False)
    write_health.close()


async def test_what_ended_while_the_loop_was_held_up_is_no_stall() -> None:
    write_health = WriteHealth(stall_seconds=0.0)
    write_health.on_job_queued()
    for _ in range(3):
        await asyncio.sleep(0)
    write_health.check()
    write_health.on_jobs_done(1)
    assert write_health.is_possible
    write_health.close()


async def test_who_is_refused_by_the_disk_is_told_and_tried_again() -> None:
    write_health = WriteHealth()
    write_health.report_health(is_failing=True)
    assert not write_health.is_possible
    write_health.check()
    write_health.report_health(is_failing=False)
    assert write_health.is_possible
