"""JSON of other tools, read with its place in the file, so that an error can name what is wrong where.

An importer consumes a document: each object remembers which of its members were read, and the rest can be listed.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Final, TypeAlias

from bough_server.documents.yaml import Document, DocumentBounds, FieldPath, Value, parse_json
from bough_server.errors import ConfigurationError
from bough_server.plain_text import escape_controls

JsonValue: TypeAlias = Value

BOUNDS: Final = DocumentBounds(file_bytes=64 * 1024 * 1024, values=2_000_000)
"""The bounds of a file: a set with its indentation, or a result with its conversations."""

_FEW: Final = 3
_MIB: Final = 1024 * 1024


class Notes:
    """Sentences about the decisions of an import, each once, with the cases that it is about."""

    def __init__(self) -> None:
        self._cases: dict[str, dict[str, None]] = {}

    def add(self, sentence: str, case_id: str = "") -> None:
        """Add a sentence, about one case or about the whole set."""
        cases = self._cases.setdefault(sentence, {})
        if case_id:
            cases[case_id] = None

    @property
    def sentences(self) -> list[str]:
        """The sentences, in the order in which they were first added."""
        return [f"{sentence}{_of_cases(list(cases))}" for sentence, cases in self._cases.items()]

    @property
    def about_cases(self) -> list[str]:
        """Those of the sentences that are about cases."""
        return [f"{sentence}{_of_cases(list(cases))}" for sentence, cases in self._cases.items() if cases]


def _of_cases(cases: list[str]) -> str:
    if not cases:
        return ""
    named = ", ".join(repr(case) for case in cases[:_FEW])
    more = f" and {len(cases) - _FEW} more" if len(cases) > _FEW else ""
    return f" ({'Case' if len(cases) == 1 else 'Cases'} {named}{more}.)"


class JsonObject:
    """An object of a file, which remembers which of its members were read.

    Members are named in camelCase and found in snake_case too; null is as good as missing. A member that is read as an
    object has its own members read one by one; one that is read as a value is read whole.
    """

    __slots__ = ("_inner", "_members", "_read", "document", "path")

    def __init__(self, members: Mapping[str, JsonValue], *, document: Document, path: FieldPath = ()) -> None:
        self.document = document
        self.path = path
        self._members = members
        self._read: set[str] = set()
        self._inner: dict[str, list[JsonObject]] = {}

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all members, without reading them."""
        return iter(self._members)

    @property
    def members(self) -> Mapping[str, JsonValue]:
        """All members, without reading them."""
        return self._members

    def peek(self, name: str) -> JsonValue:
        """Return a member as it is, without reading it; None if it is missing."""
        return self._members.get(self._key(name))

    def has(self, name: str) -> bool:
        """Return whether a member is there and not null, without reading it."""
        return self.peek(name) is not None

    def raw(self, name: str) -> JsonValue:
        """Return a member as it is; None if it is missing."""
        return self.take(self._key(name))

    def take(self, key: str) -> JsonValue:
        """Return the member of exactly this name as it is; None if it is missing."""
        self._read.add(key)
        self._inner.pop(key, None)
        return self._members.get(key)

    def take_all(self) -> Mapping[str, JsonValue]:
        """Return all members as they are, those that were read before too."""
        for key in self._members:
            self.take(key)
        return self._members

    def list_keys(self) -> list[str]:
        """Return the names of the members that are not null, without reading them."""
        return [key for key, value in self._members.items() if value is not None]

    def text(self, name: str) -> str:
        """Return a text; empty if it is missing. Raises ConfigurationError."""
        value = self.raw(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.wrong(name, "must be a text")
        return value

    def require_text(self, name: str) -> str:
        """Return a text that is not empty. Raises ConfigurationError."""
        if not (text := self.text(name)):
            raise self.wrong(name, "is required")
        return text

    def texts(self, name: str) -> list[str]:
        """Return the texts of a list; empty if it is missing. Raises ConfigurationError."""
        value = self.raw(name)
        if value is None:
            return []
        texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else None
        if texts != value:
            raise self.wrong(name, "must be a list of texts")
        return texts

    def flag(self, name: str) -> bool:
        """Return a boolean; False if it is missing. Raises ConfigurationError."""
        value = self.raw(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a number. Raises ConfigurationError."""
        value = self.raw(name)
        return default if value is None else self._number(name, value)

    def require_number(self, name: str) -> float:
        """Return a number. Raises ConfigurationError if there is none, or if it is too large."""
        return self._number(name, self.raw(name))

    def _number(self, name: str, value: JsonValue) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "is too large") from None

    def peek_number(self, name: str) -> float:
        """Return a number without reading it; 0 if it is missing. Raises ConfigurationError."""
        value = self.peek(name)
        return 0.0 if value is None else self._number(name, value)

    def child(self, name: str) -> "JsonObject | None":
        """Return an object; None if it is missing. Raises ConfigurationError."""
        key = self._key(name)
        if self._members.get(key) is None:
            self._read.add(key)
            return None
        if key not in self._inner:
            self._inner[key] = [object_at(self.document, self._members[key], (*self.path, key))]
        return self._inner[key][0]

    def children(self, name: str) -> "list[JsonObject]":
        """Return the objects of a list, nulls left out; empty if it is missing. Raises ConfigurationError."""
        key = self._key(name)
        if self._members.get(key) is None:
            self._read.add(key)
            return []
        if key not in self._inner:
            self._inner[key] = objects_at(self.document, self._members[key], (*self.path, key))
        return self._inner[key]

    def unknown(self, *known: str) -> list[str]:
        """Return the names of members that are neither null nor known, without reading them."""
        names = {*known, *(snake_case(name) for name in known)}
        return [key for key in self.list_keys() if key not in names]

    def unread(self) -> Iterator[FieldPath]:
        """Yield the paths of members that were not read, but for those that are null or empty.

        An object in which nothing was looked for is one path.
        """
        for key, value in self._members.items():
            inner = self._inner.get(key, ())
            if any(each.was_opened for each in inner):
                for each in inner:
                    yield from each.unread() if each.was_opened else [each.path]
            elif key not in self._read and value not in (None, "", [], {}):
                yield (*self.path, key)

    @property
    def was_opened(self) -> bool:
        """Whether any member was looked for."""
        return bool(self._read or self._inner)

    def wrong(self, name: str, problem: str) -> ConfigurationError:
        """Return the error of a member."""
        return wrong_at(self.document, (*self.path, self._key(name)), problem)

    def _key(self, name: str) -> str:
        """Return the name that the file has for a member."""
        if self._members.get(name) is None and self._members.get(snake := snake_case(name)) is not None:
            return snake
        return name


@lru_cache(maxsize=1024)
def snake_case(name: str) -> str:
    """Return a camelCase name in snake_case."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def wrong_at(document: Document, path: FieldPath, problem: str) -> ConfigurationError:
    """Return the error of a value of a document."""
    return ConfigurationError(escape_controls(str(document.problem(path, problem))))


def object_at(document: Document, value: JsonValue, path: FieldPath = ()) -> JsonObject:
    """Return a value of a document as an object. Raises ConfigurationError if it is none."""
    if not isinstance(value, dict):
        raise wrong_at(document, path, "must be an object")
    return JsonObject(value, document=document, path=path)


def objects_at(document: Document, value: JsonValue, path: FieldPath = ()) -> list[JsonObject]:
    """Return the objects of a list of a document, nulls left out. Raises ConfigurationError."""
    if not isinstance(value, list):
        raise wrong_at(document, path, "must be a list")
    return [object_at(document, item, (*path, index)) for index, item in enumerate(value) if item is not None]


def empty_object() -> JsonObject:
    """Return an object without members, in place of one that a file does not have."""
    return JsonObject({}, document=Document(path="", value={}, lines={}))


def read_json(path: Path) -> Document:
    """Return the JSON of a file. Raises ConfigurationError with the line of what is wrong."""
    try:
        if path.stat().st_size > BOUNDS.file_bytes:
            raise ConfigurationError(f"{path}: The file is larger than {BOUNDS.file_bytes // _MIB} MiB.")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path}: The file cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: The file is not UTF-8 text.") from error
    return document_of(text, path)


def document_of(text: str, path: Path) -> Document:
    """Return the document of a JSON text. Raises ConfigurationError."""
    for document in parse_json(text, path=str(path), bounds=BOUNDS):
        for place in _find_too_large(document.value, ()):
            raise wrong_at(document, place, "is too large for a number")
        return document
    return Document(path=str(path), value=None, lines={})


def _find_too_large(value: JsonValue, path: FieldPath) -> Iterator[FieldPath]:
    """Yield the paths of numbers that are larger than any float, such as 1e999."""
    if isinstance(value, float) and not isfinite(value):
        yield path
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_too_large(item, (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _find_too_large(item, (*path, name))


def as_json(value: JsonValue) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
