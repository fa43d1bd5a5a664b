"""Check the structure of the server's modules: their size, and that they import each other at the top level only.

Usage: python -m tests.structure
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SERVER: Final = ROOT / "server" / "bough_server"

OWN: Final = ("bough_server", "bough")
"""The project's packages."""

MAX_LINES: Final = 500

_LAZY: Final = ("cli/", "__init__.py")
"""Where imports of the own package may be delayed: commands start quickly, and authors load only what they use."""


def problems(name: str, source: str) -> Iterator[str]:
    """Return what is wrong with a module; `name` is its path below the server's package."""
    count = len(source.splitlines())
    if count > MAX_LINES:
        yield f"{name}:1: has {count} lines; the limit is {MAX_LINES}. Split it by subject."
    tree = ast.parse(source)
    if not name.startswith(_LAZY):
        yield from (
            f"{name}:{line}: imports {module} inside of a function or under TYPE_CHECKING, which hides a circle"
            for line, module in _delayed_imports(tree)
        )


def _delayed_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the imports of the own package that are not at the top level, with their lines."""
    for node in ast.walk(tree):
        match node:
            case _ if node in tree.body:
                continue
            case ast.ImportFrom(level=level, module=module) if level or _is_own(module):
                yield node.lineno, "." * level + (module or "")
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names if _is_own(each.name))
    yield from _computed_imports(tree)


def _computed_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the calls of import_module and __import__ that load the own package, with their lines.

    The name may be computed, as in `f"bough_server.{name}"`; a variable alone is the name of an operator's module.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"), args=[name, *_]
            ):
                if any(_names_own(part) for part in ast.walk(name)):
                    yield node.lineno, ast.unparse(name)


def _names_own(part: ast.AST) -> bool:
    match part:
        case ast.Constant(value=str() as text):
            return text.startswith(".") or _is_own(text)
        case ast.Name(id="__name__" | "__package__"):
            return True
    return False


def _is_own(module: str | None) -> bool:
    return (module or "").partition(".")[0] in OWN


def main() -> int:
    """Print every problem; return 1 if there is one."""
    paths = sorted(path for path in SERVER.rglob("*.py"))
    found = [
        line for path in paths for line in problems(str(path.relative_to(SERVER)), path.read_text(encoding="utf-8"))
    ]
    print("\n".join(found) or f"structure: {len(paths)} modules are sound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
