"""Limits on calls of a model: concurrency, rates per minute, and a circuit breaker.

Every attempt passes the limits of its model. They are counted per process and apply to live attempts only; a replayed
call passes none. Attempts wait in order of arrival. Their tokens are an estimate until the provider reports them.
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
"""Seconds by which two readings of a clock may differ because of rounding."""

_ANSWER_TOKENS: Final = 256
"""Estimated tokens of an answer without `max_output_tokens`, until its usage is reported."""
_FAILURES: Final = frozenset(
    {
        event_pb2.RETRY_REASON_TRANSPORT,
        event_pb2.RETRY_REASON_PROVIDER_ERROR,
        event_pb2.RETRY_REASON_TIMEOUT,
        event_pb2.RETRY_REASON_BAD_RESPONSE,
    }
)
"""Failures after which the next attempt is likely to fail as well. A rate limit or a refusal counts as an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """Consecutive failures after which a breaker opens (0: never), and seconds until it lets a trial attempt pass."""

    failures: int = 5
    cooldown: float = 15.0


class AttemptEnd(Enum):
    """How an attempt ended, as evidence of whether the model can be reached."""

    ANSWERED = "the provider answered, if only to refuse"
    FAILED = "the provider did not answer, or failed"
    LEFT = "the caller abandoned the attempt"


class CircuitOpen(Exception):
    """The breaker is open for `seconds` more; 0 while a probe is under way."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The breaker is open for {seconds:g} seconds.")
        self.seconds = seconds


class CircuitBreaker:
    """Circuit breaker: opens after consecutive failures, admits one trial after its cooldown, closes on an answer."""

    def __init__(self, policy: BreakerPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._failures = 0
        self._open_until: float | None = None
        self._is_trying = False

    def check(self) -> None:
        """Raise CircuitOpen if no attempt may begin."""
        if self._open_until is None:
            return
        left = self._open_until - self._clock.monotonic()
        if left > 0 or self._is_trying:
            raise CircuitOpen(max(0.0, left))

    def enter(self) -> bool:
        """Begin an attempt. Return whether it is the trial. Raises CircuitOpen."""
        self.check()
        self._is_trying = self._open_until is not None
        return self._is_trying

    def leave(self, ended: AttemptEnd, *, is_probe: bool) -> None:
        """Record the end of an attempt. One that began before the breaker opened may close it, but not prolong it."""
        if is_probe:
            self._is_trying = False
        if ended is AttemptEnd.ANSWERED:
            self._failures, self._open_until = 0, None
        elif ended is AttemptEnd.FAILED and (is_probe or self._open_until is None):
            self._failures += 1
            if is_probe or (self._policy.failures and self._failures >= self._policy.failures):
                self._open_until = self._clock.monotonic() + self._policy.cooldown


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePolicy:
    """Limits of requests and tokens in any 60 seconds, and the seconds that an attempt may wait because of them."""

    requests: int | None = None
    tokens: int | None = None
    max_wait: float = 60.0


@dataclass(slots=True, eq=False)
class Reservation:
    """An attempt's share of the rates: its time, planned or actual, and its tokens. `moved`: the time has changed."""

    tokens: int
    time: float = 0.0
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class RateQueueFull(Exception):
    """The wait would take `seconds`, which is longer than the policy allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The wait would take {seconds:g} seconds.")
        self.seconds = seconds


class RateLimiter:
    """Sliding-window rate limiter of one model: the reservations of the last minute, and those that wait."""

    def __init__(self, policy: RatePolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._recent: deque[Reservation] = deque()
        self._waiting: deque[Reservation] = deque()
        self._tokens = 0

    async def reserve(self, tokens: int) -> Reservation:
        """Wait until an attempt of an estimated number of tokens may start. Raises RateQueueFull before it waits."""
        reservation = Reservation(tokens)
        if self._policy.requests is None and self._policy.tokens is None:
            return reservation
        self._expire()
        if self._waiting or not self._fits(reservation, len(self._recent), self._tokens):
            await self._wait(reservation)
        reservation.time = self._clock.monotonic()
        self._recent.append(reservation)
        self._tokens += reservation.tokens
        self._plan()
        return reservation

    def settle(self, reservation: Reservation, tokens: int) -> None:
        """Replace an attempt's estimated tokens by those it used."""
        if reservation in self._recent:
            self._tokens += tokens - reservation.tokens
            reservation.tokens = tokens
            self._expire()
            self._plan()

    def cancel(self, reservation: Reservation) -> None:
        """Withdraw an attempt that was not made."""
        if reservation in self._recent:
            self._recent.remove(reservation)
            self._tokens -= reservation.tokens
            self._plan()

    async def _wait(self, reservation: Reservation) -> None:
        self._waiting.append(reservation)
        self._plan()
        wait = reservation.time - self._clock.monotonic()
        if wait > self._policy.max_wait:
            self._waiting.remove(reservation)
            raise RateQueueFull(wait)
        try:
            # The planned time moves both ways while it waits: other attempts settle, are withdrawn or are cancelled.
            while (wait := reservation.time - self._clock.monotonic()) > _MOMENT or self._waiting[0] is not reservation:
                reservation.moved.clear()
                await self._wait_for_move(reservation, wait)
        except BaseException:
            # Also when cancelled: a reservation that stays in the queue would block all behind it.
            self._waiting.remove(reservation)
            self._plan()
            raise
        self._waiting.popleft()
        self._expire()

    async def _wait_for_move(self, reservation: Reservation, seconds: float) -> None:
        if seconds <= _MOMENT:
            # Due, but the attempt ahead is still queued; wait until its _plan() sets `moved`.
            await reservation.moved.wait()
            return
        waits: list[Awaitable[object]] = [self._clock.sleep(seconds), reservation.moved.wait()]
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _fits(self, reservation: Reservation, requests: int, tokens: int) -> bool:
        """Return whether a reservation fits beside others. One with more tokens than the limit may pass alone."""
        policy = self._policy
        has_request = policy.requests is None or requests < policy.requests
        return has_request and (not requests or policy.tokens is None or tokens + reservation.tokens <= policy.tokens)

    def _expire(self) -> None:
        """Drop the reservations that are more than a minute old."""
        now = self._clock.monotonic()
        while self._recent and self._recent[0].time + _MINUTE <= now:
            self._tokens -= self._recent.popleft().tokens

    def _plan(self) -> None:
        """Assign each waiting reservation the earliest time that keeps the rates and the order."""
        if not self._waiting:
            return
        beside, tokens, earliest = deque(self._recent), self._tokens, self._clock.monotonic()
        for reservation in self._waiting:
            time = earliest
            while beside and (beside[0].time + _MINUTE <= time or not self._fits(reservation, len(beside), tokens)):
                expired = beside.popleft()
                time, tokens = max(time, expired.time + _MINUTE), tokens - expired.tokens
            # The first one is notified even if its time stays the same: it may wait only for the one before it.
            if time != reservation.time or reservation is self._waiting[0]:
                reservation.moved.set()
            reservation.time = earliest = time
            beside.append(reservation)
            tokens += reservation.tokens


class ModelLimiter:
    """Admits attempts to one model. Without policies it limits nothing."""

    def __init__(
        self,
        *,
        name: str = "",
        max_concurrency: int = 0,
        breaker: BreakerPolicy | None = None,
        rates: RatePolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`max_concurrency` 0: unlimited. Without `breaker` no failure keeps later attempts from the model."""
        clock = clock or SystemClock()
        self._name = name
        self._breaker = CircuitBreaker(breaker or BreakerPolicy(failures=0), clock)
        self._rates = RateLimiter(rates or RatePolicy(), clock)
        self._slots: AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
        )

    @asynccontextmanager
    async def admit(self, request: ModelRequest, meter: AttemptMeter) -> AsyncGenerator[None, None]:
        """Admit one attempt, first come, first served. Raises ModelError if it may not be made.

        Sets `meter.is_sent` once the attempt is admitted. Usage that `meter` has at the end replaces the estimate.
        """
        try:
            # Fail before waiting if the breaker is open. It may also open during the wait: _attempt() checks again.
            self._breaker.check()
            async with self._slots:
                answer = request.settings.max_output_tokens or _ANSWER_TOKENS
                reservation = await self._rates.reserve(request_tokens(request) + answer)
                try:
                    async with self._attempt(meter):
                        yield
                finally:
                    self._settle(reservation, meter)
        except CircuitOpen as error:
            raise self._refusal(
                f"failed repeatedly, so its circuit breaker is open: for {error.seconds:.0f} more seconds, and until "
                "a trial call is answered. Retry later, or change `breaker` in the server's configuration.",
                event_pb2.RETRY_REASON_CIRCUIT_OPEN,
            ) from None
        except RateQueueFull as error:
            raise self._refusal(
                f"has so many calls that this one would wait {error.seconds:.0f} seconds. "
                "Retry later, or change its rates or max_wait in the server's configuration.",
                event_pb2.RETRY_REASON_RATE_LIMITED,
                error_pb2.ERROR_REASON_MODEL_RATE_LIMITED,
            ) from None

    @asynccontextmanager
    async def _attempt(self, meter: AttemptMeter) -> AsyncGenerator[None, None]:
        is_trial = self._breaker.enter()
        meter.is_sent = True
        ended = AttemptEnd.LEFT
        try:
            yield
            ended = AttemptEnd.ANSWERED
        except ModelError as error:
            ended = AttemptEnd.FAILED if error.retry in _FAILURES else AttemptEnd.ANSWERED
            raise
        finally:
            self._breaker.leave(ended, is_probe=is_trial)

    def _settle(self, reservation: Reservation, meter: AttemptMeter) -> None:
        if not meter.is_sent:
            self._rates.cancel(reservation)
        elif meter.usage is not None:
            used = meter.usage
            total = used.total_tokens or used.input_tokens + used.output_tokens
            self._rates.settle(reservation, total or reservation.tokens)  # a usage without any count keeps the estimate

    def _refusal(
        self,
        what: str,
        retry: event_pb2.RetryReason.ValueType,
        reason: error_pb2.ErrorReason.ValueType = error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
    ) -> ModelError:
        return ModelError(f"The model {self._name!r} {what}", reason=reason, retry=retry)
