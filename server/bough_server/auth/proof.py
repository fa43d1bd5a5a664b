"""What proves a caller, and the errors of calls that nothing proves."""

from collections.abc import Callable
from dataclasses import dataclass

from bough_server.auth.sections import ActsFor
from bough_server.errors import Unauthenticated
from bough_server.identity import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A caller that a token or a certificate has proved."""

    caller: Caller
    acts_for: ActsFor | None = None
    """Whom the caller may name in its place: users of its tenant, or of any tenant."""
    holds: Callable[[], bool] = lambda: True
    """Return whether it would still prove the caller; its expiry aside."""


def build_invalid_error(why: str) -> Unauthenticated:
    """Return the error of a call whose proof is not accepted; only the log says why."""
    return Unauthenticated("The token or certificate of the call is not valid here.", why=why)


def build_expired_error() -> Unauthenticated:
    """Return the error of a call whose proof has expired."""
    return Unauthenticated("The token has expired: get a new one.", why="it has expired")


def build_missing_error() -> Unauthenticated:
    """Return the error of a call without a proof."""
    return Unauthenticated(
        "The call has no token: send one as the metadata `authorization: Bearer TOKEN`.", why="it has no token"
    )
