"""Find words that the project does not use in its texts: docstrings, comments, messages, the schema and the pages.

Find lines of prose that are too long, and functions that are named by a past participle: `_made` can mean "builds one",
"handles one" or "waits for one".

python -m tests.words prints each as file:line and exits with 1 if there is one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).parents[1]

_ONE: Final = r"(?:[\w-]+ )"
"""A word between a verb and its particle: the object."""

UNUSED: Final[Mapping[str, str]] = {
    r"whoever|nobody|somebody|anybody": "name the actor: caller, client, worker, server, operator or user",
    r"theirs": "name whose it is",
    r"wish(es|ed|ing)?": "request, intent or option",
    rf"(let|lets|letting) {_ONE}?go": "release, close or drop",
    rf"(hand|hands|handed|handing) {_ONE}?back": "return",
    r"of (its|their) own": "separate, or leave it out",
}
"""The words as patterns, and what is written instead. Between two words there can be a line break."""

_PATTERN: Final = re.compile(
    "|".join(rf"(?P<w{index}>\b(?:{words})\b)" for index, words in enumerate(UNUSED)).replace(" ", r"\s+"),
    re.IGNORECASE,
)

_RULE_MESSAGE: Final = re.compile(r"\bmessage:\s*(?P<text>\"(?:[^\"\\]|\\.)*\"(?:\s*\"(?:[^\"\\]|\\.)*\")*)")
"""The text of a rule's `message:` in a schema file, which can go over several strings."""

NAMED: Final = ("server/bough_server/**/*.py", "clients/python/bough/*.py", "docs/generate/*.py", "proto/*.py")
"""The files whose functions are named by verbs."""

_CLAIMS: Final = frozenset({"is", "has", "are", "was"})
"""The first words of names that read as claims, which may have participles."""
_PROMISED: Final = frozenset({"started"})
"""Public methods of the client, which keep their names: `await stream.started()`."""
_HANDLERS: Final = frozenset({"on", "if", "until"})
"""Words before a participle that ends a name: `on_run_started`, `raise_if_cancelled`, `retry_until_stored`."""
_PARTICIPLE: Final = re.compile(
    r"(?!(?:need|feed|seed|speed|embed|exceed|proceed|succeed|shed)$)\w{2,}ed"
    r"|been|begun|bought|brought|broken|built|caught|chosen|done|drawn|driven|fallen|forgotten|frozen|given|gone|grown"
    r"|heard|held|hidden|kept|known|laid|left|lost|made|meant|met|paid|redone|rewritten|rebuilt|said|seen|sent|shown"
    r"|sold|spent|spoken|sought|stood|stuck|taken|taught|thought|thrown|told|torn|undone|unmade|withdrawn|won|written"
)
"""A past participle, as a word of a name."""

Text: TypeAlias = tuple[int, str]
"""A text of a file, and the line of the file where it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A word at a place."""

    path: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.instead}"


def python_texts(source: str, *, has_messages: bool) -> Iterator[Text]:
    """The comments and docstrings of a module, and its other strings if they are messages."""
    yield from _comments(source)
    tree = ast.parse(source)
    docstrings = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (has_messages or id(node) in docstrings):
            yield node.lineno, node.value


def proto_texts(source: str) -> Iterator[Text]:
    """The comments of a schema file, and the messages of its rules, which callers read."""
    yield from _joined([(number, line.partition("//")[2]) for number, line in _lines(source) if "//" in line])
    for message in _RULE_MESSAGE.finditer(source):
        yield source.count("\n", 0, message.start("text")) + 1, message["text"]


def yaml_texts(source: str) -> Iterator[Text]:
    """The comments of a YAML file or one like it, and its other texts too: examples are read as pages are."""
    yield 1, re.sub(r"^( *)#", r"\1 ", source, flags=re.MULTILINE)


def page_texts(source: str) -> Iterator[Text]:
    """A page as it is."""
    yield 1, source


FILES: Final[Mapping[str, Callable[[str], Iterator[Text]]]] = {
    "server/**/*.py": lambda source: python_texts(source, has_messages=True),
    "clients/python/bough/*.py": lambda source: python_texts(source, has_messages=True),
    "clients/python/bough/testing/*.py": lambda source: python_texts(source, has_messages=True),
    "clients/python/examples/*.py": lambda source: python_texts(source, has_messages=True),
    "clients/**/*.md": page_texts,
    "docs/**/*.py": lambda source: python_texts(source, has_messages=True),
    "examples/**/*.py": lambda source: python_texts(source, has_messages=True),
    "proto/*.py": lambda source: python_texts(source, has_messages=True),
    # The strings of tests are data.
    "tests/**/*.py": lambda source: python_texts(source, has_messages=False),
    "bench/**/*.py": lambda source: python_texts(source, has_messages=False),
    "proto/bough/**/*.proto": proto_texts,
    "examples/**/*.yaml": yaml_texts,
    "examples/**/*.md": page_texts,
    "docs/**/*.md": page_texts,
    "README.md": page_texts,
    "CHANGELOG.md": page_texts,
    "CONTRIBUTING.md": page_texts,
    # `make help` and the package index print what these say.
    "Makefile": yaml_texts,
    "pyproject.toml": yaml_texts,
    "Dockerfile": yaml_texts,
    "compose.yaml": yaml_texts,
    ".github/workflows/*.yml": yaml_texts,
}
"""The files that are read, and how their texts are found. What is generated from them is left out."""


_NO_PROSE: Final = re.compile(r"\s*[|#<]|- \[[^]]+\]\(\S+\)$")

LONG_LINE: Final = 140
"""From how many characters on a line of prose is too long."""


def findings(path: str, texts: Iterator[Text]) -> Iterator[Finding]:
    """The words in the texts of a file."""
    for line, text in texts:
        for match in _PATTERN.finditer(text):
            assert match.lastgroup is not None
            instead = list(UNUSED.values())[int(match.lastgroup[1:])]
            before = text.count("\n", 0, match.start())
            yield Finding(path=path, line=line + before, word=" ".join(match[0].split()), instead=instead)


def long_lines(path: str, source: str) -> Iterator[Finding]:
    """The lines of a page's prose that are too long; a row of a table, a heading, a block and a link are no prose."""
    is_block = False
    for number, line in enumerate(source.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_block = not is_block
        elif len(line) >= LONG_LINE and not is_block and not _NO_PROSE.match(line):
            yield Finding(path=path, line=number, word=f"{line[:40]}…", instead=f"wrap it below {LONG_LINE} characters")


def participle_names(path: str, source: str) -> Iterator[Finding]:
    """The functions of a module, properties excepted, whose name begins or ends with a past participle."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_participle_name(node):
            yield Finding(path=path, line=node.lineno, word=node.name, instead="a verb that says what it does to what")


def _is_participle_name(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    first, *rest = node.name.strip("_").split("_")
    if first in _CLAIMS or node.name in _PROMISED:
        return False
    ends_in_one = bool(rest) and _PARTICIPLE.fullmatch(rest[-1]) and not _HANDLERS & {first, *rest}
    return bool(_PARTICIPLE.fullmatch(first) or ends_in_one)


def all_findings(root: Path = ROOT) -> list[Finding]:
    """The words in all files and the names in Python's, in the order of the files and their lines."""
    found: set[Finding] = set()
    for file in (file for pattern in NAMED for file in root.glob(pattern)):
        found |= set(participle_names(str(file.relative_to(root)), file.read_text(encoding="utf-8")))
    for pattern, texts_of in FILES.items():
        for file in root.glob(pattern):
            if "node_modules" in file.relative_to(root).parts:
                continue  # what npm installed beside a client is not ours
            path, text = str(file.relative_to(root)), file.read_text(encoding="utf-8")
            found |= set(findings(path, texts_of(text)))
            found |= set(long_lines(path, text)) if texts_of is page_texts else set()
    return sorted(found, key=lambda finding: (finding.path, finding.line, finding.word))


def main() -> int:
    """Print the words and return 1 if there is one."""
    found = all_findings()
    for finding in found:
        print(finding)
    if found:
        print(f"{len(found)} words, names or lines that are not the project's.", file=sys.stderr)
    return 1 if found else 0


def _comments(source: str) -> Iterator[Text]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from _joined([(each.start[0], each.string[1:]) for each in tokens if each.type == tokenize.COMMENT])


def _joined(comments: list[Text]) -> Iterator[Text]:
    """Comments of lines that follow one another as one text: a phrase can go over a line's end."""
    block: list[Text] = []
    for number, text in comments:
        if block and number != block[-1][0] + 1:
            yield block[0][0], "\n".join(each for _, each in block)
            block = []
        block.append((number, text))
    if block:
        yield block[0][0], "\n".join(each for _, each in block)


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The strings that are statements by themselves: of modules, classes, functions and of names before them."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as constant):
                yield constant


def _lines(source: str) -> Iterator[Text]:
    yield from enumerate(source.splitlines(), start=1)


if __name__ == "__main__":
    sys.exit(main())
