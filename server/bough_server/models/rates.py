"""When an attempt has its turn, so that no minute has more requests or tokens than a model's rates; it sends nothing.

Whoever came first goes first. Tokens are an estimate until the provider has said how many there were.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Final

from bough_server.clock import Clock

_MINUTE: Final = 60.0
_MOMENT: Final = 1e-6
"""What two readings of a clock may differ by through rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePolicy:
    """The most requests and tokens of any 60 seconds, and how many seconds an attempt may wait for its turn."""

    requests: int | None = None
    tokens: int | None = None
    max_wait: float = 60.0


@dataclass(slots=True, eq=False)
class Turn:
    """An attempt's place: when it is its turn, and what it takes. One that waits is told when its time changes."""

    tokens: int
    time: float = 0.0
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class Crowded(Exception):
    """The wait would be longer than the policy allows, by so many seconds in all."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The wait would take {seconds:g} seconds.")
        self.seconds = seconds


class Rates:
    """The turns of one model: those of the last minute, and those that wait."""

    def __init__(self, policy: RatePolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._had: deque[Turn] = deque()
        self._line: deque[Turn] = deque()
        self._tokens = 0

    async def take(self, tokens: int) -> Turn:
        """Waits for the turn of an attempt that is likely to take so many tokens. Raises Crowded at once."""
        turn = Turn(tokens)
        if self._policy.requests is None and self._policy.tokens is None:
            return turn
        self._forget()
        if self._line or not self._fits(turn, len(self._had), self._tokens):
            await self._wait(turn)
        turn.time = self._clock.monotonic()
        self._had.append(turn)
        self._tokens += turn.tokens
        self._plan()
        return turn

    def settle(self, turn: Turn, tokens: int) -> None:
        """Says how many tokens an attempt took after all."""
        if turn in self._had:
            self._tokens += tokens - turn.tokens
            turn.tokens = tokens
            self._forget()
            self._plan()

    def give_back(self, turn: Turn) -> None:
        """Says that an attempt was not made after all."""
        if turn in self._had:
            self._had.remove(turn)
            self._tokens -= turn.tokens
            self._plan()

    async def _wait(self, turn: Turn) -> None:
        self._line.append(turn)
        self._plan()
        wait = turn.time - self._clock.monotonic()
        if wait > self._policy.max_wait:
            self._line.remove(turn)
            raise Crowded(wait)
        try:
            while (wait := turn.time - self._clock.monotonic()) > _MOMENT or self._line[0] is not turn:
                turn.moved.clear()
                await self._until_moved(turn, wait)
        except BaseException:
            self._line.remove(turn)
            self._plan()
            raise
        self._line.popleft()
        self._forget()

    async def _until_moved(self, turn: Turn, seconds: float) -> None:
        if seconds <= _MOMENT:  # its time has come, and whoever is before it is about to go
            await turn.moved.wait()
            return
        waits: list[Awaitable[object]] = [self._clock.sleep(seconds), turn.moved.wait()]
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _fits(self, turn: Turn, requests: int, tokens: int) -> bool:
        """Whether a turn may be taken beside others; one that is too large by itself may be taken alone."""
        policy = self._policy
        has_request = policy.requests is None or requests < policy.requests
        return has_request and (not requests or policy.tokens is None or tokens + turn.tokens <= policy.tokens)

    def _forget(self) -> None:
        """Leaves out what was more than a minute ago."""
        now = self._clock.monotonic()
        while self._had and self._had[0].time + _MINUTE <= now:
            self._tokens -= self._had.popleft().tokens

    def _plan(self) -> None:
        """Gives everybody who waits the earliest time that keeps the rates and the order."""
        if not self._line:
            return
        beside, tokens, earliest = deque(self._had), self._tokens, self._clock.monotonic()
        for turn in self._line:
            time = earliest
            while beside and (beside[0].time + _MINUTE <= time or not self._fits(turn, len(beside), tokens)):
                gone = beside.popleft()
                time, tokens = max(time, gone.time + _MINUTE), tokens - gone.tokens
            if time != turn.time or turn is self._line[0]:
                turn.moved.set()
            turn.time = earliest = time
            beside.append(turn)
            tokens += turn.tokens
