"""Keys of effects: paths from the root of a run, and what lies below what; see the replay design, "Keys"."""

import hashlib


def below(scope: str, name: str) -> str:
    """The key of an effect `name` in a scope; the root's scope is empty."""
    return f"{scope}/{name}" if scope else name


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
