"""Tasks of operators' code: those that ignore their cancellation, and exceptions that no task may raise."""

import asyncio
from typing import Any


class AbandonedTasks:
    """Tasks that were cancelled and continue all the same; each is referenced until it ends.

    An unreferenced task may be collected in any thread. Its code would see one more exception there, GeneratorExit, and
    code that swallows every exception in a loop would never leave the collector.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until it ends."""
        if not task.done():
            self._tasks.add(task)
            task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: no one waits for it any more, and asyncio would log it


def is_collected(error: BaseException, task: "asyncio.Task[Any] | None") -> bool:
    """True if an exception is that of a coroutine which is being collected, and not raised by the code of its task.

    Such an exception must be raised again as it is. `task` is the task in which the coroutine has run so far.
    """
    if not isinstance(error, GeneratorExit):
        return False
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # there is no event loop in this thread
        return True
