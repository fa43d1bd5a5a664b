"""Registration of commands, which take the global options after their name as well."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Final, TypeVar, cast

import typer

from bough_server.cli.options import AddressOption, AsOption, ConfigOption, EmbeddedOption, VerboseOption, target_of

F = TypeVar("F", bound=Callable[..., None])

_GLOBAL: Final = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
    for name, default, option in (
        ("config", None, ConfigOption),
        ("address", None, AddressOption),
        ("embedded", False, EmbeddedOption),
        ("as_caller", None, AsOption),
        ("verbose", False, VerboseOption),
    )
}
"""The global options as parameters of a command."""


def command(group: typer.Typer, name: str | None = None) -> Callable[[F], F]:
    """Return a decorator that adds a function to a group of commands; default: under the function's name."""

    def register(function: F) -> F:
        group.command(name)(_with_global_options(function))
        return function

    return register


def _with_global_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that takes the global options too and stores them for the command.

    An option that is given before and after the command's name has the value after it. Commands without a context use
    no server and stay as they are.
    """
    own = inspect.signature(function, eval_str=True)
    if "context" not in own.parameters:
        return function

    @wraps(function)
    def run(**arguments: object) -> None:
        context = cast("typer.Context", arguments["context"])  # typer passes an instance of its base
        # typer has converted each value to the type of its option.
        given: dict[str, Any] = {name: value for name in _GLOBAL if (value := arguments.pop(name))}
        context.obj = replace(target_of(context), **given)
        function(**arguments)

    parameters = [*own.parameters.values(), *_GLOBAL.values()]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined] # typer reads it
    return run
