"""Keys of effects, paths from the root of a run (see the replay design, "Keys"), and the ids of the run itself."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2
from bough_server.store.ports import StoredMessage

_ABOUT: Final = re.compile(r"\.(ok|again[0-9]+)\Z")
_FREE: Final = re.compile(r"(?![egs][0-9]+\Z)[A-Za-z0-9_-]{1,64}")


def below(scope: str, name: str) -> str:
    """The key of an effect `name` in a scope; the root's scope is empty."""
    return f"{scope}/{name}" if scope else name


def is_free(name: str) -> bool:
    """Whether code may give an effect this name: it reads as no path, no lane and no number of an effect or step."""
    return _FREE.fullmatch(name) is not None


def covers(scope: str, key: str) -> bool:
    """Whether an effect or an invocation lies in a scope: is it, a lane of it, or below it."""
    return not scope or key == scope or key.startswith((scope + "/", scope + "."))


def digest(*asked: str) -> str:
    """SHA-256 hex of what an effect was asked; parts are kept apart by their lengths."""
    hashed = hashlib.sha256()
    for part in asked:
        data = part.encode()
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return hashed.hexdigest()


def owner(key: str) -> str:
    """The effect that a request is about: of an approval the call, of any other the effect that asks itself."""
    return _ABOUT.sub("", key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run is: its ids, its first event, and the session as it was when it began."""

    run_id: str
    session_id: str
    user_id: str
    started: event_pb2.AgentEvent
    session: Sequence[StoredMessage] = ()

    @property
    def key_root(self) -> str:
        """The UUID that the run's ids are derived from."""
        return self.started.run_started.key_root
