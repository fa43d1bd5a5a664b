"""Import files of other tools: find out what each of them is, and build a set of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from bough.v1.eval_set_pb2 import EvalSet
from bough_server.errors import ConfigurationError
from bough_server.evals.importers import adk, trpc
from bough_server.evals.importers.values import JsonObject, JsonValue, Notes, clean, read_json


class FileFormat(StrEnum):
    """What a file of another tool is."""

    TRPC_SET = "eval set of trpc-agent-go"
    TRPC_METRICS = "metrics file of trpc-agent-go"
    TRPC_RESULT = "result of trpc-agent-go"
    ADK_SET = "eval set of ADK"
    ADK_TESTS = "test file of ADK in its older form"
    ADK_CONFIG = "configuration of ADK"


_ENDINGS: Final = (".evalset_result.json", ".evalset.json", ".metrics.json", ".test.json", ".json")
_SETS: Final = (FileFormat.TRPC_SET, FileFormat.TRPC_RESULT, FileFormat.ADK_SET, FileFormat.ADK_TESTS)
_TRPC_MEMBERS: Final = ("evalMode", "actualConversation", "contextMessages", "expectedRunnerEnabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: Path
    value: JsonValue
    format: FileFormat


def detect(value: JsonValue, path: Path) -> FileFormat:
    """Return what a file is, by what it holds and, if that leaves it open, by its name.

    Raises ConfigurationError if it is of none of the formats.
    """
    if isinstance(value, list):
        found = _list_format([item for item in value if isinstance(item, dict)], path)
    elif isinstance(value, dict):
        found = _object_format(value, path)
    else:
        found = None
    if found is None:
        raise ConfigurationError(f"{path}: The file is no {', no '.join(FileFormat)}.")
    return found


def import_files(paths: Sequence[Path]) -> tuple[EvalSet, list[str]]:
    """Return the set of files, and sentences about what of them has no place.

    One of them holds cases; another one may hold the metrics. A metrics file of the same name beside a set of
    trpc-agent-go, and a test_config.json beside a set of ADK, are read as those tools do. Raises ConfigurationError.
    """
    files = [_read(path) for path in paths]
    sets = [file for file in files if file.format in _SETS]
    others = [file for file in files if file.format not in _SETS]
    if len(sets) != 1 or len(others) > 1:
        held = "; ".join(f"{file.path} is {_article(file.format)}" for file in files)
        raise ConfigurationError(f"Name one file with cases, and at most one with metrics: {held or 'there is none'}.")
    notes = Notes()
    metrics = others[0] if others else _find_metrics_file(sets[0], notes)
    try:
        eval_set = _import_set(sets[0], metrics, notes)
    except ConfigurationError as error:
        raise ConfigurationError(f"{', '.join(str(file.path) for file in files)}: {error.message}") from error
    return eval_set, notes.sentences


def import_values(value: JsonValue, metrics: JsonValue = None, *, path: Path) -> tuple[EvalSet, list[str]]:
    """Return the set of a file's JSON and that of its metrics, as import_files does. Raises ConfigurationError."""
    value = clean(value)
    source = _File(path=path, value=value, format=detect(value, path))
    if source.format not in _SETS:
        raise ConfigurationError(f"{path} is {_article(source.format)}, which has no cases.")
    other = None
    if metrics is not None:
        metrics = clean(metrics)
        other = _File(path=path, value=metrics, format=detect(metrics, Path("metrics.json")))
    notes = Notes()
    return _import_set(source, other, notes), notes.sentences


def _import_set(source: _File, metrics: _File | None, notes: Notes) -> EvalSet:
    name = _stem(source.path)
    if metrics is not None and metrics.format in _SETS:
        raise ConfigurationError(f"{metrics.path} is {_article(metrics.format)}, which has no metrics.")
    value = None if metrics is None else metrics.value
    if source.format is FileFormat.TRPC_RESULT:
        if metrics is not None:
            notes.add("A result has its metrics: the other file was left out.")
        return trpc.import_result(source.value, name=name, notes=notes)
    by_trpc = metrics is not None and metrics.format is FileFormat.TRPC_METRICS
    if by_trpc and isinstance(source.value, dict):
        # An older set of trpc-agent-go has the form of ADK's.
        return trpc.import_set(source.value, value, name=name, notes=notes)
    if by_trpc or (source.format is FileFormat.TRPC_SET and metrics is not None):
        raise ConfigurationError(f"The metrics are not those of {_article(source.format)}.")
    if source.format is FileFormat.TRPC_SET:
        return trpc.import_set(source.value, None, name=name, notes=notes)
    return adk.import_set(source.value, value, name=name, notes=notes)


def _read(path: Path) -> _File:
    value = read_json(path)
    return _File(path=path, value=value, format=detect(value, path))


def _find_metrics_file(source: _File, notes: Notes) -> _File | None:
    """Return the metrics that the other tool would find beside a set; None if there are none."""
    # An older set of trpc-agent-go looks like one of ADK.
    of_trpc = source.format in (FileFormat.TRPC_SET, FileFormat.ADK_SET)
    of_adk = source.format in (FileFormat.ADK_SET, FileFormat.ADK_TESTS)
    names = [*([f"{_stem(source.path)}.metrics.json"] if of_trpc else []), *(["test_config.json"] if of_adk else [])]
    paths = (source.path.with_name(name) for name in names)
    path = next((path for path in paths if path.is_file() and path != source.path), None)
    if path is None:
        return None
    notes.add(f"The metrics are those of {path}.")
    return _read(path)


def _stem(path: Path) -> str:
    """Return a file's name without its ending, which may have two dots."""
    ending = next((one for one in _ENDINGS if path.name.endswith(one)), path.suffix)
    return path.name.removesuffix(ending) or "set"


def _list_format(items: Sequence[dict[str, JsonValue]], path: Path) -> FileFormat | None:
    if any("metricName" in item for item in items):
        return FileFormat.TRPC_METRICS
    if any("query" in item or "data" in item for item in items):
        return FileFormat.ADK_TESTS
    return FileFormat.TRPC_METRICS if not items and path.name.endswith("metrics.json") else None


def _object_format(members: dict[str, JsonValue], path: Path) -> FileFormat | None:
    source = JsonObject(members=members)
    if source.has("evalCaseResults"):
        return FileFormat.TRPC_RESULT
    if source.has("evalCases"):
        return _set_format(source, path)
    is_config = source.has("criteria") or path.name == "test_config.json"
    return FileFormat.ADK_CONFIG if is_config else None


def _set_format(source: JsonObject, path: Path) -> FileFormat:
    """Return whose set it is: ADK writes parts and intermediate data, trpc-agent-go contents and tools."""
    if "evalCases" not in source.members:
        return FileFormat.ADK_SET
    for case in _objects(source.raw("evalCases")):
        if any(case.has(name) for name in _TRPC_MEMBERS):
            return FileFormat.TRPC_SET
        for turn in _objects(case.raw("conversation")):
            if turn.has("tools") or any("content" in said.members for said in _objects([turn.raw("userContent")])):
                return FileFormat.TRPC_SET
            if turn.has("intermediateData") or any(said.has("parts") for said in _objects([turn.raw("userContent")])):
                return FileFormat.ADK_SET
    return FileFormat.ADK_SET if path.name.endswith(".test.json") else FileFormat.TRPC_SET


def _objects(value: JsonValue) -> Iterator[JsonObject]:
    """Yield the objects of a value that may be a list; what is wrong with it is found when it is imported."""
    yield from (JsonObject(members=item) for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _article(name: FileFormat) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
