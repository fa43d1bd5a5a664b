"""Threads of functions that may hang."""

import threading

import pytest

from bough_server.tools.threads import NoThread, ThreadLimit


async def test_a_thread_that_hangs_is_replaced_up_to_a_bound_and_counts_again_when_it_returns() -> None:
    threads, release = ThreadLimit(1, spare=1), threading.Event()
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError) as hung:
                await threads.run_within(release.wait, 0.1)
            assert not isinstance(hung.value, NoThread)
        with pytest.raises(NoThread):
            await threads.run_within(release.wait, 0.1)
    finally:
        release.set()
    assert await threads.run_within(threading.active_count, 10)
    release.clear()
    holding = threads.submit(release.wait)
    try:
        with pytest.raises(NoThread):
            await threads.run_within(release.wait, 0.1)
    finally:
        release.set()
    assert (await holding).result()


async def test_a_function_s_own_timeout_is_what_it_raised() -> None:
    def work() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await ThreadLimit(1, spare=1).run_within(work, 10)
