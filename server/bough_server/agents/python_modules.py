"""Tools, agents and pure functions found in the operator's Python modules; what they do when they run is theirs."""

import importlib
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar, get_args

from bough.v1 import agent_pb2
from bough_server.errors import ConfigurationError, Problem
from bough_server.functions import Function
from bough_server.runtime.agent import Agent
from bough_server.tools.tool import Tool

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonParts:
    """What modules bring, in the order in which it was found."""

    tools: tuple[Tool, ...] = ()
    agents: tuple[Agent, ...] = ()
    functions: tuple[Function, ...] = ()


def load_python(module_names: Iterable[str], folder: Path) -> PythonParts:
    """The tools, agents and functions in the namespaces of modules, which lie in a folder or are installed.

    Raises ConfigurationError that names the module and the line where an import fails, and for two tools, two agents or
    two functions of one name.
    """
    tools: dict[str, Tool] = {}
    agents: dict[str, Agent] = {}
    functions: dict[str, Function] = {}
    for module_name in module_names:
        module = _import(module_name, folder.resolve())
        for value in list(vars(module).values()):
            if isinstance(value, Tool):
                _add(tools, value.name, value, f"{module_name}: There are two tools named {value.name!r}.")
            elif isinstance(value, get_args(Function)):
                _add(functions, value.name, value, f"{module_name}: There are two functions named {value.name!r}.")
            elif _is_agent(value):
                name = value.definition.name
                _add(agents, name, value, f"{module_name}: There are two agents named {name!r}.")
    return PythonParts(tools=tuple(tools.values()), agents=tuple(agents.values()), functions=tuple(functions.values()))


def _add(found: dict[str, T], name: str, value: T, message: str) -> None:
    if found.setdefault(name, value) is not value:
        raise ConfigurationError(message)


def _is_agent(value: object) -> bool:
    return (
        not isinstance(value, type)
        and isinstance(getattr(value, "definition", None), agent_pb2.AgentDefinition)
        and callable(getattr(value, "run", None))
    )


def _import(module_name: str, folder: Path) -> ModuleType:
    _forget_other(module_name, folder)
    try:
        with _importing_from(folder):
            return importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(str(_problem(module_name, folder, error))) from error


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Makes a folder's modules importable, and only while it lasts."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _forget_other(module_name: str, folder: Path) -> None:
    """Drops a loaded module of this name that came from another folder, where this folder has one of its own."""
    top = module_name.partition(".")[0]
    if not ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
        return
    if top in sys.stdlib_module_names:
        raise ConfigurationError(f"{folder / top}: {top!r} is the name of a module of Python's own; choose another.")
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if loaded is not None and folder not in Path(loaded).resolve().parents:
        for name in [each for each in sys.modules if each == top or each.startswith(f"{top}.")]:
            del sys.modules[name]


def _problem(module_name: str, folder: Path, error: Exception) -> Problem:
    """The mistake at the last line of the operator's own that led to it."""
    words = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, SyntaxError):
        return Problem(path=error.filename or module_name, line=error.lineno or 0, field="", description=words)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if folder in Path(frame.filename).parents:
            return Problem(path=frame.filename, line=frame.lineno or 0, field="", description=words)
    return Problem(path=module_name, line=0, field="", description=f"cannot be imported: {words}")
