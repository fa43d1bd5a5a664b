"""The process of a server: a loop that survives stray tasks, a watchdog of it, and its end."""

import asyncio
import gc
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import structlog
import uvloop

from bough_server.process.loop import YOUNG_OBJECTS, ServerRunner
from bough_server.process.stop_signals import StopSignals
from bough_server.process.watchdog import Watchdog


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_stray_task_or_callback_does_not_end_the_loop(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("stray")

    async def failing() -> None:
        fail()

    async def main() -> str:
        stray = asyncio.create_task(failing())
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0.01)
        assert isinstance(stray.exception(), kind)
        return "alive"

    with structlog.testing.capture_logs() as logged:
        assert ServerRunner().run(main()) == "alive"
    # Of two in one turn of the loop, uvloop reports one.
    assert {line["exc_info"].args for line in logged} == {("stray",)}


def test_collections_are_rare_while_a_server_runs() -> None:
    async def main() -> int:
        return gc.get_threshold()[0]

    before = gc.get_threshold()
    assert ServerRunner().run(main()) == YOUNG_OBJECTS
    assert gc.get_threshold() == before


@pytest.mark.parametrize("new_loop", [uvloop.Loop, asyncio.SelectorEventLoop])
def test_stop_signals_keep_their_wakeup_descriptor_over_a_stray_task(
    new_loop: type[asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    if new_loop is asyncio.SelectorEventLoop:
        monkeypatch.setitem(sys.modules, "uvloop", None)  # the import fails, as if it was not installed

    lower = socket.socketpair()

    async def failing() -> None:
        raise KeyboardInterrupt("stray")

    async def main() -> list[int]:
        assert isinstance(asyncio.get_running_loop(), new_loop)
        before = _wakeup_fd()
        with StopSignals(lambda: 0.0) as signals:
            own = _wakeup_fd()
            for one in lower:  # so that a loop that opens new descriptors has others than before
                one.close()
            stray = asyncio.create_task(failing())
            await asyncio.wait({stray})
            assert isinstance(stray.exception(), KeyboardInterrupt)
            for _ in range(3):  # the loop may end a turn before it stops and runs again
                await asyncio.sleep(0)
            kept = _wakeup_fd()
            signal.raise_signal(signal.SIGTERM)
            await signals.wait()
        return [before, own, kept, _wakeup_fd()]

    before, own, kept, after = ServerRunner().run(main())
    assert kept == own, "the signals are still counted while the loop is blocked"
    assert (after >= 0, after != own) == (before >= 0, True), "the loop has its own again"


def _wakeup_fd() -> int:
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    return number


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_the_coroutine_itself_raises_ends_the_loop(kind: type[BaseException]) -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        raise kind("mine")

    with pytest.raises(kind, match="mine"):
        ServerRunner().run(main())


def _stubborn() -> Coroutine[Any, Any, None]:
    async def swallow() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except BaseException as error:
                if isinstance(error, GeneratorExit):
                    raise

    return swallow()


def test_tasks_and_threads_that_do_not_end_are_left_behind() -> None:
    kept: list[asyncio.Task[None]] = []
    go_on = threading.Event()

    async def main() -> str:
        kept.append(asyncio.create_task(_stubborn(), name="stubborn"))
        threading.Thread(target=go_on.wait, name="waiting").start()
        await asyncio.to_thread(time.monotonic)
        return "done"

    runner = ServerRunner()
    with structlog.testing.capture_logs() as logged:
        assert runner.run(main()) == "done"
    go_on.set()
    assert runner.has_leftovers
    assert [line["left"] for line in logged] == [["stubborn", "waiting"]]


def test_a_run_whose_tasks_end_leaves_nothing_behind() -> None:
    ended = threading.Event()

    async def late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.create_task(late())
        await asyncio.to_thread(time.monotonic)
        assert not task.done()

    runner = ServerRunner()
    runner.run(main())
    assert ended.is_set()
    assert not runner.has_leftovers


async def test_a_blocked_loop_is_logged_once_with_its_stack_and_counted() -> None:
    counted = threading.Semaphore(0)
    with structlog.testing.capture_logs() as logged, Watchdog(counted.release) as watchdog:
        assert watchdog.measure_block() == pytest.approx(0.0, abs=0.5)
        assert await asyncio.to_thread(_block_until, counted, asyncio.get_running_loop())
        await asyncio.sleep(0.5)
    assert [line["event"][:18] for line in logged] == ["the event loop is ", "the event loop tur"]
    assert "blocking_code" in logged[0]["stack"]
    assert logged[0]["seconds"] >= 1.0
    assert not counted.acquire(blocking=False)


def _block_until(counted: threading.Semaphore, loop: asyncio.AbstractEventLoop) -> bool:
    seen = threading.Event()

    def blocking_code() -> None:
        seen.wait(10)

    loop.call_soon_threadsafe(blocking_code)
    is_counted = counted.acquire(timeout=10)
    seen.set()
    return is_counted
