"""Check the structure of the server's modules: their size, imports at the top level only, each class name once.

One module reads the clock, one draws ids, one makes threads. Tests use only what is public.

Usage: python -m tests.structure
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SERVER: Final = ROOT / "server" / "bough_server"
TESTS: Final = (ROOT / "tests", ROOT / "bench")

OWN: Final = ("bough_server", "bough")
"""The project's packages."""

MAX_LINES: Final = 500

_LAZY: Final = (
    *("cli/", "__init__.py", "testing/__init__.py"),
    *("settings.py", "store/opening.py", "tool_servers/opening.py"),
)
"""Where imports of the own package may be delayed: commands start quickly, and authors load only what they use.

pytest loads the plugin in every session, wherever Bough is installed. The driver of a database need not be installed,
nor what tool servers are spoken to with.
"""


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
    yield from (f"{name}:{line}: {problem}" for line, problem in _system_access(name, tree))


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


_PRIVATE: Final = re.compile(r"(?!(?:_exit|_replace)$)_[A-Za-z]\w*")
"""A private name; `os._exit` and the `_replace` of named tuples are public in spite of their names."""
_BY_NAME: Final = frozenset({"setattr", "getattr", "hasattr", "delattr"})
"""Functions, and methods of monkeypatch, that take the name of an attribute."""


def private_access(path: str, source: str) -> Iterator[str]:
    """Return the places at which a test uses a private name that its own module does not define."""
    tree = ast.parse(source)
    own = set(_own_names(tree))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.ImportFrom | ast.Call))
    for node in nodes:
        for name in _private_names(node):
            if name not in own:
                yield f"{path}:{node.lineno}: uses the private name {name}: tests go through what is public"


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Return the names that a module's functions and classes define, attributes of `self` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _private_names(node: ast.Attribute | ast.ImportFrom | ast.Call) -> Iterator[str]:
    """Return the private names that a node reads, sets, imports or names in a string."""
    match node:
        case ast.Attribute(attr=name, value=value) if not _is_own(value):
            names = [name]
        case ast.ImportFrom(names=aliases):
            names = [alias.name for alias in aliases]
        case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function), args=args) if function in _BY_NAME:
            texts = [each.value for each in args[:2] if isinstance(each, ast.Constant)]
            names = [] if args and _is_own(args[0]) else [str(text).rpartition(".")[2] for text in texts]
        case _:
            names = []
    yield from (name for name in names if _PRIVATE.fullmatch(name))


def _delayed_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the imports of the own package that are not at the top level, with their lines."""
    for node in ast.walk(tree):
        match node:
            case _ if node in tree.body:
                continue
            case ast.ImportFrom(level=level, module=module) if level or _is_of_project(module):
                yield node.lineno, "." * level + (module or "")
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names if _is_of_project(each.name))
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
            return text.startswith(".") or _is_of_project(text)
        case ast.Name(id="__name__" | "__package__"):
            return True
    return False


def _is_of_project(module: str | None) -> bool:
    return (module or "").partition(".")[0] in OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    """Something of the system that one module alone uses, so that whole servers can be simulated by replacing it."""

    module: str
    does: str
    names: re.Pattern[str]
    """The names, with their modules, that only this module uses."""


_SYSTEMS: Final = (
    _System(
        module="clock.py",
        does="reads a clock",
        names=re.compile(r"time\.(?!sleep$)\w+|datetime\.datetime\.(now|utcnow|today)|datetime\.date\.today"),
    ),
    _System(
        module="ids.py",
        does="draws randomness from the system",
        names=re.compile(r"uuid\.(uuid[14678]|getnode)|secrets\.\w+|os\.(urandom|getrandom)|random\.(?!Random$)\w+"),
    ),
    _System(
        module="threads.py",
        does="makes threads",
        names=re.compile(
            r"threading\.(Thread|Timer)|concurrent\.futures\.\w+PoolExecutor|concurrent\.futures\.thread\..*"
            r"|multiprocessing\..*|asyncio\.to_thread|_thread\..*"
        ),
    ),
)

_OUTSIDE: Final = ("cli/", "testing/")
"""What no simulated server runs: commands that call a server, and the plugin of pytest."""


def _system_access(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the places at which a module uses what one other module has for all, with their lines."""
    if name.startswith(_OUTSIDE):
        return
    imports, annotations = dict(_imports(tree)), set(_annotations(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node not in annotations:
            used = _system_call(node, imports) or _qualified_name(node, imports)
            for system in _SYSTEMS:
                if name != system.module and system.names.fullmatch(used):
                    yield node.lineno, f"{ast.unparse(node)} {system.does}, which only {system.module} does"


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Return the names that a module imports, each with what it stands for, such as `time.monotonic`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for each in aliases:
                    package = each.name.partition(".")[0]  # all that `import a.b` names
                    yield (each.asname, each.name) if each.asname else (package, package)
            case ast.ImportFrom(module=str() as module, names=aliases):
                yield from ((each.asname or each.name, f"{module}.{each.name}") for each in aliases)


def _annotations(tree: ast.Module) -> Iterator[ast.AST]:
    """Return the nodes of all annotations, which only name types."""
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(annotation, ast.expr):
                yield from ast.walk(annotation)


def _qualified_name(node: ast.expr, imports: Mapping[str, str]) -> str:
    """Return the name of an expression with its module; empty if it is not imported."""
    match node:
        case ast.Name(id=name):
            return imports.get(name, "")
        case ast.Attribute(value=value, attr=name) if module := _qualified_name(value, imports):
            return f"{module}.{name}"
    return ""


def _system_call(node: ast.expr, imports: Mapping[str, str]) -> str:
    """Return the function that a method or call is as good as, for those that no import shows; else empty."""
    match node:
        case ast.Attribute(attr="time", value=loop) if ast.unparse(loop).removesuffix("()").endswith("loop"):
            return "time.monotonic"
        case ast.Call(func=ast.Attribute(attr="GetCurrentTime")):
            return "time.time_ns"
        case ast.Call(func=ast.Attribute(attr="run_in_executor"), args=[ast.Constant(value=None), *_]):
            return "asyncio.to_thread"
        case ast.Call(func=function, args=[], keywords=[]) if _qualified_name(function, imports) == "random.Random":
            return "os.urandom"  # its seed
    return ""


def main() -> int:
    """Print every problem; return 1 if there is one."""
    sources = {str(path.relative_to(SERVER)): path.read_text(encoding="utf-8") for path in sorted(SERVER.rglob("*.py"))}
    found = [line for path, source in sources.items() for line in problems(path, source)]
    found += repeated_classes(sources)
    tests = sorted(path for folder in TESTS for path in folder.rglob("*.py"))
    for path in tests:
        found += private_access(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    print("\n".join(found) or f"structure: {len(sources)} modules and {len(tests)} of tests are sound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
