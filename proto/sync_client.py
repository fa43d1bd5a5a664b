"""Generate the synchronous Python client from the asynchronous one: the package bough.sync.

Five modules differ in nothing but `async`, `await` and names. Where the two clients truly differ, both halves are
written by hand in one module, such as those of bough.calls and bough.log_stream.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Final

MODULES: Final = ("catalog", "client", "evaluations", "sessions", "stream", "usage")

_CONFIGURATION: Final = Path(__file__).parents[1] / "pyproject.toml"

_PACKAGE: Final = '''"""Client for programs without an event loop; generated, as the modules beside it are."""

from bough.sync.client import Client

__all__ = ["Client"]
'''

_REPLACED: Final[Mapping[str, str]] = {
    # The syntax. A list of an asynchronous iterator is one of an iterable: no comprehension is needed for that.
    r"\[(\w+) async for \1 in ": "[*",
    r"\basync (?=def |for |with )": "",
    r"\bawait ": "",
    r"__a(?=enter__|exit__)": "__",
    # Types of the library and of gRPC.
    r"\bAsyncIterator\b": "Iterator",
    r" \| AsyncIterable\[[^]]*\]": "",
    r"\bAwaitable\[([^]]*)\]": r"\1",
    r"\baio\.(?=Channel\b)": "grpc.",
    r"(?<=Service)AsyncStub\b": "Stub",
    # Names of the client; in prose "Sessions of a server" are no class.
    r"\bAsyncClient\b": "Client",
    r"\b(Calls|Catalog|Evaluations|Ledger|Sessions)\b(?! of )": r"Sync\1",
    r"\b(LogStream|StreamCall|RunStream|EvaluationStream)\b": r"Sync\1",
    r"\basync_(?=channel\b|check\b)": "sync_",
    r"\b(?=aggregate_messages\b)": "sync_",
    r"\bcollect\b": "collect_sync",
    r"\bfrom bough\.(?=(?:catalog|evaluations|sessions|stream|usage) import)": "from bough.sync.",
    # What the docstrings say of asyncio.
    r"\bAsynchronous client\b": "Synchronous client",
    r", an asynchronous context manager for one event loop\.": (
        " for programs without an event loop, a context manager."
    ),
    r"(?<=^    \"\"\")(Calls of the \w+(?: that evaluate)?)\.": r"\1, for programs without an event loop.",
    r"(?<=, as they arrive)\.": ", for one thread; any other thread may close the stream.",
    r"Safe while another task reads\.": "Safe from a thread other than the reader's once the stream has its id.",
    r"# For types alone: .*": "# For types alone, as in the asynchronous client.",
}
"""Regular expressions, and what replaces their matches, in this order; each has to match somewhere."""


def generate(source: Path, target: Path) -> None:
    """Write the synchronous package into a new folder, from the folder of the asynchronous client's modules.

    Raises ValueError for a replacement that has nothing to replace, CalledProcessError if a module is not valid then.
    """
    texts = {name: (source / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
    texts = {name: _without_parentheses(text) for name, text in texts.items()}
    for pattern, replacement in _REPLACED.items():
        replaced = {name: re.sub(pattern, replacement, text, flags=re.MULTILINE) for name, text in texts.items()}
        if replaced == texts:
            raise ValueError(f"nothing matches {pattern!r}: remove it from proto/sync_client.py")
        texts = replaced
    target.mkdir(parents=True)
    (target / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    for name, text in texts.items():
        docstring, rest = text.split("\n", 1)
        header = f"# Generated from bough/{name}.py by `make proto`, which overwrites changes."
        (target / f"{name}.py").write_text(f"{docstring}\n\n{header}\n{rest}", encoding="utf-8")
    # Names became shorter and longer, some imports are double or not needed.
    _ruff("check", "--fix", "--select=I,F", target)
    _ruff("format", target)


def _without_parentheses(text: str) -> str:
    """Remove the parentheses that `(await call).attribute` needs only because of its `await`."""
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    removed: list[tuple[int, int]] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Await(end_lineno=int() as last, end_col_offset=int() as column) as awaited):
                begin, end = starts[awaited.lineno - 1] + awaited.col_offset, starts[last - 1] + column
                removed += [(text.rindex("(", 0, begin), begin), (end, text.index(")", end) + 1)]
    for begin, end in sorted(removed, reverse=True):
        text = text[:begin] + text[end:]
    return text


def _ruff(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "ruff", *arguments, "--quiet", "--config", _CONFIGURATION], check=True)
