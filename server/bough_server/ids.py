"""Ids: new ones for runs and sessions, and ids derived from a run's key root; ids inside a run are never random.

No other module draws randomness from the system: `tests.structure` checks it. What an agent sees as random, and the
delays of retries, come from generators that are seeded with such an id.
"""

import hashlib
import os
import re
import uuid
from functools import lru_cache

AGENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,58}")
"""Valid agent names: the tool name `call_<name>` fits in the 64 characters that providers allow."""


def new_uuid7(now_ns: int) -> str:
    """Return a UUIDv7 (RFC 9562, 5.7) as text; later ids sort later, with a resolution of one millisecond."""
    value = (now_ns // 1_000_000) << 80 | int.from_bytes(random_bytes(10), "big")
    value = (value & ~(0xF << 76)) | 0x7 << 76
    value = (value & ~(0x3 << 62)) | 0x2 << 62
    return str(uuid.UUID(int=value))


def new_uuid4() -> str:
    """Return a UUIDv4 (RFC 9562, 5.4) as text, for what needs no order, such as the names of connections."""
    return str(uuid.UUID(bytes=random_bytes(16), version=4))


def random_bytes(count: int) -> bytes:
    """Return so many bytes from the system; replaced by a seeded source, a whole server draws the same ids again."""
    return os.urandom(count)


def derive_id(key_root: str, name: str) -> str:
    """Return the UUIDv5 of a name under a run's key root (RFC 9562, 5.5); replay derives the same ids."""
    # uuid.uuid5 takes seven times as long, and a run of four agents derives fifty ids.
    hashed = hashlib.sha1(_namespace(key_root) + name.encode(), usedforsecurity=False).digest()[:16]
    value = (int.from_bytes(hashed) & ~(0xF000 << 64) | 0x5000 << 64) & ~(0xC << 60) | 0x8 << 60
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@lru_cache(maxsize=1024)
def _namespace(key_root: str) -> bytes:
    return uuid.UUID(key_root).bytes


def invocation_id(key_root: str, scope: str) -> str:
    """Return the id of the invocation with this scope; the root's scope is empty, and its id is the key root."""
    return derive_id(key_root, scope) if scope else key_root


@lru_cache(maxsize=4096)
def step_id(invocation: str, step_key: str) -> str:
    """Return the id of an invocation's step, derived from the key that its effects begin with (keys.step)."""
    return derive_id(invocation, step_key)


def message_id(root: str, effect_key: str, kind: str) -> str:
    """Return the id of a stored message, unique per effect and message kind, such as "USER".

    `root` is the key root, except for messages that a fork records itself: there it is the fork's run id. Fork and
    origin derive the same effect keys, but their messages under one key may differ.
    """
    return derive_id(root, f"{effect_key}/{kind}")


def agent_chain(parent: str, name: str) -> str:
    """Return a SHA-256 hex digest of the agents' names from the root down to `name`; at the root, `parent` is empty."""
    return hashlib.sha256((f"{parent}/{name}" if parent else name).encode()).hexdigest()
