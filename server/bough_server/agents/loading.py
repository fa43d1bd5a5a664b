"""Load definition files and Python modules, and report all their problems together."""

import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar, get_args

from bough.v1 import agent_pb2
from bough_server.agents.definition import Source, parse_definition
from bough_server.agents.graph.builder import Graph
from bough_server.agents.validation import Known, validate
from bough_server.documents.yaml import raise_problems, read_documents
from bough_server.errors import ConfigurationError, Problem
from bough_server.functions import Function
from bough_server.runtime.agent import Agent
from bough_server.tools.tool import Tool

T = TypeVar("T")


class NamedValue(Protocol):
    """A value of a module that is found by its name."""

    @property
    def name(self) -> str:
        """The name, unique among values of its kind."""
        ...


N = TypeVar("N", bound=NamedValue)


def definition_files(patterns: Iterable[str], folder: Path) -> list[Path]:
    """Return the files that glob patterns relative to a folder match, each once, sorted within a pattern.

    Raises ConfigurationError if a pattern matches no file.
    """
    # A dictionary: two patterns may match one file, and the files keep the order of the patterns.
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        root, relative = (Path(path.anchor), path.relative_to(path.anchor)) if path.anchor else (folder, path)
        found = sorted(each for each in root.glob(str(relative)) if each.is_file())
        if not found:
            raise ConfigurationError(f"{pattern}: No agent definition file matches; looked in {folder}.")
        files.update(dict.fromkeys(found))
    return list(files)


def read_sources(paths: Iterable[Path]) -> tuple[list[Source], list[Problem]]:
    """Return the definitions of files, as far as they can be read, and the problems with how they are written.

    Raises ConfigurationError for a file that is missing or is not YAML.
    """
    sources: list[Source] = []
    problems: list[Problem] = []
    for path in paths:
        documents = read_documents(path)
        if not documents:
            problems.append(Problem(path=str(path), line=1, field="", description="The file defines no agent."))
        for document in documents:
            source, found = parse_definition(document)
            sources.append(source)
            problems += found
    return sources, problems


def source_problems(sources: Sequence[Source], known: Known) -> list[Problem]:
    """Return the problems with what definitions mean, each with its file, line and field."""
    validated = validate([source.definition for source in sources], known)
    return [
        source.problem(problem.field, problem.description)
        for source, problems in zip(sources, validated, strict=True)
        for problem in problems
    ]


def drop_reported_problems(problems: Iterable[Problem], reported: Iterable[Problem]) -> list[Problem]:
    """Return the problems whose field, or a field around it, has no problem in `reported`.

    A number that cannot be read is not reported as missing too.
    """
    places = list(reported)
    return [each for each in problems if not any(_is_within(each, place) for place in places)]


def _is_within(inner: Problem, outer: Problem) -> bool:
    if (inner.path, inner.line) != (outer.path, outer.line):
        return False
    return (
        not outer.field or inner.field == outer.field or inner.field.startswith((f"{outer.field}.", f"{outer.field}["))
    )


def load_sources(paths: Iterable[Path]) -> list[Source]:
    """Return the definitions of files. Raises ConfigurationError with every problem of how they are written."""
    sources, problems = read_sources(paths)
    raise_problems(problems)
    return sources


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonParts:
    """Tools, agents and functions found in modules, in the order in which they were found."""

    tools: tuple[Tool, ...] = ()
    agents: tuple[Agent, ...] = ()
    functions: tuple[Function, ...] = ()
    graphs: tuple[Source, ...] = ()
    """The graphs, which are definitions with the lines of their parts."""


def load_python(module_names: Iterable[str], folder: Path) -> PythonParts:
    """Return the tools, agents, graphs and functions in the namespaces of modules, which are in a folder or installed.

    Raises ConfigurationError with the module and the line if an import fails, and if two tools, two agents or two
    functions have the same name.
    """
    tools: dict[str, Tool] = {}
    agents: dict[str, Agent] = {}
    functions: dict[str, Function] = {}
    graphs: dict[str, Graph] = {}
    for module_name in module_names:
        module = _import(module_name, folder.resolve())
        # A copy, because a value's own code may change the namespace while it is inspected.
        for value in list(vars(module).values()):
            if isinstance(value, Tool):
                _add(tools, value.name, value, f"{module_name}: There are two tools named {value.name!r}.")
            elif isinstance(value, get_args(Function)):
                _add(functions, value.name, value, f"{module_name}: There are two functions named {value.name!r}.")
            elif isinstance(value, Graph):
                _add(graphs, value.name, value, f"{module_name}: There are two graphs named {value.name!r}.")
                for name, function in value.functions.items():
                    _add(functions, name, function, f"{module_name}: There are two functions named {name!r}.")
            elif _is_agent(value):
                name = value.definition.name
                _add(agents, name, value, f"{module_name}: There are two agents named {name!r}.")
    return PythonParts(
        tools=tuple(tools.values()),
        agents=tuple(agents.values()),
        functions=tuple(functions.values()),
        graphs=tuple(graph.source for graph in graphs.values()),
    )


def load_values(kind: type[N], module_names: Iterable[str], folder: Path, *, what: str) -> dict[str, N]:
    """Return the values of a class in the namespaces of modules, by name and in the order in which they were found.

    `what` names them in the plural. Raises ConfigurationError with the module and the line if an import fails, and if
    two have the same name.
    """
    values: dict[str, N] = {}
    for module_name in module_names:
        module = _import(module_name, folder.resolve())
        for value in list(vars(module).values()):
            if isinstance(value, kind):
                _add(values, value.name, value, f"{module_name}: There are two {what} named {value.name!r}.")
    return values


def digest_code(module_names: Iterable[str], folder: Path) -> str:
    """Return a SHA-256 hex digest over the sources of the loaded modules that are a project's; empty without any.

    They are those in its folder, of its virtual environment none, and those in the packages of the named modules. What
    functions import when they are called is not among them.
    """
    packages = {name.partition(".")[0] for name in module_names}
    if not packages:
        return ""
    digest = hashlib.sha256()
    root = f"{folder.resolve()}{os.sep}"
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and (name.partition(".")[0] in packages or _is_in_project(name, path, root)):
            # Names instead of paths: other servers have the project elsewhere.
            source = _read_source(module, path)
            digest.update(f"{name} {len(source)} ".encode() + source)
    return digest.hexdigest()


def _is_in_project(module_name: str, path: str, root: str) -> bool:
    is_own = module_name.partition(".")[0] not in ("__main__", "bough", "bough_server")
    return is_own and path.startswith(root) and "site-packages" not in path


def _read_source(module: ModuleType, path: str) -> bytes:
    """Return the file of a module, which may be in an archive; nothing if it is gone."""
    read = getattr(getattr(module, "__loader__", None), "get_data", None)
    try:
        source: bytes = read(path) if read is not None else Path(path).read_bytes()
    except OSError:
        return b""
    return source


def _add(found: dict[str, T], name: str, value: T, message: str) -> None:
    # One value may be in several namespaces: a module that imports another's tool has it too.
    if found.setdefault(name, value) is not value:
        raise ConfigurationError(message)


def _is_agent(value: object) -> bool:
    return (
        # The classes of agents have both attributes too, and are often imported beside the agents.
        not isinstance(value, type)
        and isinstance(getattr(value, "definition", None), agent_pb2.AgentDefinition)
        and callable(getattr(value, "run", None))
    )


def _import(module_name: str, folder: Path) -> ModuleType:
    _forget_other(module_name, folder)
    try:
        with _make_importable(folder):
            return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        raise ConfigurationError(str(_problem(module_name, folder, error))) from error


@contextmanager
def _make_importable(folder: Path) -> Iterator[None]:
    """Make a folder's modules importable for the duration of the context."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # else a file written since its folder was last read would not be found
    try:
        yield
    finally:
        # Only during the import: another project of this process, as in tests, must not find these modules.
        sys.path.remove(str(folder))


def _forget_other(module_name: str, folder: Path) -> None:
    """Unload a module of this name that came from another folder, if this folder has one with the name."""
    top = module_name.partition(".")[0]
    if not ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
        return
    # Replacing a loaded standard library module would break the server itself.
    if top in sys.stdlib_module_names:
        raise ConfigurationError(f"{folder / top}: {top!r} is the name of a standard library module; choose another.")
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if loaded is not None and folder not in Path(loaded).resolve().parents:
        # Python would return the other project's module instead of importing this one.
        for name in [each for each in sys.modules if each == top or each.startswith(f"{top}.")]:
            del sys.modules[name]


def _problem(module_name: str, folder: Path, error: BaseException) -> Problem:
    """Locate an import error at the innermost line of the operator's code."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, SyntaxError):
        return Problem(path=error.filename or module_name, line=error.lineno or 0, field="", description=text)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if folder in Path(frame.filename).parents:
            return Problem(path=frame.filename, line=frame.lineno or 0, field="", description=text)
    return Problem(path=module_name, line=0, field="", description=f"cannot be imported: {text}")
