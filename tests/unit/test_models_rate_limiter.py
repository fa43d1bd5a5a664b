"""Turns by rates: no minute has more than is allowed, first come is first served, and no call waits for ever."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough_server.models.limiter import RateLimiter, RatePolicy, RateQueueFull, Reservation
from tests.support.held_clock import HeldClock


async def settled() -> None:
    """Lets every task go as far as it can."""
    for _ in range(25):
        await asyncio.sleep(0)


class AttemptQueue:
    """Attempts that take their turns, and when each had it."""

    def __init__(self, **policy: float | None) -> None:
        self.clock = HeldClock()
        self.rates = RateLimiter(RatePolicy(**policy), self.clock)  # type: ignore[arg-type]
        self.went: list[tuple[int, float]] = []
        self.reservations: dict[int, Reservation] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def come(self, number: int, tokens: int = 1) -> None:
        """An attempt arrives."""
        self._tasks[number] = asyncio.create_task(self._take(number, tokens))
        await settled()

    async def leave(self, number: int) -> None:
        """An attempt is cancelled."""
        self._tasks[number].cancel()
        await settled()

    async def pass_time(self, seconds: float) -> None:
        """Time passes, a second at a time."""
        while seconds > 0:
            self.clock.advance(min(1.0, seconds))
            seconds -= 1.0
            await settled()

    async def close(self) -> None:
        """Cancel every call that still waits."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _take(self, number: int, tokens: int) -> None:
        self.reservations[number] = await self.rates.reserve(tokens)
        self.went.append((number, self.clock.monotonic()))


async def test_without_rates_no_call_waits() -> None:
    queue = AttemptQueue()
    for number in range(100):
        await queue.come(number, tokens=1_000_000)
    assert queue.went == [(number, 0.0) for number in range(100)]


async def test_a_minute_has_no_more_requests_than_allowed_and_the_next_goes_when_the_first_is_a_minute_old() -> None:
    queue = AttemptQueue(requests=2, max_wait=600.0)
    await queue.come(0)
    await queue.pass_time(10)
    for number in (1, 2, 3, 4):
        await queue.come(number)
    await queue.pass_time(49)
    assert queue.went == [(0, 0.0), (1, 10.0)]
    await queue.pass_time(100)
    assert queue.went[2:] == [(2, 60.0), (3, 70.0), (4, 120.0)]


async def test_a_minute_has_no_more_tokens_than_allowed_and_a_small_attempt_overtakes_no_large_one() -> None:
    queue = AttemptQueue(tokens=100, max_wait=600.0)
    for number, tokens in enumerate((60, 60, 10, 30)):
        await queue.come(number, tokens)
    assert queue.went == [(0, 0.0)]
    await queue.pass_time(60)
    assert queue.went[1:] == [(1, 60.0), (2, 60.0), (3, 60.0)]


async def test_an_attempt_larger_than_a_minute_goes_alone() -> None:
    queue = AttemptQueue(tokens=100, max_wait=600.0)
    await queue.come(0, 10)
    await queue.come(1, 500)
    await queue.come(2, 10)
    await queue.pass_time(120)
    assert queue.went == [(0, 0.0), (1, 60.0), (2, 120.0)]


async def test_what_an_attempt_took_after_all_lets_others_go_sooner_or_later() -> None:
    queue = AttemptQueue(tokens=100, max_wait=600.0)
    await queue.come(0, 80)
    await queue.come(1, 50)
    queue.rates.settle(queue.reservations[0], 20)
    await settled()
    assert queue.went == [(0, 0.0), (1, 0.0)]
    queue.rates.settle(queue.reservations[1], 90)
    await queue.come(2, 1)
    await queue.pass_time(60)
    assert queue.went[2:] == [(2, 60.0)]


async def test_an_attempt_that_was_not_made_gives_its_turn_back() -> None:
    queue = AttemptQueue(requests=1)
    await queue.come(0)
    await queue.come(1)
    queue.rates.cancel(queue.reservations[0])
    await settled()
    assert queue.went == [(0, 0.0), (1, 0.0)]


async def test_a_call_that_stops_waiting_lets_the_next_go() -> None:
    queue = AttemptQueue(requests=1, max_wait=200.0)
    for number in range(4):
        await queue.come(number)
    await queue.leave(1)
    await queue.pass_time(120)
    assert queue.went == [(0, 0.0), (2, 60.0), (3, 120.0)]


async def test_a_wait_that_would_be_too_long_is_refused_at_once() -> None:
    queue = AttemptQueue(requests=1, max_wait=60.0)
    for number in range(2):
        await queue.come(number)
    with pytest.raises(RateQueueFull) as refused:
        await queue.rates.reserve(1)
    assert refused.value.seconds == 120.0
    await queue.pass_time(60)
    assert queue.went == [(0, 0.0), (1, 60.0)]
    await queue.come(2)
    await queue.pass_time(60)
    assert queue.went[2:] == [(2, 120.0)]


moves = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 60)),
        st.tuples(st.just("pass"), st.integers(1, 90)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("settle"), st.integers(0, 20)),
    ),
    max_size=25,
)


@settings(deadline=None)  # a clock on the wall says nothing of turns
@given(requests=st.integers(1, 4), tokens=st.integers(20, 100), moves=moves)
def test_in_any_minute_the_rates_hold_and_the_order_is_kept(
    requests: int, tokens: int, moves: Sequence[tuple[str, int]]
) -> None:
    async def play() -> None:
        queue = AttemptQueue(requests=requests, tokens=tokens, max_wait=100_000.0)
        taken: dict[int, int] = {}
        for move, number in moves:
            if move == "come":
                taken[len(taken)] = number
                await queue.come(len(taken) - 1, number)
            elif move == "pass":
                await queue.pass_time(number)
            elif move == "leave" and number in taken and number not in queue.reservations:
                await queue.leave(number)
            elif move == "settle" and number in queue.reservations:
                taken[number] //= 2
                queue.rates.settle(queue.reservations[number], taken[number])
                await settled()
        await queue.pass_time(60 * len(taken))
        await queue.close()
        order = [number for number, _ in queue.went]
        assert order == sorted(order)
        for place, (first, begin) in enumerate(queue.went):
            within = [number for number, time in queue.went[place:] if time < begin + 60.0]
            assert len(within) <= requests
            assert sum(taken[number] for number in within) <= tokens or within == [first]

    asyncio.run(play())
