"""Source of time; no other module of the server reads a clock."""

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
