"""Whether a model is worth asking at all, by how its last attempts ended; it asks nobody and waits for nothing."""

from dataclasses import dataclass
from enum import Enum

from bough_server.clock import Clock


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


class Shut(Exception):
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
            raise Shut(max(0.0, left))

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
