"""The coroutines of a run as tasks, each with its scope, and whether any of them can go on; it knows no events.

A coroutine rests while only another coroutine of the run, the run's log or somebody outside can wake it. When all of
them rest the run is quiet: the moment to hand back the next recorded result, or to be interrupted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import structlog

from bough_server.engine import keys

T = TypeVar("T")

_log = structlog.get_logger(__name__)

STOP_SECONDS: Final = 1.0
"""How long cancelled tasks may take to let go; after that the run ends without them."""

_TURNS: Final = 32
"""How often a run may be found quiet before others get a turn of the event loop."""


class Waiter(Generic[T]):
    """Something that one coroutine waits for, resting, until another opens it with a value."""

    __slots__ = ("_future", "_is_over", "_is_resting", "_tasks", "_values")

    def __init__(self, tasks: "Scheduler") -> None:
        self._tasks = tasks
        self._values: list[T] = []
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_resting = False
        self._is_over = False

    def open(self, value: T) -> bool:
        """Lets the waiter go on; it is awake from this moment, before it runs. A second time does nothing.

        Gives whether it did: it does not where the waiter was ended meanwhile, or has not come yet.
        """
        if self._values or self._is_over:
            return False
        self._values.append(value)
        if not self._future.done():
            self._future.set_result(None)
        was_resting = self._is_resting
        self._end_rest()
        return was_resting

    async def wait(self) -> T:
        """The value, once there is one."""
        if not self._values:
            self._is_resting = True
            self._tasks.rest_now()
        try:
            while not self._values:
                try:
                    await self._future
                except asyncio.CancelledError:
                    if not (self._tasks.is_handing_back and self._tasks.is_cancelled_by_code()):
                        raise
                    # What the code's own time was up for is in the log already: it is handed back all the same.
                    self._future = asyncio.get_running_loop().create_future()
            return self._values[0]
        finally:
            self._is_over = True
            self._end_rest()

    def _end_rest(self) -> None:
        if self._is_resting:
            self._is_resting = False
            self._tasks.wake()


class Scheduler:
    """Every task of one run; `on_quiet` is called whenever all of them rest."""

    def __init__(self, run_id: str, on_quiet: Callable[[], None]) -> None:
        self._run_id = run_id
        self._on_quiet = on_quiet
        self._scopes: dict[asyncio.Task[Any], str] = {}
        self._awake = 1  # the coroutine that runs the root
        self._is_checking = False
        self._is_over = False
        self._turns = 0
        self._doomed: set[asyncio.Task[Any]] = set()
        self._disowned: set[asyncio.Task[Any]] = set()
        self.is_handing_back = False
        """Whether the run's log is handed back: nothing is given up then that code gives up by itself."""
        self.sleeping = 0
        """How many of those that rest only wait for time to pass."""

    def spawn(self, scope: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that ends with its scope."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._run_id}:{scope}")
        self._scopes[task] = scope
        self.wake()
        task.add_done_callback(self._ended)
        return task

    def is_own(self) -> bool:
        """Whether the current task is one of the run's, and not one that its code made."""
        try:
            return asyncio.current_task() in self._scopes
        except RuntimeError:  # a thread without an event loop
            return False

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Ends a task from outside of its code."""
        self._doomed.add(task)
        task.cancel()

    def is_cancelled_by_code(self) -> bool:
        """Whether the current task was cancelled, and by its own code: by an `asyncio.timeout`, say."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0 and task in self._scopes and task not in self._doomed

    def disown(self, task: asyncio.Task[Any]) -> None:
        """Goes on without a task that ignores its end: whether it rests does not count any more."""
        if task in self._scopes and task not in self._disowned:
            self._disowned.add(task)
            self.rest()

    async def join(self, *futures: "asyncio.Future[Any]", first: bool = False) -> None:
        """Waits for all, or the first, without owning their fate: cancelling the waiter cancels none, at any depth."""
        left = {future for future in futures if not future.done()}
        if not left or (first and len(left) < len(futures)):
            return
        gate: Waiter[None] = Waiter(self)

        def done(future: "asyncio.Future[Any]") -> None:
            left.discard(future)
            if first or not left:
                gate.open(None)

        for future in list(left):
            future.add_done_callback(done)
        try:
            await gate.wait()
        finally:
            for future in futures:
                future.remove_done_callback(done)

    async def never(self) -> None:
        """Rests for good: the coroutine was ended at this point, or is to be."""
        await Waiter[None](self).wait()

    async def abandoned(self) -> None:
        """Never returns, to code that ignores its end."""
        task = asyncio.current_task()
        if task is not None:
            self.disown(task)
        await asyncio.get_running_loop().create_future()

    async def asleep(self, waiting: Awaitable[T]) -> T:
        """Awaits the passing of time, resting."""
        self.sleeping += 1
        self.rest()
        try:
            return await waiting
        finally:
            self.sleeping -= 1
            self.wake()

    async def aside(self, waiting: Awaitable[T]) -> T:
        """Awaits something that only matters while others go on, such as the end of their time."""
        self.rest()
        try:
            return await waiting
        finally:
            self.wake()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keeps the run from being quiet while somebody outside of it works on it."""
        self.wake()
        try:
            yield
        finally:
            self.rest()

    async def stop(self, scope: str, *, spared: asyncio.Task[Any] | None = None) -> None:
        """Cancels the tasks of a scope, the deepest first, and waits for them; not for the caller's own."""
        kept = (asyncio.current_task(), spared)
        doomed = [task for task, of in self._scopes.items() if task not in kept and keys.covers(scope, of)]
        for task in sorted(doomed, key=lambda task: self._scopes.get(task, "").count("/"), reverse=True):
            self.cancel(task)
        if doomed:
            _, late = await asyncio.wait(doomed, timeout=STOP_SECONDS)
            for task in late:
                _log.warning("task ignores its cancellation", run_id=self._run_id, task=task.get_name())
                self.disown(task)

    def close(self) -> None:
        """From now on nothing is quiet: the run is over."""
        self._is_over = True

    def check_soon(self) -> None:
        """Looks whether the run is quiet, once everything that is about to be woken has been."""
        if not self._is_checking:
            self._is_checking = True
            asyncio.get_running_loop().call_soon(self._check)

    def rest(self) -> None:
        """One coroutine less that can go on."""
        self._awake -= 1
        if self._awake == 0:
            self.check_soon()

    def rest_now(self) -> None:
        """The same of a coroutine that is about to wait: where it was the last, what is quiet need not wait for a turn.

        Handing back a log would cost two turns of the event loop for each result else; now and then others get theirs.
        """
        self._awake -= 1
        if self._awake == 0:
            self._turns += 1
            if self._turns % _TURNS and not self._is_checking:
                self._check()
            else:
                self.check_soon()

    def wake(self) -> None:
        """One more."""
        self._awake += 1

    def _check(self) -> None:
        self._is_checking = False
        if self._awake == 0 and not self._is_over:
            self._on_quiet()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        # Whoever joins the task is told after this and before the check that it brings about.
        del self._scopes[task]
        self._doomed.discard(task)
        if task in self._disowned:
            self._disowned.discard(task)
        else:
            self.rest()
        if not task.cancelled():
            task.exception()  # who would read it may be ended before
