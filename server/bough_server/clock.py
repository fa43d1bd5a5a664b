"""Source of time; no other module of the server reads a clock, which `tests.structure` checks.

A server gets its `Clock` when it is opened, and passes it down to all that measures or waits. Timers and timeouts of
asyncio go by the event loop's clock. Two things have their own time: libraries, such as that of a line of the log or of
a span, and PostgreSQL, which ends the abandoned transactions of others by its `clock_timestamp()`.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that tests can replace."""

    def now_ns(self) -> int:
        """Return nanoseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds of this clock."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def loop_time() -> float:
    """Return the seconds of the running event loop's clock, by which its timers are set."""
    return asyncio.get_running_loop().time()
