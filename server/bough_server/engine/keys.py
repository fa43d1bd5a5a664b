"""Keys of effects, which are paths from the root of a run, and the ids of the run itself."""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import event_pb2
from bough_server.history.session import SessionHistory

_ABOUT: Final = re.compile(r"\.(ok|again[0-9]+)\Z")
_FREE: Final = re.compile(r"(?![egs][0-9]+\Z)[A-Za-z0-9_-]{1,64}")


def below(scope: str, name: str) -> str:
    """Return the key of the effect `name` in a scope; the root's scope is empty."""
    return f"{scope}/{name}" if scope else name


def step(key: str) -> str:
    """Return the key that all effects of a step begin with: for "e0.1/s4.t2.ok" it is "e0.1/s4"."""
    scope, slash, name = key.rpartition("/")
    return scope + slash + name.partition(".")[0]


def is_free(name: str) -> bool:
    """True if code may give an effect this name: it cannot be read as a path, a lane or a generated number."""
    return _FREE.fullmatch(name) is not None


def covers(scope: str, key: str) -> bool:
    """True if an effect or an invocation is the scope itself, a lane of it or below it."""
    # Not a plain prefix: "e1" must not cover "e10".
    return not scope or key == scope or key.startswith((scope + "/", scope + "."))


def digest(*asked: str) -> str:
    """Return the SHA-256 of an effect's request as hex; the length of each part goes before it to delimit it."""
    hashed = hashlib.sha256()
    for part in asked:
        data = part.encode()
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return hashed.hexdigest()


def owner(key: str) -> str:
    """Return the effect that a request is about: for an approval or a recovery the tool call, else the key itself."""
    return _ABOUT.sub("", key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Identity of a run: its ids, its owner, its first event, and the session's messages when it started."""

    run_id: str
    session_id: str
    tenant_id: str
    user_id: str
    started: event_pb2.AgentEvent
    session: SessionHistory = field(default_factory=SessionHistory)

    @property
    def key_root(self) -> str:
        """The UUID from which the ids of invocations, messages and effects are derived."""
        return self.started.run_started.key_root
