"""Keys of effects: paths from the root of a run, and what lies below what; see the replay design, "Keys"."""

import hashlib
import re
from typing import Final

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
