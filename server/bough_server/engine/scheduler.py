"""Tasks of a run, each with its scope, and detection of the moment when none of them can continue by itself.

A coroutine rests while only another coroutine of the run, a recorded result or an answer from outside can wake it. When
all of them rest the run is quiet: then the next recorded result is delivered, or the run is interrupted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

import structlog

from bough_server.engine import keys
from bough_server.tasks import AbandonedTasks

T = TypeVar("T")

_log = structlog.get_logger(__name__)

STOP_SECONDS: Final = 1.0
"""Seconds that cancelled tasks may take to finish; after that the run continues without them."""

_INLINE_CHECKS: Final = 32
"""Every so many checks for quiescence, one goes through the event loop so that other runs are not starved."""


class Waiter(Generic[T]):
    """A value for which one coroutine waits, resting, until another supplies it."""

    __slots__ = ("_future", "_is_over", "_is_resting", "_scheduler", "_values")

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._values: list[T] = []  # empty or one: None is a value too
        self._future: asyncio.Future[None] | None = None  # made to wait: in a replay the value is often there before
        self._is_resting = False
        self._is_over = False

    def resolve(self, value: T) -> bool:
        """Supply the value, once; return True if that wakes a coroutine.

        Return False if the waiter was cancelled meanwhile, has a value already, or has not begun to wait: then it will
        find the value.
        """
        if self._values or self._is_over:
            return False
        self._values.append(value)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
        was_resting = self._is_resting
        # Counted as awake now, not when the loop runs it: until then the run would appear idle.
        self._end_rest()
        return was_resting

    async def wait(self) -> T:
        """Wait for the value and return it."""
        if not self._values:
            self._is_resting = True
            self._scheduler.rest_now()
        try:
            while not self._values:
                # A new one each time: a future that was cancelled cannot be awaited again.
                self._future = asyncio.get_running_loop().create_future()
                try:
                    await self._future
                except asyncio.CancelledError:
                    if not (self._scheduler.is_replaying and self._scheduler.is_cancelled_by_code()):
                        raise
                    # The code's own timeout fired during the replay, but its result is in the log: the first execution
                    # was in time. Swallow the cancellation and wait on.
            return self._values[0]
        finally:
            self._is_over = True
            self._end_rest()

    def _end_rest(self) -> None:
        if self._is_resting:
            self._is_resting = False
            self._scheduler.wake()


class Scheduler:
    """Every task of one run; `on_quiet` is called whenever all of them rest."""

    def __init__(self, run_id: str, on_quiet: Callable[[], None], abandoned: AbandonedTasks | None = None) -> None:
        self.abandoned_tasks = AbandonedTasks() if abandoned is None else abandoned
        """Tasks that ignore their cancellation; they may outlive the run."""
        self._run_id = run_id
        self._on_quiet = on_quiet
        self._scopes: dict[asyncio.Task[Any], str] = {}
        self._awake = 1  # the coroutine that runs the root
        self._is_checking = False
        self._is_over = False
        self._checks = 0
        self._doomed: set[asyncio.Task[Any]] = set()
        """Tasks that the run itself cancelled, in contrast to those that their own code cancels."""
        self._disowned: set[asyncio.Task[Any]] = set()
        """Tasks that ignored their cancellation; they no longer count as awake."""
        self.is_replaying = False
        """True while recorded results are delivered: timeouts of agent code do not cancel a wait for one then."""
        self.sleeping = 0
        """How many of the resting coroutines sleep for a fixed time."""

    def spawn(self, scope: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that is cancelled with its scope."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._run_id}:{scope}")
        self._scopes[task] = scope
        # Before its first step: between here and there the run must not appear idle.
        self.wake()
        task.add_done_callback(self._on_task_end)
        return task

    def is_own(self) -> bool:
        """True if the current task belongs to the run, and was not created by agent code."""
        try:
            return asyncio.current_task() in self._scopes
        except RuntimeError:  # a thread without an event loop
            return False

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task on behalf of the run."""
        self._doomed.add(task)
        task.cancel()

    def is_cancelled_by_code(self) -> bool:
        """True if the current task was cancelled by its own code, as `asyncio.timeout` does, and not by the run."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0 and task in self._scopes and task not in self._doomed

    def disown(self, task: asyncio.Task[Any]) -> None:
        """Stop counting a task that ignores its cancellation: it must not keep the run from being quiet."""
        if task in self._scopes and task not in self._disowned:
            self._disowned.add(task)
            self.abandoned_tasks.add(task)
            self.rest()

    async def join(self, *futures: "asyncio.Future[Any]", first: bool = False) -> None:
        """Wait for all futures, or for the first, without cancelling any of them if the caller is cancelled."""
        # Not `await task` or asyncio.gather: cancelling those cancels what they wait for, recursively through all the
        # agents below.
        left = {future for future in futures if not future.done()}
        if not left or (first and len(left) < len(futures)):
            return
        waiter: Waiter[None] = Waiter(self)

        def on_done(future: "asyncio.Future[Any]") -> None:
            left.discard(future)
            if first or not left:
                waiter.resolve(None)

        for future in list(left):
            future.add_done_callback(on_done)
        try:
            await waiter.wait()
        finally:
            for future in futures:
                future.remove_done_callback(on_done)

    async def rest_forever(self) -> None:
        """Rest until cancelled: the log says that the coroutine was cancelled here, or it is about to be."""
        await Waiter[None](self).wait()

    async def block_forever(self) -> None:
        """Never return, to code that ignores its cancellation."""
        task = asyncio.current_task()
        if task is not None:
            self.disown(task)
        await asyncio.get_running_loop().create_future()

    async def await_sleep(self, waiting: Awaitable[T]) -> T:
        """Await a sleep, resting; it keeps the run from being interrupted."""
        self.sleeping += 1
        self.rest()
        try:
            return await waiting
        finally:
            self.sleeping -= 1
            self.wake()

    async def await_aside(self, waiting: Awaitable[T]) -> T:
        """Await something that matters only while others run, such as their timeout; it does not keep the run awake."""
        self.rest()
        try:
            return await waiting
        finally:
            self.wake()

    async def stop(self, scope: str, *, spared: asyncio.Task[Any] | None = None) -> None:
        """Cancel the tasks of a scope, the deepest first, and wait for them; the caller's own and `spared` excepted."""
        excepted = (asyncio.current_task(), spared)
        doomed = [task for task, of in self._scopes.items() if task not in excepted and keys.covers(scope, of)]
        for task in sorted(doomed, key=lambda task: self._scopes.get(task, "").count("/"), reverse=True):
            self.cancel(task)
        if doomed:
            _, late = await asyncio.wait(doomed, timeout=STOP_SECONDS)
            for task in late:  # code that catches CancelledError, or blocks: it must not hold up the end of the run
                _log.warning("task ignores its cancellation", run_id=self._run_id, task=task.get_name())
                self.disown(task)

    def close(self) -> None:
        """Stop calling `on_quiet`: the run is over."""
        self._is_over = True

    def check_soon(self) -> None:
        """Check for quiescence in the next iteration of the event loop, after the callbacks that are due now."""
        if not self._is_checking:
            self._is_checking = True
            # call_soon is first in, first out: done callbacks that wake a coroutine run before the check.
            asyncio.get_running_loop().call_soon(self._check)

    def rest(self) -> None:
        """Count one coroutine less as awake; if it was the last, check for quiescence soon."""
        self._awake -= 1
        if self._awake == 0:
            self.check_soon()

    def rest_now(self) -> None:
        """Like rest(), for a coroutine about to await. If it was the last one awake, check for quiescence now.

        This saves two loop iterations per replayed result. Every 32nd time, yield so that other runs are not starved.
        """
        self._awake -= 1
        if self._awake == 0:
            self._checks += 1
            # Not inline if a check is due: callbacks ahead of it in the loop may be about to wake a coroutine.
            if self._checks % _INLINE_CHECKS and not self._is_checking:
                self._check()
            else:
                self.check_soon()

    def wake(self) -> None:
        """Count one coroutine more as awake."""
        self._awake += 1

    def _check(self) -> None:
        self._is_checking = False
        if self._awake == 0 and not self._is_over:
            self._on_quiet()

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        # Added in spawn(), so it runs before the callbacks of join(); those wake the joining coroutine before the
        # check that rest() schedules here.
        del self._scopes[task]
        self._doomed.discard(task)
        if task in self._disowned:
            self._disowned.discard(task)
        else:
            self.rest()
        if not task.cancelled():
            task.exception()  # mark it as retrieved: its reader may be cancelled first, and asyncio would log it
