"""Run a server's coroutine on an event loop that tasks of operators' code cannot end."""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar, cast

import structlog

from bough_server.clock import SystemClock
from bough_server.threads import make_pool

T = TypeVar("T")

END_SECONDS: Final = 1.0
"""Seconds that tasks and threads of operators' code may take to end with the server; then it ends without them."""

YOUNG_OBJECTS: Final = 10_000
"""How many objects may be created between two garbage collections of a server; CPython's default is 700.

Runs free what they made when they are over. With 32 of them at once, collections at the default take a tenth of the
CPU, to find next to nothing.
"""

_log = structlog.get_logger(__name__)


class SurvivingLoop:
    """Mixin of an event loop that continues when a task raises KeyboardInterrupt or SystemExit.

    Such an exception leaves run_forever(). The runtime catches those of agents and tools in their own tasks; this is
    for tasks and callbacks that operators' code creates by itself.
    """

    main: "asyncio.Task[Any] | None" = None
    """The task whose end ends the loop, whatever it raises."""
    on_restart: Callable[[], object] | None = None
    """Called on the loop when it runs again after such an exception."""

    def run_forever(self) -> None:
        """See asyncio."""
        while True:
            try:
                super().run_forever()  # type: ignore[misc]  # an event loop is mixed in
            except (KeyboardInterrupt, SystemExit) as error:
                if self.main is None or self.main.done():
                    raise
                _log.error("a task or callback of operators' code tried to end the server", exc_info=error)
            # uvloop stops once more, without an exception, if two were raised in one turn.
            if self.main is None or self.main.done():
                return
            if self.on_restart is not None:
                self.call_soon(self.on_restart)  # type: ignore[attr-defined]  # an event loop is mixed in


class _PlainLoop(SurvivingLoop, asyncio.SelectorEventLoop):
    pass


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, of uvloop if it is installed: a run costs a server a sixth less on it."""
    try:
        import uvloop
    except ImportError:
        return _PlainLoop()

    # Made by type(), because uvloop's annotations differ from asyncio's.
    return cast(asyncio.AbstractEventLoop, type("FastLoop", (SurvivingLoop, uvloop.Loop), {})())


class ServerRunner:
    """Runs one coroutine like asyncio.Runner, but does not wait for code that ignores its cancellation.

    `has_leftovers` is True if there was such code when the coroutine had ended: then the process has to leave by
    os._exit, because an ordinary exit of the interpreter waits for threads and collects tasks.
    """

    def __init__(self) -> None:
        self.has_leftovers = False
        self._clock = SystemClock()
        self._executor = make_pool("bough-default")
        self._before = set(threading.enumerate())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on a new event loop. SIGINT cancels it until it handles signals itself."""
        thresholds = gc.get_threshold()
        gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
        runner = asyncio.Runner(loop_factory=_new_loop)
        try:
            runner.get_loop().set_default_executor(self._executor)
            return runner.run(_as_main(work))
        finally:
            self._end(runner)
            gc.set_threshold(*thresholds)

    def _end(self, runner: asyncio.Runner) -> None:
        loop = runner.get_loop()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:  # also a task that raises KeyboardInterrupt now must not end the loop
            loop.run_until_complete(_as_main(asyncio.wait(tasks, timeout=END_SECONDS)))
        self._executor.shutdown(wait=False, cancel_futures=True)
        left = sorted(task.get_name() for task in asyncio.all_tasks(loop))
        left += self._join_threads(self._clock.monotonic() + END_SECONDS)
        self.has_leftovers = bool(left)
        if left:
            _log.warning("exiting although operators' code has not ended", left=left)
        else:
            runner.close()

    def _join_threads(self, deadline: float) -> list[str]:
        """Return the names of the new threads that the interpreter would wait for; wait for them to the deadline."""
        started = [thread for thread in threading.enumerate() if thread not in self._before and not thread.daemon]
        for thread in started:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return [thread.name for thread in started if thread.is_alive()]


def end_cancelled_process() -> NoReturn:
    """End the process as a crash does, so that it counts as one for the run whose code cancelled the server's task.

    The other tasks of the server have been cancelled with it: it would serve no call any more, without any sign of it.
    """
    _log.critical(
        "code of an agent or a tool cancelled the server's own task, as by cancelling all of asyncio.all_tasks(): "
        "the process ends, to be started again"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


async def _as_main(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    if isinstance(loop, SurvivingLoop):
        loop.main = asyncio.current_task()
    return await work
