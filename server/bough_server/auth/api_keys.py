"""API keys: the file that lists them, and what a key proves. The file holds hashes only.

A key is `bough_`, its id, `_` and 256 random bits: too many to guess, so that a fast hash protects them as well as a
slow one.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bough_server.auth.proof import Proof, build_expired_error, build_invalid_error
from bough_server.auth.sections import KEY_ID, ActsFor, KeySection, KeysFile, parse_roles
from bough_server.documents.yaml import Document, raise_problems, read_documents
from bough_server.errors import ConfigurationError, Problem
from bough_server.identity import Caller, Principal
from bough_server.settings_sections import mistake_words, suggest_key

PREFIX: Final = "bough_"
"""How every key begins, so that scanners for leaked secrets can find it."""

SECRET_BYTES: Final = 32
"""The random bytes of a key."""

_KEY: Final = re.compile(rf"{PREFIX}({KEY_ID})_[A-Za-z0-9_-]{{43}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key of the file; two that are equal are the same key with the same rights."""

    digest: bytes = field(repr=False)
    caller: Caller
    acts_for: ActsFor | None


Keys: TypeAlias = Mapping[str, ApiKey]
"""Keys by their ids."""


def build_key(key_id: str, secret: bytes) -> str:
    """Return the key with an id and SECRET_BYTES random bytes."""
    return f"{PREFIX}{key_id}_{base64.urlsafe_b64encode(secret).decode().rstrip('=')}"


def is_key(text: str) -> bool:
    """Return whether a text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key, as the file has it."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> Keys:
    """Return the keys of a file. Raises ConfigurationError with every mistake, each with its line."""
    _, sections = read_key_sections(path)
    return {section.id: _to_key(section) for section in sections}


def read_key_sections(path: Path) -> tuple[Document, Sequence[KeySection]]:
    """Return a file of keys, and its entries in their order. Raises ConfigurationError as read_keys does."""
    documents = read_documents(path)
    if len(documents) != 1 or not isinstance(documents[0].value, dict):
        raise ConfigurationError(f"{path}:1: The file must be one mapping, such as `keys: []`.")
    (document,) = documents
    try:
        sections = KeysFile.model_validate(document.value).keys
    except ValidationError as error:
        raise_problems([_to_problem(document, each) for each in error.errors()])
        raise
    raise_problems(list(_find_repetitions(document, [section.id for section in sections])))
    return document, sections


def check_key(token: str, find_keys: Callable[[], Keys], *, now_ns: int) -> Proof:
    """Return what a token that begins with PREFIX proves by the keys that there are, now and later.

    Raises Unauthenticated.
    """
    digest = hashlib.sha256(token.encode(errors="replace")).digest()
    match = _KEY.fullmatch(token)
    if match is None:
        raise build_invalid_error("it begins like an API key, but is none")
    key_id = match[1]
    key = find_keys().get(key_id)
    if key is None:
        raise build_invalid_error(f"there is no API key {key_id}")
    if not hmac.compare_digest(digest, key.digest):
        raise build_invalid_error(f"it is not the API key {key_id}")
    if key.caller.expire_time_ns is not None and key.caller.expire_time_ns <= now_ns:
        raise build_expired_error()
    return Proof(caller=key.caller, acts_for=key.acts_for, holds=lambda: find_keys().get(key_id) == key)


def _to_key(section: KeySection) -> ApiKey:
    caller = Caller(
        principal=Principal(tenant_id=section.tenant, user_id=section.user),
        roles=parse_roles(section.roles),
        groups=frozenset(section.groups),
        via=f"key/{section.id}",
        expire_time_ns=section.expire_time_ns,
    )
    return ApiKey(digest=bytes.fromhex(section.sha256), caller=caller, acts_for=section.acts_for)


_WORDS: Final = {
    "id": "must be 1 to 63 of a-z, 0-9 and '-', beginning with a letter or a digit",
    "sha256": "must be the SHA-256 of a key: 64 of 0-9 and a-f, in quotes",
    "expires": "must be a time with its zone, such as 2027-01-31T00:00:00Z",
}
"""What the fields of a key must be, in place of pydantic's words."""


def _to_problem(document: Document, error: ErrorDetails) -> Problem:
    path = error["loc"]
    if error["type"] == "extra_forbidden":
        return document.problem(path, f"There is no such setting.{suggest_key(KeysFile, path)}")
    return document.problem(path, explain_mistake(error))


def explain_mistake(error: ErrorDetails) -> str:
    """Return what a field of a key must be, for an error of pydantic's."""
    words = mistake_words(error["type"], error.get("ctx", {})) or error["msg"]
    if error["type"] != "missing":
        words = _WORDS.get(str(error["loc"][-1]), words)
    return words.removeprefix("Value error, ")


def _find_repetitions(document: Document, ids: list[str]) -> Iterator[Problem]:
    for index, key_id in enumerate(ids):
        first = ids.index(key_id)
        if first < index:
            line = document.line(("keys", first, "id"))
            words = f"the key {key_id} is also in line {line}: remove one of both, or make a key with another id"
            yield document.problem(("keys", index, "id"), words)
