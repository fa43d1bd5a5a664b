"""Retry policy of dropped streams: whether to rejoin the run, and after which delay."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from bough.errors import NO_SERVER, CallFailed, Unavailable, build_deadline_error

_OF_THE_RUN: Final = frozenset({"STORAGE_FAILED", "RUN_PARKED"})
"""Reasons why a reachable server cannot continue a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoining:
    """Backoff of a client that rejoins a run after a dropped connection; all in seconds.

    A delay is random between 0 and a bound that doubles from `first_delay` to `longest_delay` until the stream makes
    progress ("full jitter": many clients of one restarted server spread out). `timeout` is how long in all the server
    may be unreachable, or unable to continue the run; 0 never rejoins, as in `NO_REJOINING`. `connect_timeout` is the
    same, from the beginning of the stream, for a client that has never reached its server: it is probably not running,
    or at another address. `on_drop` is called with the
    error when a stream begins to rejoin, once in each outage.
    """

    first_delay: float = 0.1
    longest_delay: float = 5.0
    timeout: float = 60.0
    connect_timeout: float = 0.5
    on_drop: Callable[[CallFailed], None] | None = None

    def bound(self, attempt: int) -> float:
        """Return the longest delay before an attempt, counted from 0."""
        return min(self.longest_delay, self.first_delay * 2.0 ** min(attempt, 32))


NO_REJOINING: Final = Rejoining(timeout=0.0)
"""For callers that rejoin by themselves: the error that drops a stream is raised."""


class Contact:
    """Whether a client has ever reached its server."""

    def __init__(self) -> None:
        self.is_made = False

    def note_failure(self, error: CallFailed) -> None:
        """Record a failed call: any error but that of a connection that could not be made shows a server."""
        self.is_made = self.is_made or not error.message.startswith(NO_SERVER)


class RejoinBackoff:
    """Drops of one stream: attempts without progress, since when the server is unavailable, and the deadline."""

    def __init__(
        self, rejoining: Rejoining, *, timeout: float | None, contact: Contact | None = None, subject: str = "run"
    ) -> None:
        self._rejoining, self._subject = rejoining, subject
        self._contact = contact or Contact()
        self._began = time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        self._attempt = 0
        self._gone_since: float | None = None
        self._is_stuck = False
        self._is_authenticated = False

    def remaining(self) -> float | None:
        """Return the seconds left until the caller's deadline, None without one; raises DeadlineExceeded after it."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise build_deadline_error(
                f"The time for following the {self._subject} is over; the {self._subject} itself may still be running."
            )
        return left

    def note_answer(self) -> None:
        """Record that the server is reachable; ignored while it cannot continue the run."""
        self._contact.is_made = self._is_authenticated = True
        if not self._is_stuck:
            self._gone_since = None

    def note_progress(self) -> None:
        """Record that the stream received a response."""
        self._contact.is_made = self._is_authenticated = True
        self._attempt = 0
        self._gone_since = None
        self._is_stuck = False

    def delay_after(self, error: CallFailed, *, is_stuck: bool = False) -> float:
        """Return the seconds to wait before the next attempt; raises the error if it ends the stream.

        `is_stuck` if the server answers and yet does not continue: until there is progress, that is an outage too.
        Only UNAVAILABLE is retried, and UNAUTHENTICATED of a call that the server has accepted before: its token has
        expired, and the next call has the present one. Every other status is final. The server's retry delay is a lower
        bound, itself bounded by `longest_delay`.
        """
        self._contact.note_failure(error)
        if error.code is grpc.StatusCode.UNAUTHENTICATED and self._is_authenticated and self._rejoining.timeout > 0:
            self._is_authenticated = False
            return 0.0
        if not isinstance(error, Unavailable):
            raise error
        # Until another server takes such a run over, a reachable server is no better than an unreachable one.
        self._is_stuck = is_stuck or error.reason in _OF_THE_RUN
        now = time.monotonic()
        is_new = self._gone_since is None
        self._gone_since = now if self._gone_since is None else self._gone_since
        delay = random.uniform(0, self._rejoining.bound(self._attempt))
        delay = max(delay, min(error.status.retry_delay or 0.0, self._rejoining.longest_delay))
        self._attempt += 1
        if self._is_given_up(now + delay):
            raise error
        if self._deadline is not None and now + delay >= self._deadline:
            raise build_deadline_error(f"The server did not become available in time: {error.message}") from error
        if is_new and self._rejoining.on_drop is not None:
            self._rejoining.on_drop(error)
        return delay

    def _is_given_up(self, time_of_attempt: float) -> bool:
        """Return whether the next attempt, at this time, would come too late."""
        assert self._gone_since is not None, "an attempt failed"
        if self._contact.is_made:
            return time_of_attempt - self._gone_since >= self._rejoining.timeout
        return time_of_attempt - self._began >= min(self._rejoining.timeout, self._rejoining.connect_timeout)
