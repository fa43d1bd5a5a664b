"""Definitions in files that a command line names, and what a server says of them by file and line; it judges none."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bough import InvalidRequest
from bough_server.agents.definition import Source
from bough_server.agents.loading import load_sources
from bough_server.errors import ConfigurationError

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
