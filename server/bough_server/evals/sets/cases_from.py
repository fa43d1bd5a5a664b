"""Cases of an eval set from the rows of a file beside it, JSONL or CSV: a template for each row."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec

from bough.v1 import eval_set_pb2
from bough_server.documents.messages import read_message
from bough_server.documents.yaml import Document, FieldPath, Value, suggestion
from bough_server.errors import Problem
from bough_server.templates import MISSING, fill, placeholders_in

KEY: Final = "cases_from"
"""The key of a set's file that names the rows."""

MAX_LINE_BYTES: Final = 2 * 1024 * 1024
"""The most bytes of a line: a case has no more."""

MAX_CASES: Final = 10_000
"""The most cases of a set, as EvalSet.cases says."""

MAX_PROBLEMS: Final = 100
"""The most problems of a file of rows that are listed."""

_KEYS: Final = ("file", "template")
_FORM: Final = "must be a mapping of `file` and `template`"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

Row: TypeAlias = dict[str, Value]
_Report: TypeAlias = Callable[[int, str], None]
"""Adds a problem of a line."""


class _Unreadable(Exception):
    """The rest of a file of rows cannot be read; the message says why, and `line` from where on."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseLines:
    """The lines of cases that come from a file of rows."""

    path: str
    first: int
    """The index of the first of them in the set."""
    lines: list[int] = field(default_factory=list)

    def find(self, index: int) -> int:
        """Return the line of a case of the set by its index; 0 for one that does not come from the file."""
        at = index - self.first
        return self.lines[at] if 0 <= at < len(self.lines) else 0


def read_cases(
    document: Document, eval_set: eval_set_pb2.EvalSet, *, max_bytes: int
) -> tuple[CaseLines | None, list[Problem]]:
    """Add a case to a set for each row that the document names under KEY; return their lines and every problem.

    Rows are read one by one: memory holds the set, which has at most `max_bytes`, and one line. The whole file is
    checked also beyond the last case that there is room for.
    """
    reader = _CaseReader(document, eval_set, max_bytes=max_bytes)
    return reader.read(), reader.problems


class _CaseReader:
    """Makes the cases of a set from a file of rows."""

    def __init__(self, document: Document, eval_set: eval_set_pb2.EvalSet, *, max_bytes: int) -> None:
        self.problems: list[Problem] = []
        self._document, self._set = document, eval_set
        self._max_bytes = max_bytes
        self._size = eval_set.ByteSize()
        self._ids: dict[str, int] = {}
        """The line of each id of the file."""

    def read(self) -> CaseLines | None:
        """Read the rows; None if it is not known which."""
        found = self._read_form()
        if found is None:
            return None
        path, template = found
        made = CaseLines(path=str(path), first=len(self._set.cases))
        try:
            with path.open("rb") as file:
                before = _identify(os.fstat(file.fileno()))
                try:
                    self._add_cases(file, template, made)
                except _Unreadable as error:
                    self._add(made, error.line, str(error))
                if _identify(path.stat()) != before:
                    self.problems = []  # they may be of a line that was half written
                    self._add(made, 0, "The file was changed while it was read: try again when it is complete.")
        except OSError as error:
            self._add(made, 0, f"The file cannot be read: {error.strerror}.")
        return made

    def _read_form(self) -> tuple[Path, Row] | None:
        """Return the file of rows and the template, or None after a problem."""
        given = self._document.value[KEY] if isinstance(self._document.value, dict) else None
        if not isinstance(given, dict):
            self._report_form((), _FORM)
            return None
        for key in given:
            if key not in _KEYS:
                self._report_form((key,), f"There is no such field.{suggestion(key, _KEYS)}")
        name, template = given.get("file"), given.get("template")
        if not isinstance(name, str):
            self._report_form(("file",), "must be the path of a .jsonl or .csv file below the folder of the set")
        if not isinstance(template, dict):
            self._report_form(("template",), "must be a case, with {{column}} for the values of a row")
        elif not template.get("id"):
            self._report_form(("template", "id"), 'is required, with a column that differs in each row: id: "{{id}}"')
        if self.problems or not isinstance(name, str) or not isinstance(template, dict):
            return None
        path = self._find_file(name)
        return None if path is None else (path, template)

    def _find_file(self, name: str) -> Path | None:
        """Return the file of rows below the folder of the set, or None after a problem."""
        folder = Path(self._document.path).parent
        path, given = folder / name, Path(name)
        try:
            is_inside = path.resolve().is_relative_to(folder.resolve())
            is_file = is_inside and path.is_file()
        except (OSError, ValueError):  # a name with a NUL, or links in a circle
            is_inside, is_file = True, False
        if given.is_absolute() or ".." in given.parts or not is_inside:
            self._report_form(("file",), f"{name!r} must be below the folder of the set, also behind links")
        elif path.suffix.lower() not in _ROWS:
            self._report_form(("file",), f"{name!r} must end in {' or '.join(_ROWS)}")
        elif not is_file:
            self._report_form(("file",), f"There is no file {name!r} in the folder {str(folder)!r}.")
        else:
            return path
        return None

    def _add_cases(self, file: BinaryIO, template: Row, made: CaseLines) -> None:
        columns = {name: is_optional for _, text in _texts(template) for name, is_optional in placeholders_in(text)}
        rows = 0
        for line, row in _ROWS[Path(made.path).suffix.lower()](file, lambda line, why: self._report(made, line, why)):
            rows += 1
            if rows == 1 and self._has_unknown_columns(template, row, made):
                return
            if missing := [name for name, is_optional in columns.items() if not is_optional and name not in row]:
                self._report(made, line, f"The row lacks the column {missing[0]!r}.{suggestion(missing[0], row)}")
            elif len(self._set.cases) < MAX_CASES and self._size <= self._max_bytes:
                self._add_case(template, row, made, line)
        if not rows and not self.problems:
            self._add(made, 0, "The file has no rows.")
        if rows > len(made.lines) and len(self._set.cases) == MAX_CASES:
            self._add(made, 0, f"The file has {rows:,} rows, and a set may have {MAX_CASES:,} cases: split it.")

    def _has_unknown_columns(self, template: Row, row: Row, made: CaseLines) -> bool:
        """Report the columns of the template that the first row lacks: each is probably misspelled there."""
        before = len(self.problems)
        for path, text in _texts(template):
            for name, is_optional in placeholders_in(text):
                if name not in row and not is_optional:
                    description = f"{Path(made.path).name} has no column {name!r}.{suggestion(name, row)}"
                    self._report_form(("template", *path), description)
        return len(self.problems) > before

    def _add_case(self, template: Row, row: Row, made: CaseLines, line: int) -> None:
        case = eval_set_pb2.EvalCase()
        try:
            value = _fill_all(template, row)
            document = Document(path=made.path, value=value, lines={(): line})
            _, problems = read_message(document, case, required="must be a mapping", null_is_json=True)
        except RecursionError:
            self._report(made, line, "is nested too deeply")
            return
        for problem in problems:
            self._report(made, line, problem.description, field=problem.field)
        if problems:
            return
        if (first := self._ids.setdefault(case.id, line)) != line:
            self._report(made, line, f"{case.id!r} is also the id of line {first}.", field="id")
            return
        self._size += case.ByteSize()
        if self._size > self._max_bytes:
            most = f"{self._max_bytes >> 20} MiB"
            self._report(made, line, f"With this row the set is larger than {most}: split the file.")
            return
        self._set.cases.append(case)
        made.lines.append(line)

    def _report(self, made: CaseLines, line: int, description: str, *, field: str = "") -> None:
        """Add a problem of a row. Raises _Unreadable if there are too many."""
        self._add(made, line, description, field=field)
        if len(self.problems) >= MAX_PROBLEMS:
            raise _Unreadable(line, f"These are the first {MAX_PROBLEMS} problems; what follows is not read.")

    def _add(self, made: CaseLines, line: int, description: str, *, field: str = "") -> None:
        self.problems.append(Problem(path=made.path, line=line, field=field, description=description))

    def _report_form(self, path: FieldPath, description: str) -> None:
        self.problems.append(self._document.problem((KEY, *path), description))


def _identify(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what differs if a file was replaced, appended to or written again."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _texts(value: Value, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    """Yield every text in a value, with its path; keys are not filled in."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index))


def _fill_all(value: Value, row: Mapping[str, Value]) -> Any:
    """Return a template with the values of a row, without members and items whose optional column it lacks."""
    if isinstance(value, str):
        return fill(value, row)
    if isinstance(value, dict):
        filled = {key: _fill_all(inner, row) for key, inner in value.items()}
        return {key: inner for key, inner in filled.items() if inner is not MISSING}
    if isinstance(value, list):
        return [inner for item in value if (inner := _fill_all(item, row)) is not MISSING]
    return value


def _read_lines(file: BinaryIO, report: _Report) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, with their ends, and the number of each.

    Raises _Unreadable for a line that is too long or no text.
    """
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise _Unreadable(number, f"The line is longer than {MAX_LINE_BYTES >> 20} MiB.")
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise _Unreadable(number, "The line is not UTF-8 text.") from None
        if "\0" in text:
            report(number, "The line has a NUL character, which no text may have.")
        else:
            yield number, text


def _read_jsonl(file: BinaryIO, report: _Report) -> Iterator[tuple[int, Row]]:
    """Yield the objects of JSON Lines, and the line of each. Empty lines are left out."""
    decode = msgspec.json.Decoder().decode
    for number, text in _read_lines(file, report):
        if text.isspace():
            continue
        try:
            row = decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
            report(number, f"The line is not JSON that can be read: {why}.")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            report(number, "The line must be a JSON object, with a member for each column.")


def _read_csv(file: BinaryIO, report: _Report) -> Iterator[tuple[int, Row]]:
    """Yield the rows of CSV by the names of the header, and the first line of each. Empty lines are left out."""
    start = 1
    rows = csv.reader((text for _, text in _read_lines(file, report)), strict=True)
    header: Sequence[str] = ()
    while True:
        try:
            values = next(rows, None)
        except csv.Error as error:
            why = f"This is not CSV that can be read: {error}. A value may have {csv.field_size_limit():,} characters."
            raise _Unreadable(start, why) from None
        if values is None:
            return
        if values and not header:
            header = values
            if wrong := _find_header_mistake(header):
                raise _Unreadable(start, wrong)
        elif values and len(values) != len(header):
            report(start, f"The row has {len(values)} values, and the header {len(header)} columns.")
        elif values:
            yield start, dict(zip(header, values, strict=True))
        start = rows.line_num + 1


def _find_header_mistake(header: Sequence[str]) -> str:
    """Return why the names of a header do not name its columns, as a sentence; empty if they do."""
    if "" in (name.strip() for name in header):
        return f"The header has no name for column {[name.strip() for name in header].index('') + 1}."
    repeated = next((name for at, name in enumerate(header) if name in header[:at]), "")
    return f"The header has two columns {repeated!r}." if repeated else ""


_ROWS: Final[Mapping[str, Callable[[BinaryIO, _Report], Iterator[tuple[int, Row]]]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
}
"""How the rows of a file are read, by the ending of its name."""
