"""Check the commands of blocks that are not run: their subcommands and options exist, and so do targets of make."""

import re
import shlex
from collections.abc import Iterator
from typing import Final

import pytest
from typer.testing import CliRunner

from bough_server.cli.program import make_program
from tests.docs.pages import ROOT, Block

_OPERATORS: Final = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "(", ")"})
_TARGET: Final = re.compile(r"^([a-z-]+):", re.MULTILINE)


def typed(text: str) -> str:
    """What is typed in a block of a terminal: the lines after a prompt, with their continuations."""
    lines: list[str] = []
    is_continued = False
    for line in text.splitlines():
        is_typed = is_continued or line.startswith("$ ")
        lines.append(line.removeprefix("$ ") if is_typed else "")
        is_continued = is_typed and line.endswith("\\")
    return "\n".join(lines)


def check(block: Block, text: str) -> None:
    """Fail with the place of the first command that does not exist as it is written."""
    for line, words in _commands(text):
        place = f"{block.page}:{block.line + line}"
        if words[0] == "bough":
            _check_bough(place, words[1:])
        elif words[0] == "make":
            _check_make(place, words[1:])


def _check_bough(place: str, arguments: list[str]) -> None:
    # With --help, options are judged and nothing is run.
    ended = CliRunner().invoke(make_program(arguments), [*arguments, "--help"])
    if ended.exit_code != 0:
        pytest.fail(f"{place}: bough {' '.join(arguments)}\n{ended.output}", pytrace=False)


def _check_make(place: str, arguments: list[str]) -> None:
    targets = _TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    for name in arguments:
        if "=" not in name and name not in targets:
            pytest.fail(f"{place}: there is no target {name!r} in the Makefile.", pytrace=False)


def _commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The simple commands of a text, each with its line from 0; redirections and assignments are left out."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if number and lines[number - 1].endswith("\\"):
            continue
        whole = line
        for further in lines[number + 1 :]:
            if not whole.endswith("\\"):
                break
            whole = whole[:-1] + further
        for words in _split(whole):
            yield number, words


def _split(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in _OPERATORS:
            words.append(word)
            continue
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            yield words
        words = []
