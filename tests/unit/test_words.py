"""The check of words: what it reads of each kind of file, and what it reports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import words
from tests.words import (
    LONG_LINE,
    Text,
    findings,
    long_lines,
    page_texts,
    participle_names,
    proto_texts,
    python_texts,
    yaml_texts,
)

MODULE = '''"""What nobody reads.

It stands on the fourth line: somebody.
"""

import os  # for whoever runs it

nobody = os.name
"""An attribute that anybody can read."""


def hand_back(wish: str) -> str:
    """Lets
    go."""
    # A comment whose phrase is cut: hand
    # back.
    return f"This is {wish} of its own." + "theirs"
'''


def found(texts: Iterator[Text]) -> list[tuple[int, str]]:
    """The lines and words that are reported."""
    return [(finding.line, finding.word) for finding in findings("a.py", texts)]


def test_comments_docstrings_and_messages_of_a_module_are_read_and_identifiers_are_not() -> None:
    assert sorted(found(python_texts(MODULE, has_messages=True))) == [
        (1, "nobody"),
        (3, "somebody"),
        (6, "whoever"),
        (9, "anybody"),
        (13, "Lets go"),
        (15, "hand back"),
        (17, "of its own"),
        (17, "theirs"),
    ]


def test_strings_that_are_data_are_not_read() -> None:
    lines = [line for line, _ in found(python_texts(MODULE, has_messages=False))]

    assert sorted(lines) == [1, 3, 6, 9, 13, 15]


def test_only_comments_of_the_schema_are_read() -> None:
    schema = "// Of its\n// own.\nmessage Nobody {\n  string wish = 1; // A wish.\n}\n"

    assert found(proto_texts(schema)) == [(1, "Of its own"), (4, "wish")]


def test_messages_of_rules_are_read_and_their_expressions_are_not() -> None:
    rule = (
        "string a = 1 [(buf.validate.field).cel = {\n"
        '  id: "nobody"\n'
        "  message:\n"
        '    "must be a name that \\"somebody\\" "\n'
        '    "has"\n'
        "  expression: \"this != 'anybody'\"\n"
        "}];\n"
    )

    assert found(proto_texts(rule)) == [(4, "somebody")]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Pages of their own.", "of their own"),
        ("It hands it back.", "hands it back"),
        ("It lets it go.", "lets it go"),
        ("Letting\neffects\ngo.", "Letting effects go"),
        ("Handed results back.", "Handed results back"),
    ],
)
def test_a_phrase_is_found_with_its_object_between_its_words(text: str, word: str) -> None:
    assert [found_word for _, found_word in found(page_texts(text))] == [word]


def test_examples_and_pages_are_read_whole() -> None:
    assert found(yaml_texts("# Let\n# go.\nname: lead\ndescription: For anybody.\n")) == [(1, "Let go"), (4, "anybody")]
    assert found(page_texts("# Title\n\nWhat it hands\nback.\n")) == [(3, "hands back")]


@pytest.mark.parametrize("text", ["This is its own.", "washing", "wishbone", "Outlets go here", "handbook", "bodies"])
def test_other_words_are_not_reported(text: str) -> None:
    assert found(page_texts(text)) == []


def test_a_finding_has_its_place_and_what_to_write_instead() -> None:
    [finding] = findings("docs/a.md", page_texts("\nIt handed back a value.\n"))

    assert str(finding) == "docs/a.md:2: 'handed back': return"


def test_lines_of_prose_that_are_too_long_are_reported_and_those_of_tables_and_blocks_are_not() -> None:
    long, line = "a" * LONG_LINE, "a" * (LONG_LINE - 1)
    page = f"{line}\n{long}\n| {long} |\n```\n{long}\n```\n- {line}\n"
    assert [finding.line for finding in long_lines("a.md", page)] == [2, 7]


def test_files_are_found_by_their_folders_and_generated_ones_are_left_out(tmp_path: Path) -> None:
    for path in ("server/a/b.py", "clients/python/bough/c.py", "clients/python/bough/v1/d_pb2.py", "tests/t.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text('"""For nobody."""\n', encoding="utf-8")
    (tmp_path / "README.md").write_text(f"For nobody.\n{'a' * LONG_LINE}\n", encoding="utf-8")
    (tmp_path / "Makefile").write_text("run: ## serves\n\ntest: ## for nobody\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[project]\ndescription = "For nobody."\n', encoding="utf-8")

    places = [f"{finding.path}:{finding.line}" for finding in words.all_findings(tmp_path)]
    assert places == [
        "Makefile:3",
        "README.md:1",
        "README.md:2",
        "clients/python/bough/c.py:1",
        "pyproject.toml:2",
        "server/a/b.py:1",
        "tests/t.py:1",
    ]


NAMES = """
def judged(): ...
def _made_request(): ...
async def run_started(): ...
class Reader:
    @property
    def written(self): ...
    @cached_property
    def _chosen(self): ...
    def is_closed(self): ...
    def has_been_sent(self): ...
    def _shown(self): ...
    def on_run_started(self):
        def taken(): ...
    def retry_until_stored(self): ...
    def raise_if_cancelled(self): ...
def feed(): ...
def exceed_limit(): ...
def __getattr__(): ...
"""


def test_functions_named_by_a_participle_are_reported_but_not_properties_claims_and_handlers() -> None:
    found = {(finding.line, finding.word) for finding in participle_names("a.py", NAMES)}

    assert found == {(2, "judged"), (3, "_made_request"), (4, "run_started"), (12, "_shown"), (14, "taken")}
