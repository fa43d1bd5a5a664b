"""Markdown that the references need."""

import textwrap
from collections.abc import Iterator
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def cell(text: str) -> str:
    """A text as the content of a table's cell: one line, without the bar that ends cells."""
    return " ".join(text.split()).replace("|", "\\|")


def wrap(text: str) -> Iterator[str]:
    """A paragraph as lines."""
    yield from textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def anchor(heading: str) -> str:
    """The name that a heading is linked by."""
    return "".join(letter for letter in heading.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def link_to_editors(kind: str, name: str) -> Iterator[str]:
    """How an editor finds the JSON Schema for a kind of file."""
    yield "## In an editor"
    yield ""
    yield "Editors with the YAML language server check and complete these files by a JSON Schema. Write it to a"
    yield "file, and name that in a comment as above; in a file with several documents, each needs the comment."
    yield ""
    yield "```sh"
    yield f"bough schema {kind} > {name}.schema.json"
    yield "```"
