"""Whether the store can write just now: what became of the last write, and how long one has been under way.

It lives on the event loop and writes nothing. The writer thread tells it, and looks again while writes fail.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from bough_server.errors import StorageFailed

STALL_SECONDS: Final = 5.0
"""From how long on a write that has not ended is one of a disk that does not answer."""

_GRACE: Final = 0.1


class Writing:
    """The state of all writes together."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._jobs = 0
        self._since = 0.0
        self._is_failing = self._is_stalled = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def is_possible(self) -> bool:
        """Whether the last write was written, and none waits too long."""
        return not (self._is_failing or self._is_stalled)

    def check(self) -> None:
        """Raises StorageFailed where what was queued before has waited too long."""
        if self._is_stalled:
            raise StorageFailed("The server's storage does not answer: nothing new is taken until it does.")

    def begin(self) -> None:
        """A job is queued."""
        loop = asyncio.get_running_loop()
        if not self._jobs:
            self._since = loop.time()
        self._jobs += 1
        if self._timer is None:
            self._timer = loop.call_later(self._stall_seconds, self._look)

    def end(self, jobs: int) -> None:
        """So many jobs are settled."""
        self._jobs -= jobs
        self._since = asyncio.get_running_loop().time()
        self._turn(is_failing=self._is_failing, is_stalled=False)

    def tell(self, is_failing: bool) -> None:
        """Whether the disk refused the last write that there was."""
        self._turn(is_failing=is_failing, is_stalled=self._is_stalled)

    async def turns(self) -> AsyncIterator[bool]:
        """Whether writing is possible: as it is now, and at every change."""
        was: bool | None = None
        while True:
            changed, now = self._changed, self.is_possible
            if now is not was:
                was = now
                yield now
            else:
                await changed.wait()

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, is_suspected: bool = False) -> None:
        self._timer = None
        if not self._jobs:
            return
        loop = asyncio.get_running_loop()
        left = self._since + self._stall_seconds - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._look)
        elif not is_suspected:
            # Where the loop was held up, what ended meanwhile is told first.
            self._timer = loop.call_later(_GRACE, self._look, True)
        else:
            self._turn(is_failing=self._is_failing, is_stalled=True)
            self._timer = loop.call_later(self._stall_seconds, self._look)

    def _turn(self, *, is_failing: bool, is_stalled: bool) -> None:
        if (is_failing, is_stalled) == (self._is_failing, self._is_stalled):
            return
        self._is_failing, self._is_stalled = is_failing, is_stalled
        self._changed.set()
        self._changed = asyncio.Event()
