"""When and how soon a dropped stream is joined again; it does no waiting itself."""

import random
import time
from dataclasses import dataclass
from typing import Final

from bough.errors import CallFailed, Unavailable, deadline_exceeded

_OF_THE_RUN: Final = frozenset({"STORAGE_FAILED", "RUN_PARKED"})
"""Why a server that is there cannot go on with a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoining:
    """How a client comes back after a drop; all in seconds.

    A delay is drawn between nothing and a bound that doubles from `first_delay` to `longest_delay` until the server
    answers ("full jitter": many clients of one restarted server spread out). `patience` is how long the server may be
    gone altogether, or unable to go on with the run; 0 never rejoins, as in `NO_REJOINING`.
    """

    first_delay: float = 0.1
    longest_delay: float = 5.0
    patience: float = 60.0

    def bound(self, attempt: int) -> float:
        """The longest delay before an attempt, counted from 0."""
        return min(self.longest_delay, self.first_delay * 2.0 ** min(attempt, 32))


NO_REJOINING: Final = Rejoining(patience=0.0)
"""For callers that come back by themselves: what drops a stream is raised."""


class Comeback:
    """The drops of one stream: how often it was dropped, since when the server is gone, and when time is up."""

    def __init__(self, rejoining: Rejoining, *, timeout: float | None) -> None:
        self._rejoining = rejoining
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._attempt = 0
        self._gone_since: float | None = None
        self._is_stuck = False

    def remaining(self) -> float | None:
        """Seconds left of the caller's time, None where it set no end; raises DeadlineExceeded when there are none."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise deadline_exceeded("The time for following the run is over; the run itself may still be going.")
        return left

    def answered(self) -> None:
        """The server is there; of a run that it cannot go on with, that says nothing."""
        if not self._is_stuck:
            self._gone_since = None

    def progressed(self) -> None:
        """The stream moved on."""
        self._attempt = 0
        self._gone_since = None
        self._is_stuck = False

    def delay_after(self, error: CallFailed) -> float:
        """How long to wait before the next attempt; raises the error where there is none to make.

        Only UNAVAILABLE is worth it: everything else is an answer. A server that says when to come back is obeyed.
        """
        if not isinstance(error, Unavailable):
            raise error
        # Only its next owner can end such a run: a server that is there is then as good as gone.
        self._is_stuck = error.reason in _OF_THE_RUN
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        delay = random.uniform(0, self._rejoining.bound(self._attempt))
        delay = max(delay, min(error.status.retry_delay or 0.0, self._rejoining.longest_delay))
        self._attempt += 1
        if now + delay - self._gone_since >= self._rejoining.patience:
            raise error
        if self._deadline is not None and now + delay >= self._deadline:
            raise deadline_exceeded(f"The server did not come back in time: {error.message}") from error
        return delay
