"""Limits of a provider's calls: concurrency, rates per minute, and a circuit breaker.

Every attempt passes the limits of its model. They count in this process alone and apply to live attempts only: a
replayed call passes none. Attempts wait in the order of their arrival; tokens are an estimate until the provider has
reported them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from bough.v1 import error_pb2, event_pb2
from bough_server.clock import Clock, SystemClock
from bough_server.errors import ModelError
from bough_server.models.model import AttemptMeter, ModelRequest
from bough_server.models.tokens import request_tokens

_MINUTE: Final = 60.0
_MOMENT: Final = 1e-6
"""What two readings of a clock may differ by through rounding."""

_ANSWER_TOKENS: Final = 256
"""What an answer is taken for that has no bound of its own, until it is known."""
_FAILURES: Final = frozenset(
    {
        event_pb2.RETRY_REASON_TRANSPORT,
        event_pb2.RETRY_REASON_PROVIDER_ERROR,
        event_pb2.RETRY_REASON_TIMEOUT,
        event_pb2.RETRY_REASON_BAD_RESPONSE,
    }
)
"""Failures after which the next attempt is likely to fail as well. A limited rate or a refusal is an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """After how many failures in a row a model is left alone, and for how many seconds; 0 failures: never."""

    failures: int = 5
    cooldown: float = 15.0


class Ended(Enum):
    """How an attempt ended, as far as it tells whether the model can be reached."""

    ANSWERED = "the provider answered, if only to refuse"
    FAILED = "the provider did not answer, or failed"
    LEFT = "nobody waited for the answer"


class CircuitOpen(Exception):
    """The model is left alone for some more seconds; 0 where one attempt tries it at this moment."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The breaker is open for {seconds:g} seconds.")
        self.seconds = seconds


class Breaker:
    """Opens after failures in a row. After its cooldown one attempt may try; if that is answered, all may."""

    def __init__(self, policy: BreakerPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._failures = 0
        self._open_until: float | None = None
        self._is_trying = False

    def check(self) -> None:
        """Raises Shut where no attempt may begin."""
        if self._open_until is None:
            return
        left = self._open_until - self._clock.monotonic()
        if left > 0 or self._is_trying:
            raise CircuitOpen(max(0.0, left))

    def enter(self) -> bool:
        """Begins an attempt; gives whether it is the one that tries. Raises Shut."""
        self.check()
        self._is_trying = self._open_until is not None
        return self._is_trying

    def leave(self, ended: Ended, *, is_trial: bool) -> None:
        """An attempt has ended. What began before the breaker opened may close it, and not prolong it."""
        if is_trial:
            self._is_trying = False
        if ended is Ended.ANSWERED:
            self._failures, self._open_until = 0, None
        elif ended is Ended.FAILED and (is_trial or self._open_until is None):
            self._failures += 1
            if is_trial or (self._policy.failures and self._failures >= self._policy.failures):
                self._open_until = self._clock.monotonic() + self._policy.cooldown


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


class RateQueueFull(Exception):
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
            raise RateQueueFull(wait)
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


class ModelLimiter:
    """The way to one model. Without a policy it bounds nothing."""

    def __init__(
        self,
        *,
        name: str = "",
        max_concurrency: int = 0,
        breaker: BreakerPolicy | None = None,
        rates: RatePolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        """0 calls at once are any number; without a breaker the model is always asked."""
        clock = clock or SystemClock()
        self._name = name
        self._breaker = Breaker(breaker or BreakerPolicy(failures=0), clock)
        self._rates = Rates(rates or RatePolicy(), clock)
        self._place: AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
        )

    @asynccontextmanager
    async def turn(self, request: ModelRequest, meter: AttemptMeter) -> AsyncGenerator[None, None]:
        """One attempt's turn; whoever came first goes first. Raises ModelError where it may not be made.

        The meter is told when the attempt goes to its provider; what it says of usage afterwards is counted.
        """
        try:
            self._breaker.check()
            async with self._place:
                answer = request.settings.max_output_tokens or _ANSWER_TOKENS
                taken = await self._rates.take(request_tokens(request) + answer)
                try:
                    async with self._attempt(meter):
                        yield
                finally:
                    self._settle(taken, meter)
        except CircuitOpen as shut:
            raise self._refusal(
                f"failed again and again, and is left alone: for {shut.seconds:.0f} more seconds, and until one call "
                "that tries it is answered. Its breaker is in the server's configuration.",
                event_pb2.RETRY_REASON_CIRCUIT_OPEN,
            ) from None
        except RateQueueFull as crowded:
            raise self._refusal(
                f"has so many calls that this one would wait {crowded.seconds:.0f} seconds for its turn. "
                "Its rates and max_wait are in the server's configuration.",
                event_pb2.RETRY_REASON_RATE_LIMITED,
            ) from None

    @asynccontextmanager
    async def _attempt(self, meter: AttemptMeter) -> AsyncGenerator[None, None]:
        is_trial = self._breaker.enter()
        meter.is_sent = True
        ended = Ended.LEFT
        try:
            yield
            ended = Ended.ANSWERED
        except ModelError as error:
            ended = Ended.FAILED if error.retry in _FAILURES else Ended.ANSWERED
            raise
        finally:
            self._breaker.leave(ended, is_trial=is_trial)

    def _settle(self, taken: Turn, meter: AttemptMeter) -> None:
        if not meter.is_sent:
            self._rates.give_back(taken)
        elif meter.usage is not None:
            used = meter.usage
            total = used.total_tokens or used.input_tokens + used.output_tokens
            self._rates.settle(taken, total or taken.tokens)

    def _refusal(self, what: str, retry: event_pb2.RetryReason.ValueType) -> ModelError:
        return ModelError(
            f"The model {self._name!r} {what}", reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, retry=retry
        )
