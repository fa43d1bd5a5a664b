"""Definitions in files: found by pattern, read, and judged with file, line and field; it keeps none."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bough_server.agents.definition import Source, parse_definition
from bough_server.agents.validation import Known, judge
from bough_server.documents import raise_problems, read_documents
from bough_server.errors import ConfigurationError, Problem


def definition_files(patterns: Iterable[str], folder: Path) -> list[Path]:
    """The files of glob patterns relative to a folder, each once, sorted within a pattern.

    Raises ConfigurationError where a pattern matches no file.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        root, relative = (Path(path.anchor), path.relative_to(path.anchor)) if path.anchor else (folder, path)
        found = sorted(each for each in root.glob(str(relative)) if each.is_file())
        if not found:
            raise ConfigurationError(f"{pattern}: No file of agents is there; looked in {folder}.")
        files.update(dict.fromkeys(found))
    return list(files)


def read_sources(paths: Iterable[Path]) -> tuple[list[Source], list[Problem]]:
    """The definitions of files, as far as they can be read, and what is wrong with how they are written.

    Raises ConfigurationError for a file that is not there or is no YAML.
    """
    sources: list[Source] = []
    problems: list[Problem] = []
    for path in paths:
        documents = read_documents(path)
        if not documents:
            problems.append(Problem(path=str(path), line=1, field="", description="The file defines no agent."))
        for document in documents:
            source, mistakes = parse_definition(document)
            sources.append(source)
            problems += mistakes
    return sources, problems


def source_problems(sources: Sequence[Source], known: Known) -> list[Problem]:
    """What is wrong with what definitions mean, each with its file, line and field."""
    judged = judge([source.definition for source in sources], known)
    return [
        source.problem(mistake.field, mistake.description)
        for source, mistakes in zip(sources, judged, strict=True)
        for mistake in mistakes
    ]


def not_yet_said(problems: Iterable[Problem], said: Iterable[Problem]) -> list[Problem]:
    """Those that are about no field of which something is said already, nor about anything in one.

    A number that cannot be read is not missing as well.
    """
    places = list(said)
    return [each for each in problems if not any(_is_within(each, place) for place in places)]


def _is_within(inner: Problem, outer: Problem) -> bool:
    if (inner.path, inner.line) != (outer.path, outer.line):
        return False
    return (
        not outer.field or inner.field == outer.field or inner.field.startswith((f"{outer.field}.", f"{outer.field}["))
    )


def load_sources(paths: Iterable[Path]) -> list[Source]:
    """The definitions of files. Raises ConfigurationError with every mistake of how they are written."""
    sources, problems = read_sources(paths)
    raise_problems(problems)
    return sources
