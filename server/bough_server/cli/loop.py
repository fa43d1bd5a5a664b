"""The event loop of commands: a server inside a command runs agents' code on it, which must not end the command."""

import asyncio
import signal
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class CommandLoop(asyncio.SelectorEventLoop):
    """An event loop that continues when code beside the command raises KeyboardInterrupt or SystemExit.

    Ctrl-C cancels the command's task first; only after that does it raise, and then ends the loop.
    """

    main: "asyncio.Task[Any] | None" = None
    """The task of the command."""

    def run_forever(self) -> None:
        """See asyncio."""
        while True:
            try:
                super().run_forever()
            except (KeyboardInterrupt, SystemExit) as error:
                if not self._is_stray(error):
                    raise
                _log(error)
            else:
                return

    def _is_stray(self, error: BaseException) -> bool:
        """True if a task or a callback raised it, and neither the command nor Ctrl-C."""
        if self.main is None or self.main.done() or self.main.cancelling():
            return False
        return any(frame.f_code is asyncio.Handle._run.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _log(error: BaseException) -> None:
    import structlog  # slow to import

    log = structlog.get_logger(__name__)
    log.error("a task or callback of operators' code tried to end the command", exc_info=error)


def run_command(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine to its end on a new event loop."""
    with asyncio.Runner(loop_factory=CommandLoop) as runner:
        return runner.run(_as_main(work))


async def _as_main(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    if isinstance(loop, CommandLoop):
        loop.main = asyncio.current_task()
    return await work


@contextmanager
def on_interrupt(handle: Callable[[], None]) -> Iterator[None]:
    """Call a function on the event loop at each Ctrl-C, for as long as the context is open."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, handle)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)  # that of the runner, which cancels the command's task
