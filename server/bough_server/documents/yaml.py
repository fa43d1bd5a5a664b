"""YAML and JSON documents whose values know their lines, and durations in readable form.

Plain scalars follow YAML 1.2's core schema: `no`, `on` and `2026-01-01` are text.
"""

import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

import yaml
from yaml.scanner import ScannerError

from bough_server.errors import ConfigurationError, Problem

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"
FieldPath: TypeAlias = tuple[str | int, ...]

_MIB: Final = 1024 * 1024
_DEEPEST: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentBounds:
    """How large a file of documents may be."""

    file_bytes: int = _MIB
    """The most bytes of a file, in whole MiB."""
    values: int = 100_000
    """The most values of a document. Aliases of YAML repeat values, so this bounds them too."""


DEFAULT_BOUNDS: Final = DocumentBounds()
"""The bounds of files that people write by hand."""

_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))
_STR: Final = "tag:yaml.org,2002:str"
_MAP: Final = "tag:yaml.org,2002:map"
_SEQ: Final = "tag:yaml.org,2002:seq"

FLOAT_PATTERN: Final = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$")
"""Plain scalars that are read as numbers with a fraction or an exponent."""

_UNITS: Final = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_PIECE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(ns|us|ms|s|m|h|d)")
DURATION: Final = re.compile(rf"-?(?:{_PIECE.pattern})+")
"""A duration as people write it, such as 10m or 1h30m."""
_LONGEST_NS: Final = 315_576_000_000 * 1_000_000_000
"""Ten thousand years, the bound of google.protobuf.Duration."""


_PLAIN_TEXT: Final = re.compile(r"[^'\"\\\0\r\n\x85\u2028\u2029\ufeff]*(?<![ \t])")
"""What stands for itself in a quoted scalar: up to a quote, an escape, a line break, or spaces before one of them."""


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with only the core schema's plain scalars, and keys of any length on one line, as JSON has."""

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        """Scan a part of a quoted scalar. PyYAML goes from character to character, twice."""
        plain = _PLAIN_TEXT.match(self.buffer, self.pointer)
        chunks = [plain[0]] if plain else []
        for chunk in chunks:
            self.pointer += len(chunk)
            self.index += len(chunk)
            self.column += len(chunk)
        return [*chunks, *super().scan_flow_scalar_non_spaces(double, start_mark)]

    def stale_possible_simple_keys(self) -> None:
        """Forget the possible keys of earlier lines. PyYAML also forgets those over 1,024 characters."""
        for level, key in list(self.possible_simple_keys.items()):
            if key.line != self.line:
                if key.required:
                    raise ScannerError(
                        "while scanning a simple key", key.mark, "could not find expected ':'", self.get_mark()
                    )
                del self.possible_simple_keys[level]

    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        """Begin a list or mapping in brackets; raise RecursionError far beyond the depth that is read.

        PyYAML goes through all open brackets at each further one.
        """
        if self.flow_level > 3 * _DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(token_class)


# Not inherited: YAML 1.1 reads `no` as false and 2026-01-01 as a date.
_Loader.yaml_implicit_resolvers = {}


_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


_Loader.add_implicit_resolver(_BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9]{0,4000})$"), list("-+0123456789"))


_Loader.add_implicit_resolver(_FLOAT, FLOAT_PATTERN, list("-+.0123456789"))


class _LargeLoader(getattr(yaml, "CSafeLoader", _Loader)):  # type: ignore[misc] # its base is known at run time
    """libyaml's loader with the same plain scalars, if PyYAML has it: four times as fast.

    It accepts neither keys of over 1,024 characters nor escaped surrogate pairs: what it refuses is read without it.
    """


_LargeLoader.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document of a file: its value, and the line of every value in it, from 1."""

    path: str
    value: Value
    lines: Mapping[FieldPath, int]

    def line(self, path: FieldPath) -> int:
        """Return the line of a field, or of the nearest field around it."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 0)

    def problem(self, path: FieldPath, description: str) -> Problem:
        """Return a problem at a field of this document."""
        return Problem(path=self.path, line=self.line(path), field=field_text(path), description=description)


def field_text(path: FieldPath) -> str:
    """Return a field's path in readable form, such as `llm.tools[1].name`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest known name, else a sentence with up to 20 known names."""
    names = sorted(known)
    if near := nearest(name, names):
        return f" {near}"
    return f" There is {', '.join(names[:20])}." if names else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" if a known name is close, else an empty text."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else ""


def read_documents(path: Path, bounds: DocumentBounds = DEFAULT_BOUNDS) -> list[Document]:
    """Return the documents of a file. Raises ConfigurationError with every problem."""
    try:
        if path.stat().st_size > bounds.file_bytes:
            raise ConfigurationError(f"{path}: The file is larger than {bounds.file_bytes // _MIB} MiB.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: The file cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: The file is not UTF-8 text.") from error
    if path.suffix != ".json":
        return parse_documents(text, path=str(path), bounds=bounds)
    try:
        return parse_json(text, path=str(path), bounds=bounds)
    except _NotJson as error:
        # A small file may have what YAML allows beyond JSON, such as comments; to try that with a large one takes long.
        if len(text) > _MIB:
            raise ConfigurationError(str(error.problem)) from None
        # JSON may be indented with tabs, YAML may not.
        return parse_documents(text.replace("\t", " "), path=str(path), bounds=bounds)


def parse_documents(text: str, *, path: str, bounds: DocumentBounds = DEFAULT_BOUNDS) -> list[Document]:
    """Return the documents of a YAML text, without empty ones. Raises ConfigurationError with every problem."""
    if len(text) > _MIB:
        try:
            with _without_collection():
                return _compose(text, _LargeLoader, path, bounds)
        except yaml.YAMLError:
            pass  # either it is no YAML, or libyaml is stricter: the other loader says which
    try:
        return _compose(text, _Loader, path, bounds)
    except yaml.YAMLError as error:
        raise ConfigurationError(str(_syntax_problem(path, text, error))) from None


def _compose(text: str, loader: type[yaml.SafeLoader], path: str, bounds: DocumentBounds) -> list[Document]:
    """Return the documents that a loader makes of a text. Raises YAMLError and ConfigurationError."""
    problems: list[Problem] = []
    documents: list[Document] = []
    try:
        for node in yaml.compose_all(text, Loader=loader):
            reader = _DocumentReader(path, bounds.values)
            value = reader.read(node, ())
            problems += reader.problems
            if value is not None:
                documents.append(Document(path=path, value=value, lines=reader.lines))
    except RecursionError:
        problems.append(Problem(path=path, line=0, field="", description=f"is nested deeper than {_DEEPEST} levels"))
    raise_problems(problems)
    return documents


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the collection of garbage, which takes most of the time of a large document and finds none in its nodes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_json(text: str, *, path: str, bounds: DocumentBounds = DEFAULT_BOUNDS) -> list[Document]:
    """Return the document of a JSON text; none if it is null. Raises ConfigurationError with every problem.

    A text that is not JSON raises a ConfigurationError with the first reason alone.
    """
    reader = _JsonReader(text, path, bounds.values)
    value = reader.document()
    raise_problems(reader.problems)
    return [] if value is None else [Document(path=path, value=value, lines=reader.lines)]


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise a ConfigurationError with one line per distinct problem if there are any."""
    if problems:
        raise ConfigurationError("\n".join(dict.fromkeys(str(problem) for problem in problems)))


class _DocumentReader:
    """Converts YAML nodes to values; keeps lines and collects problems."""

    def __init__(self, path: str, most_values: int) -> None:
        self.path = path
        self.lines: dict[FieldPath, int] = {}
        self.problems: list[Problem] = []
        self._most_values = most_values
        self._count = 0

    def read(self, node: yaml.Node, path: FieldPath) -> Value:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        # Aliases may repeat a node, or make it contain itself; these bounds end both.
        if self._count > self._most_values or len(path) > _DEEPEST:
            if self._count <= self._most_values + 1:
                self._report(node, path[:4], f"is nested deeper than {_DEEPEST} levels or repeats too much")
                # So that the rest of the document is skipped and the problem is reported once.
                self._count = self._most_values + 1
            return None
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._report(node, path, f"has an unknown tag: {node.tag}")
        return None

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> Value:
        mapping: dict[str, Value] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(key_node, path, "has a key that is not text")
                continue
            key = _whole_text(key_node.value) or ""
            inner = (*path, key)
            if key in mapping:
                self._report(key_node, inner, "is given twice")
                continue
            self.lines[inner] = key_node.start_mark.line + 1
            mapping[key] = self.read(value_node, inner)
        return mapping

    def _scalar(self, node: yaml.ScalarNode, path: FieldPath) -> Value:
        match node.tag:
            case tag if tag == _STR:
                text = _whole_text(node.value)
                if text is None:
                    self._report(node, path, "contains half of a surrogate pair, which is not a character")
                return text
            case tag if tag == _NULL:
                return None
            case tag if tag == _BOOL:
                return bool(node.value.lower() == "true")
            case tag if tag == _INT:
                return int(node.value)
            case tag if tag == _FLOAT:
                return float(node.value)
        self._report(node, path, f"has an unknown tag: {node.tag}")
        return None

    def _report(self, node: yaml.Node, path: FieldPath, description: str) -> None:
        line = node.start_mark.line + 1
        self.problems.append(Problem(path=self.path, line=line, field=field_text(path), description=description))


class _NotJson(ConfigurationError):
    """A text that is not JSON, or more of it than is read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_SCALARS: Final = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE: Final = re.compile(r"[ \t\n\r]*")


class _JsonReader:
    """Reads a JSON text; keeps lines and collects problems. Many times as fast as reading it as YAML."""

    def __init__(self, text: str, path: str, most_values: int) -> None:
        self.path = path
        self.lines: dict[FieldPath, int] = {}
        self.problems: list[Problem] = []
        self._text = text
        self._at = 0
        self._line = 1
        self._counted = 0
        """The position up to which lines have been counted."""
        self._most_values = most_values

    def document(self) -> Value:
        value = self._value(())
        if self._next():
            self._fail("there is more after the end of the document")
        return value

    def _value(self, path: FieldPath) -> Value:
        character = self._next()
        self.lines.setdefault(path, self._line_here())
        if len(self.lines) > self._most_values:
            self._fail(f"it has more than {self._most_values:,} values")
        if len(path) > _DEEPEST:
            self._fail(f"it is nested deeper than {_DEEPEST} levels")
        if character == "{":
            return self._mapping(path)
        if character == "[":
            return [self._value((*path, index)) for index, _ in enumerate(self._items("]"))]
        value = self._scalar()
        if isinstance(value, str) and _whole_text(value) is None:
            self._report(path, "contains half of a surrogate pair, which is not a character")
        return value

    def _mapping(self, path: FieldPath) -> Value:
        mapping: dict[str, Value] = {}
        for _ in self._items("}"):
            if self._next() != '"':
                self._fail("expected a key in double quotes")
            key = _whole_text(str(self._scalar())) or ""
            inner = (*path, key)
            is_repeated = key in mapping
            if is_repeated:
                self._report(inner, "is given twice")
            else:
                self.lines[inner] = self._line_here()
            if self._next() != ":":
                self._fail("expected ':'")
            self._at += 1
            value = self._value(inner)
            if not is_repeated:
                mapping[key] = value
        return mapping

    def _items(self, closing: str) -> Iterator[None]:
        """Yield before each item of a list or an object, and read what is around the items."""
        self._at += 1
        if self._next() != closing:
            yield
            while self._next() == ",":
                self._at += 1
                yield
            if self._next() != closing:
                self._fail(f"expected ',' or '{closing}'")
        self._at += 1

    def _scalar(self) -> Value:
        try:
            value, self._at = _SCALARS.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            self._at = error.pos
            self._fail(f"{error.msg[:1].lower()}{error.msg[1:]}")
        except ValueError as error:
            self._fail(str(error))
        return value  # type: ignore[no-any-return] # a text, number, boolean or null

    def _next(self) -> str:
        """Return the next character that is not white space, without reading it; empty at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _line_here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _report(self, path: FieldPath, description: str) -> None:
        line = self._line_here()
        self.problems.append(Problem(path=self.path, line=line, field=field_text(path), description=description))

    def _fail(self, reason: str) -> NoReturn:
        # The position of an unterminated text is its beginning, which may be before what has been counted.
        line = self._text.count("\n", 0, self._at) + 1
        description = f"This is not JSON that can be read: {reason}."
        raise _NotJson(Problem(path=self.path, line=line, field="", description=description))


def _whole_text(text: str) -> str | None:
    """Join escaped surrogate pairs, which JSON uses; return None if half of a pair remains."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return None


def _syntax_problem(path: str, text: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    words = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    line = mark.line + 1 if mark else 0
    advice = _advise_quotes(text.splitlines()[mark.line]) if mark and mark.line < len(text.splitlines()) else ""
    return Problem(path=path, line=line, field="", description=f"This is not YAML: {words}.{advice}")


_KEY_AND_TEXT: Final = re.compile(r"((?:- +)*[\w.-]+:) +([^\s'\"].*?)\s*")


def _advise_quotes(line: str) -> str:
    """Return advice to quote the text of a line that is no YAML, if it is with quotes."""
    found = _KEY_AND_TEXT.fullmatch(line.strip())
    if found is None or (found[2][0], found[2][-1]) in _BRACKETS:  # it may be one text in a list that lacks quotes
        return ""
    quoted = f"{found[1]} {json.dumps(found[2], ensure_ascii=False)}"
    try:
        yaml.safe_load(quoted)
    except yaml.YAMLError:
        return ""
    return f" Quote the text: {quoted}" if len(quoted) <= _MOST_QUOTED else " Quote the text of this line."


_MOST_QUOTED: Final = 100
_BRACKETS: Final = (("[", "]"), ("{", "}"))


def parse_duration(text: str) -> int:
    """Return the nanoseconds of a text such as "10m", "1.5s" or "1h30m". Raises ValueError with a sentence."""
    text = text.strip()
    if not DURATION.fullmatch(text):
        raise ValueError(f"must be a duration such as 10m, 50ms or 1h30m, not {text[:40]!r}")
    nanoseconds = sum(int(Decimal(number) * _UNITS[unit]) for number, unit in _PIECE.findall(text))
    if nanoseconds > _LONGEST_NS:
        raise ValueError("must be a duration of at most ten thousand years")
    return -nanoseconds if text.startswith("-") else nanoseconds
