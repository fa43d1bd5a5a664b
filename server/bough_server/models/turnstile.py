"""Who may ask a model now: how many at once, how often in a minute, and whether it is worth asking at all.

Every attempt goes through its model's turnstile. What that keeps is of this process alone, and influences live attempts
only: a log that is handed back passes none.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final

from bough.v1 import error_pb2, event_pb2
from bough_server.clock import Clock, SystemClock
from bough_server.errors import ModelError
from bough_server.models.breaker import Breaker, BreakerPolicy, Ended, Shut
from bough_server.models.model import Meter, ModelRequest
from bough_server.models.rates import Crowded, RatePolicy, Rates, Turn
from bough_server.models.tokens import request_tokens

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


class Turnstile:
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
    async def turn(self, request: ModelRequest, meter: Meter) -> AsyncGenerator[None, None]:
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
        except Shut as shut:
            raise self._refusal(
                f"failed again and again, and is left alone: for {shut.seconds:.0f} more seconds, and until one call "
                "that tries it is answered. Its breaker is in the server's configuration.",
                event_pb2.RETRY_REASON_CIRCUIT_OPEN,
            ) from None
        except Crowded as crowded:
            raise self._refusal(
                f"has so many calls that this one would wait {crowded.seconds:.0f} seconds for its turn. "
                "Its rates and max_wait are in the server's configuration.",
                event_pb2.RETRY_REASON_RATE_LIMITED,
            ) from None

    @asynccontextmanager
    async def _attempt(self, meter: Meter) -> AsyncGenerator[None, None]:
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

    def _settle(self, taken: Turn, meter: Meter) -> None:
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
