"""A breaker: when it opens, who may try, and what closes it."""

import pytest

from bough_server.models.limiter import AttemptEnd, BreakerPolicy, CircuitBreaker, CircuitOpen
from tests.support.held_clock import HeldClock

POLICY = BreakerPolicy(failures=3, cooldown=15.0)


def breaker(policy: BreakerPolicy = POLICY) -> tuple[CircuitBreaker, HeldClock]:
    clock = HeldClock()
    return CircuitBreaker(policy, clock), clock


def attempt(one: CircuitBreaker, *ends: AttemptEnd) -> list[bool]:
    """Attempts one after the other; gives which of them tried an open breaker."""
    trials = []
    for end in ends:
        trials.append(one.enter())
        one.leave(end, is_probe=trials[-1])
    return trials


def shut_for(one: CircuitBreaker) -> float:
    with pytest.raises(CircuitOpen) as shut:
        one.enter()
    return shut.value.seconds


def test_it_opens_after_failures_in_a_row_for_its_cooldown() -> None:
    one, clock = breaker()
    attempt(
        one,
        AttemptEnd.FAILED,
        AttemptEnd.FAILED,
        AttemptEnd.ANSWERED,
        AttemptEnd.FAILED,
        AttemptEnd.LEFT,
        AttemptEnd.FAILED,
    )
    attempt(one, AttemptEnd.FAILED)
    assert shut_for(one) == 15.0
    clock.advance(14.0)
    assert shut_for(one) == 1.0


def test_after_the_cooldown_one_attempt_tries_and_an_answer_lets_all_pass() -> None:
    one, clock = breaker()
    attempt(one, *[AttemptEnd.FAILED] * 3)
    clock.advance(15.0)
    assert one.enter() is True
    assert shut_for(one) == 0.0
    one.leave(AttemptEnd.ANSWERED, is_probe=True)
    assert attempt(one, AttemptEnd.FAILED, AttemptEnd.FAILED, AttemptEnd.ANSWERED) == [False] * 3


def test_a_trial_that_fails_opens_it_for_another_cooldown_and_one_that_was_left_lets_the_next_try() -> None:
    one, clock = breaker()
    attempt(one, *[AttemptEnd.FAILED] * 3)
    clock.advance(15.0)
    assert attempt(one, AttemptEnd.LEFT, AttemptEnd.FAILED) == [True, True]
    assert shut_for(one) == 15.0


def test_what_began_before_it_opened_closes_it_by_an_answer_and_does_not_prolong_it_by_a_failure() -> None:
    one, clock = breaker()
    early = [one.enter() for _ in range(2)]
    attempt(one, *[AttemptEnd.FAILED] * 3)
    clock.advance(5.0)
    one.leave(AttemptEnd.FAILED, is_probe=early[0])
    assert shut_for(one) == 10.0
    one.leave(AttemptEnd.ANSWERED, is_probe=early[1])
    assert attempt(one, AttemptEnd.ANSWERED) == [False]


def test_without_a_number_of_failures_it_never_opens() -> None:
    one, _ = breaker(BreakerPolicy(failures=0))
    assert attempt(one, *[AttemptEnd.FAILED] * 100) == [False] * 100
