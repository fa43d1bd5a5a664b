"""Definition files, and the catalog of a project without a server."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from bough import InvalidRequest
from bough_server.agents.definition import Source
from bough_server.agents.loading import definition_files, load_python, load_sources, read_sources
from bough_server.agents.registry import Registry
from bough_server.agents.validation import Known
from bough_server.errors import ConfigurationError
from bough_server.models.registry import build_models
from bough_server.settings import Settings

_PLACE: Final = re.compile(r"definitions\[(\d+)\]\.?(.*)")


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files that paths mean, each once; of a folder those with definitions. Raises ConfigurationError."""
    files: list[Path] = []
    for path in paths:
        inside = sorted([*path.glob("*.yaml"), *path.glob("*.yml"), *path.glob("*.json")]) if path.is_dir() else [path]
        if not inside:
            raise ConfigurationError(f"{path}: No *.yaml file is in this folder.")
        files += inside
    return list(dict.fromkeys(files))


def definitions_in(paths: Sequence[Path]) -> list[Source]:
    """The definitions that a run brings. Raises ConfigurationError with every mistake of how they are written."""
    return load_sources(files_of(paths))


def in_files(error: InvalidRequest, sources: Sequence[Source]) -> ConfigurationError | InvalidRequest:
    """What is wrong with a request, "file:line: field: message" where it is about definitions that it brought."""
    told: list[str] = []
    is_ours = False
    for violation in error.violations:
        place = _PLACE.fullmatch(violation.field)
        if place is None or int(place[1]) >= len(sources):
            told.append(f"{violation.field}: {violation.description}" if violation.field else violation.description)
            continue
        is_ours = True
        told.append(str(sources[int(place[1])].problem(place[2], violation.description)))
    return ConfigurationError("\n".join(told)) if is_ours else error


def known_to(settings: Settings, *, without: Collection[Path] = ()) -> Known:
    """The tools, models and agents of a configuration, but for the definitions in some files.

    Raises ConfigurationError where a Python module or a file cannot be read.
    """
    python = load_python(settings.python, settings.folder)
    left_out = {path.resolve() for path in without}
    files = [path for path in definition_files(settings.agents, settings.folder) if path.resolve() not in left_out]
    sources, _ = read_sources(files)
    return Known(
        tools=[tool.name for tool in python.tools],
        client_tools=[tool.name for tool in python.tools if tool.is_client_side],
        models=list(settings.models),
        has_default_model="default" in settings.models,
        definitions=[source.definition for source in sources],
        code_agents=[agent.definition for agent in python.agents],
        functions={function.name: function.kind for function in python.functions},
    )


def registry_of(settings: Settings) -> Registry:
    """The catalog of a configuration, as a server would have it; nothing is asked and nothing starts.

    Raises ConfigurationError where anything of it is wrong.
    """
    python = load_python(settings.python, settings.folder)
    return Registry(
        load_sources(definition_files(settings.agents, settings.folder)),
        models=build_models(
            settings.models, folder=settings.folder, secrets=settings.secrets, currency=settings.currency
        ),
        code_agents=python.agents,
        tools=python.tools,
        functions=python.functions,
    )
