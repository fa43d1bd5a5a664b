"""JSON of other tools, read with its place in the file, so that an error can name what is wrong where."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final, TypeAlias

from bough_server.errors import ConfigurationError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of a file: a set with its indentation, or a result with its conversations."""

_MAX_DEPTH: Final = 100
_FEW: Final = 3


class Notes:
    """Sentences about what has no place in a set, each once, with the cases that it is about."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObject:
    """An object of a file. Members are named in camelCase and found in snake_case too; null is as good as missing."""

    members: Mapping[str, JsonValue]
    place: str = ""

    def raw(self, name: str) -> JsonValue:
        """Return a member as it is; None if it is missing."""
        value = self.members.get(name)
        return self.members.get(snake_case(name)) if value is None else value

    def has(self, name: str) -> bool:
        """Return whether a member is there and not null."""
        return self.raw(name) is not None

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
        return default if value is None else number_of(value, self.at(name))

    def child(self, name: str) -> "JsonObject | None":
        """Return an object; None if it is missing. Raises ConfigurationError."""
        value = self.raw(name)
        return None if value is None else object_of(value, self.at(name))

    def children(self, name: str) -> "list[JsonObject]":
        """Return the objects of a list, nulls left out; empty if it is missing. Raises ConfigurationError."""
        return objects_of(self.raw(name), self.at(name))

    def unknown(self, *known: str) -> list[str]:
        """Return the names of members that are neither null nor known."""
        names = {*known, *(snake_case(name) for name in known)}
        return [name for name, value in self.members.items() if value is not None and name not in names]

    def at(self, name: str) -> str:
        """Return the place of a member."""
        return f"{self.place}.{name}" if self.place else name

    def wrong(self, name: str, problem: str) -> ConfigurationError:
        """Return the error of a member."""
        return ConfigurationError(f"{self.at(name)}: {problem}.")


def snake_case(name: str) -> str:
    """Return a camelCase name in snake_case."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def object_of(value: JsonValue, place: str) -> JsonObject:
    """Return a value as an object. Raises ConfigurationError if it is none."""
    if not isinstance(value, dict):
        raise ConfigurationError(f"{place or 'The file'}: must be an object.")
    return JsonObject(members=value, place=place)


def objects_of(value: JsonValue, place: str) -> list[JsonObject]:
    """Return the objects of a list, nulls left out; empty for null. Raises ConfigurationError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ConfigurationError(f"{place or 'The file'}: must be a list.")
    return [object_of(item, f"{place}[{index}]") for index, item in enumerate(value) if item is not None]


def number_of(value: JsonValue, place: str) -> float:
    """Return a value as a number. Raises ConfigurationError if it is none, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{place}: must be a number.")
    try:
        return float(value)
    except OverflowError:
        raise ConfigurationError(f"{place}: is too large.") from None


def read_json(path: Path) -> JsonValue:
    """Return the JSON of a file, with text that a message can hold. Raises ConfigurationError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(f"{path}: The file is larger than {MAX_FILE_BYTES >> 20} MiB.")
        value: JsonValue = json.loads(path.read_bytes(), parse_constant=_refuse)
        return clean(value)
    except OSError as error:
        raise ConfigurationError(f"{path}: The file cannot be read: {error.strerror}.") from error
    except ConfigurationError as error:
        raise error if str(path) in error.message else ConfigurationError(f"{path}: {error.message}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: The file is nested too deeply.") from error
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ConfigurationError(f"{path}: The file is not JSON: {error}.") from error


def clean(value: JsonValue, depth: int = 0) -> JsonValue:
    """Return a value with texts that are valid Unicode. Raises ConfigurationError if it is too deep or not JSON."""
    if depth > _MAX_DEPTH:
        raise ConfigurationError(f"The file is nested more than {_MAX_DEPTH} deep.")
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, float) and not isfinite(value):
        raise ConfigurationError(f"The file has the number {value}, which is too large or not JSON.")
    if isinstance(value, list):
        return [clean(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_unicode(name): clean(item, depth + 1) for name, item in value.items()}
    return value


def as_json(value: JsonValue) -> str:
    """Return a value as JSON text."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigurationError(f"The file has a number that cannot be written: {error}.") from error


def _unicode(text: str) -> str:
    """Replace unpaired surrogates, which JSON can escape and messages cannot hold."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
