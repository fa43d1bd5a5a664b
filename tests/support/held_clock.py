"""A clock that stands still until a test moves it, so that sleeping by it takes no real time."""

import asyncio
import heapq


class HeldClock:
    """A clock for tests: a sleeper waits until `advance` has moved the time far enough."""

    def __init__(self, now_ns: int = 1_750_000_000_000_000_000) -> None:
        self._started_ns = now_ns
        self._elapsed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = 0
        self._slept = asyncio.Condition()

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return self._started_ns + int(self._elapsed * 1e9)

    def monotonic(self) -> float:
        """Seconds since the test began."""
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        """Waits until the time has been moved by that much."""
        if seconds <= 0:
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbers += 1
        heapq.heappush(self._sleepers, (self._elapsed + seconds, self._numbers, wake))
        async with self._slept:
            self._slept.notify_all()
        await wake

    async def next_sleep(self, tasks: int = 1) -> float:
        """Wait until so many tasks sleep; return the seconds until the first one wakes."""
        async with self._slept:
            await self._slept.wait_for(lambda: sum(not wake.done() for _, _, wake in self._sleepers) >= tasks)
        return min(until for until, _, wake in self._sleepers if not wake.done()) - self._elapsed

    def turn(self, seconds: float) -> None:
        """Set the time of day, as a correction of the clock does: no sleeper wakes, and no time passes."""
        self._started_ns += int(seconds * 1e9)

    def halt(self, seconds: float) -> None:
        """Move the time without waking a task, as for a process that is stopped."""
        self._elapsed += seconds

    def advance(self, seconds: float) -> None:
        """Move the time and wake every task that has slept long enough."""
        self._elapsed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed + 1e-9:
            _, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
