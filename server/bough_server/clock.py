"""Where time comes from; nothing else in the server reads a clock."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that tests can hold still."""

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits for that many seconds of this clock."""
        ...


class SystemClock:
    """The machine's own time."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
