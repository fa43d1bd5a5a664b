"""Check the structure of the server's modules: their size, imports at the top level only, each class name once.

Usage: python -m tests.structure
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SERVER: Final = ROOT / "server" / "bough_server"

MAX_LINES: Final = 500

_LAZY: Final = ("cli/", "__init__.py")
"""Where imports of the own package may be delayed: commands start quickly, and authors load only what they use."""


def problems(name: str, source: str) -> Iterator[str]:
    """Return what is wrong with a module; `name` is its path below the server's package."""
    count = len(source.splitlines())
    if count > MAX_LINES:
        yield f"{name}:1: has {count} lines, more than {MAX_LINES}: which second subject is in it?"
    tree = ast.parse(source)
    if not name.startswith(_LAZY):
        yield from (
            f"{name}:{line}: imports {module} inside of a function or under TYPE_CHECKING, which hides a circle"
            for line, module in _delayed_imports(tree)
        )


def repeated_classes(sources: Mapping[str, str]) -> Iterator[str]:
    """Return the public class names that modules use twice; `sources` has the modules by their paths.

    A private class is known by its module.
    """
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, (first, *others) in places.items():
        yield from (f"{place}: the class name {name} is also used in {first}" for place in others)


def _delayed_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the imports of the own package that are not at the top level, with their lines."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node not in tree.body
            and (node.module or "").startswith("bough_server")
        ):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Import) and node not in tree.body:
            yield from ((node.lineno, each.name) for each in node.names if each.name.startswith("bough_server"))


def main() -> int:
    """Print every problem; return 1 if there is one."""
    sources = {str(path.relative_to(SERVER)): path.read_text(encoding="utf-8") for path in sorted(SERVER.rglob("*.py"))}
    found = [line for path, source in sources.items() for line in problems(path, source)]
    found += repeated_classes(sources)
    print("\n".join(found) or f"structure: {len(sources)} modules are sound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
