"""Cases from the rows of JSONL and CSV files: what a template makes of them, and where mistakes are."""

import csv
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format

from bough_server.evals.sets import cases_from
from bough_server.evals.sets.eval_set import SetSource, read_eval_set
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.evals.sets.validation import set_problems

TEMPLATE: dict[str, Any] = {
    "id": "{{id}}",
    "turns": [{"user": "{{question}}", "expect": {"answer": "{{answer}}"}}],
}
ROW = '{"id": "a", "question": "Hi?", "answer": "Hello."}\n'


def write_set(folder: Path, rows: str | bytes, *, file: str = "cases.jsonl", template: Any = None) -> Path:
    """A set whose cases are the rows of a file beside it."""
    (folder / file).write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    made = {"name": "set", "agent": "echo", "cases_from": {"file": file, "template": template or TEMPLATE}}
    path = folder / "set.yaml"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return path


def read(folder: Path, rows: str | bytes, **changes: Any) -> tuple[SetSource, list[str]]:
    """The set of these rows, and its problems with paths relative to the folder."""
    source, problems = read_eval_set(write_set(folder, rows, **changes))
    return source, [str(problem).removeprefix(f"{folder}/") for problem in problems]


def problems_of(folder: Path, rows: str | bytes, **changes: Any) -> list[str]:
    """The problems of a set of these rows."""
    return read(folder, rows, **changes)[1]


def cases(source: SetSource) -> list[Any]:
    """The cases of a set, in JSON form."""
    return [json_format.MessageToDict(case) for case in source.set.cases]


def case(case_id: str, user: str, answer: str) -> Any:
    """A case of TEMPLATE."""
    return {"id": case_id, "turns": [{"user": user, "expect": {"answer": {"exact": answer}}}]}


def test_each_object_of_jsonl_is_a_case_and_empty_lines_are_none(tmp_path: Path) -> None:
    source, problems = read(tmp_path, ROW + '\n{"id": "b", "question": "{{x}}", "answer": "é", "more": 1}')
    assert problems == []
    assert cases(source) == [case("a", "Hi?", "Hello."), case("b", "{{x}}", "é")]


@pytest.mark.parametrize(
    "rows",
    [
        b"id,question,answer\na,Hi?,Hello.\n",
        b"\xef\xbb\xbfid,question,answer\r\na,Hi?,Hello.\r\n\r\n",
        b'"id","question","answer","more"\n"a","Hi?","Hello.",\n',
    ],
    ids=["plain", "a byte order mark and CRLF", "quotes"],
)
def test_each_row_of_csv_is_a_case(tmp_path: Path, rows: bytes) -> None:
    source, problems = read(tmp_path, rows, file="cases.csv")
    assert problems == []
    assert cases(source) == [case("a", "Hi?", "Hello.")]


def test_a_value_of_csv_may_be_on_several_lines_and_the_row_is_where_it_begins(tmp_path: Path) -> None:
    rows = 'id,question,answer\na,"Hi,\n""you""?",Hello.\nb,x\n'
    source, problems = read(tmp_path, rows, file="cases.csv")
    assert cases(source) == [case("a", 'Hi,\n"you"?', "Hello.")]
    assert problems == ["cases.csv:4: The row has 2 values, and the header 3 columns."]


def test_a_text_that_is_one_placeholder_takes_the_value_with_its_type(tmp_path: Path) -> None:
    template = {
        "id": "{{kind}}-{{number}}",
        "trials": "{{number}}",
        "labels": {"topic": "{{topic?}}"},
        "turns": [{"user": "{{number}} of {{data}}{{topic?}}", "expect": {"answer": {"json": {"equals": "{{data}}"}}}}],
    }
    source, problems = read(tmp_path, '{"kind": "k", "number": 3, "data": {"a": [1, null]}}', template=template)
    assert problems == []
    assert cases(source) == [
        {
            "id": "k-3",
            "trials": 3,
            "turns": [
                {
                    "user": '3 of {"a":[1,null]}',
                    "expect": {"answer": {"json": {"equalsJson": '{"a":[1,null]}'}}},
                }
            ],
        }
    ]


def test_cases_of_the_file_come_after_those_of_the_set(tmp_path: Path) -> None:
    path = write_set(tmp_path, ROW)
    path.write_text(path.read_text() + "cases: [{id: first, turns: [{user: Hi.}]}]\n")
    source, problems = read_eval_set(path)
    assert problems == []
    assert [one.id for one in source.set.cases] == ["first", "a"]
    assert str(source.problem("cases[0].turns[0].user", "no")) == f"{path}:11: cases[0].turns[0].user: no"
    assert str(source.problem("cases[1].turns[0].user", "no")) == f"{tmp_path}/cases.jsonl:1: turns[0].user: no"


def row(case_id: str, **columns: Any) -> str:
    """A line of JSONL."""
    return json.dumps({"id": case_id, "question": "Hi?", "answer": "Hello.", **columns}) + "\n"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("", ["cases.jsonl: The file has no rows."]),
        ("\n\r\n", ["cases.jsonl: The file has no rows."]),
        (row("a") + "[1]\n" + row("b"), ["cases.jsonl:2: The line must be a JSON object, "]),
        (row("a") + row("b") + row("a"), ["cases.jsonl:3: id: 'a' is also the id of line 1."]),
        (row("a") + '{"id": "b", "questions": "?"}\n', ["cases.jsonl:2: The row lacks the column "]),
        (row("a") + row("b", answer=3), ["cases.jsonl:2: turns[0].expect.answer: must be a text, or a mapping of "]),
        (row("a") + "{\0}\n", ["cases.jsonl:2: The line has a NUL character, which no text may have."]),
        (row("a").encode() + b'{"id": "\xff"}\n', ["cases.jsonl:2: The line is not UTF-8 text."]),
        (row("a") + "[" * 9_000, ["cases.jsonl:2: The line is not JSON that can be read: it is nested too deeply."]),
        ("\ufeff" + row("a") + "x" * 5_000_000, ["cases.jsonl:2: The line is longer than 2 MiB."]),
        (
            "".join(row(str(n), question="x" * 1_000_000) for n in range(9)),
            ["cases.jsonl:9: With this row the set is larger than 8 MiB: split the file."],
        ),
    ],
    ids=lambda value: "" if not isinstance(value, list) else value[0].partition(": ")[2][:40],
)  # fmt: skip
def test_a_mistake_in_jsonl_names_its_line(tmp_path: Path, rows: str | bytes, expected: Sequence[str]) -> None:
    found = problems_of(tmp_path, rows)
    assert [one[: len(start)] for one, start in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("id,question,id\n", "cases.csv:1: The header has two columns 'id'."),
        ("id, ,answer\n", "cases.csv:1: The header has no name for column 2."),
        ("id,question,answer\n", "cases.csv: The file has no rows."),
        (
            'id,question,answer\na,b,c\nb,"never closed,x\n\n',
            "cases.csv:3: This is not CSV that can be read: unexpected end of data. "
            "A value may have 131,072 characters.",
        ),
        (
            f'id,question,answer\na,b,c\nb,"{"x" * 140_000}",y\n',
            "cases.csv:3: This is not CSV that can be read: field larger than field limit (131072). "
            "A value may have 131,072 characters.",
        ),
    ],
)
def test_a_mistake_in_csv_names_its_line(tmp_path: Path, rows: str, expected: str) -> None:
    assert csv.field_size_limit() == 131_072
    assert problems_of(tmp_path, rows, file="cases.csv") == [expected]


def test_a_column_that_the_file_does_not_have_is_a_mistake_of_the_template(tmp_path: Path) -> None:
    template = {"id": "{{id}}", "turns": [{"user": "{{questoin}} {{ id }}"}]}
    assert problems_of(tmp_path, ROW * 3, template=template) == [
        "set.yaml:8: cases_from.template.turns[0].user: cases.jsonl has no column 'questoin'. Did you mean 'question'?"
    ]


def test_only_the_first_problems_of_a_file_are_listed(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "x\n" * 5_000)
    assert len(found) == cases_from.MAX_PROBLEMS + 1
    assert found[-1] == "cases.jsonl:100: These are the first 100 problems; what follows is not read."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("rows.jsonl", "set.yaml:3: cases_from: must be a mapping of `file` and `template`"),
        ({"flie": "a"}, "set.yaml:4: cases_from.flie: There is no such field. Did you mean 'file'?"),
        ({"file": "/etc/passwd"}, "'/etc/passwd' must be below the folder of the set, also behind links"),
        ({"file": "../rows.jsonl"}, "'../rows.jsonl' must be below the folder of the set, also behind links"),
        ({"file": "link.jsonl"}, "'link.jsonl' must be below the folder of the set, also behind links"),
        ({"file": "rows.txt"}, "'rows.txt' must end in .jsonl or .csv"),
        ({"file": "gone.jsonl"}, "There is no file 'gone.jsonl' in the folder"),
        ({"file": "a.jsonl", "template": {"turns": []}}, "cases_from.template.id: is required, with a column"),
    ],
)
def test_only_files_below_the_folder_of_the_set_are_read(tmp_path: Path, given: Any, expected: str) -> None:
    folder = tmp_path / "sets"
    folder.mkdir()
    (tmp_path / "rows.jsonl").write_text(ROW)
    (folder / "link.jsonl").symlink_to(tmp_path / "rows.jsonl")
    value = {"template": TEMPLATE, **given} if "file" in given and isinstance(given, dict) else given
    path = folder / "set.yaml"
    path.write_text(yaml.safe_dump({"name": "set", "agent": "echo", "cases_from": value}, sort_keys=False))
    source, problems = read_eval_set(path)
    assert expected in str(problems[0])
    assert not source.set.cases


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_set(tmp_path, ROW + row("b"))
    fill = cases_from.fill

    def append_and_fill(template: str, values: Any) -> Any:
        with (tmp_path / "cases.jsonl").open("a") as file:
            file.write(row("c"))
        return fill(template, values)

    monkeypatch.setattr(cases_from, "fill", append_and_fill)
    assert [str(one).removeprefix(f"{tmp_path}/") for one in read_eval_set(path)[1]] == [
        "cases.jsonl: The file was changed while it was read: try again when it is complete."
    ]


def test_problems_of_the_case_itself_name_the_line_too(tmp_path: Path) -> None:
    source, problems = read(tmp_path, ROW + row("b", question=" "))
    assert problems == []
    assert [str(one).removeprefix(f"{tmp_path}/") for one in set_problems(source, KnownNames())] == [
        "cases.jsonl:2: turns[0].user: must not be blank."
    ]


def test_a_hundred_thousand_lines_are_read_in_seconds_and_a_broken_one_is_named(tmp_path: Path) -> None:
    rows = [row(str(number)) for number in range(100_000)]
    rows[41_232] = '{"id": "41232",\n'
    path = write_set(tmp_path, "".join(rows))
    begin = time.process_time()
    _, problems = read_eval_set(path)
    took = time.process_time() - begin
    assert [str(one).removeprefix(f"{tmp_path}/") for one in problems] == [
        "cases.jsonl:41233: The line is not JSON that can be read: Input data was truncated.",
        "cases.jsonl: The file has 99,999 rows, and a set may have 10,000 cases: split it.",
    ]
    assert took < 8  # less than 2 on a machine that does nothing else
