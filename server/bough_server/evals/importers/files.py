"""Import files of other tools: find out what each of them is, and build a set of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from bough.v1.eval_set_pb2 import EvalMetric, EvalSet
from bough_server.documents.yaml import Document
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.adk import AdkImporter
from bough_server.evals.importers.left_out import LeftOut, list_left_out
from bough_server.evals.importers.trpc import TrpcImporter
from bough_server.evals.importers.values import JsonObject, JsonValue, Notes, object_at, objects_at, read_json


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
    document: Document
    format: FileFormat
    roots: list[JsonObject]
    """The outermost objects: the only one, or those of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A set of files of another tool."""

    set: EvalSet
    sentences: Sequence[str]
    """What was decided in the import."""
    left_out: Sequence[LeftOut]
    """The members of the files that were not read: first those that change what is run or scored."""


def detect(value: JsonValue, path: Path) -> FileFormat:
    """Return what a file is, by what it holds and, if that leaves it open, by its name.

    Raises ConfigurationError if it is of none of the formats.
    """
    if isinstance(value, list):
        found = _list_format([item for item in value if isinstance(item, dict)], path)
    elif isinstance(value, dict):
        found = _object_format(_view(value), path)
    else:
        found = None
    if found is None:
        what = _describe_own_file(value) or f"no {', no '.join(FileFormat)}."
        raise ConfigurationError(f"{path}: The file is {what}")
    return found


def import_files(paths: Sequence[Path], *, judge: str = "", user: str = "") -> Imported:
    """Return the set of files, and what of them has no place in it.

    One of them holds cases; another one may hold the metrics. A metrics file of the same name beside a set of
    trpc-agent-go, and a test_config.json beside a set of ADK, are read as those tools do. `judge` is the configured
    model that metrics ask instead of a judge by its address; without one such metrics have no counterpart. `user` is
    the configured model that plays the user of scenarios; without one their cases are left out. Raises
    ConfigurationError with the place of what is wrong.
    """
    return import_documents([read_json(path) for path in paths], judge=judge, user=user, reads_beside=True)


def import_documents(
    documents: Sequence[Document], *, judge: str = "", user: str = "", reads_beside: bool = False
) -> Imported:
    """Return the set of documents as import_files does; with `reads_beside` the metrics beside them are read too."""
    files = [_open(document) for document in documents]
    sets = [file for file in files if file.format in _SETS]
    others = [file for file in files if file.format not in _SETS]
    if len(sets) != 1 or len(others) > 1:
        held = "; ".join(f"{file.path} is {_article(file.format)}" for file in files)
        raise ConfigurationError(f"Name one file with cases, and at most one with metrics: {held or 'there is none'}.")
    notes = Notes()
    found = _find_metrics_file(sets[0], notes) if reads_beside and not others else None
    metrics = found or next(iter(others), None)
    trpc, adk = TrpcImporter(notes=notes, judge=judge, user=user), AdkImporter(notes=notes, judge=judge, user=user)
    eval_set = _import_set(sets[0], metrics, trpc, adk)
    if judge and not any(metric.HasField("llm_judge") for metric in _all_metrics(eval_set)):
        notes.add(f"No metric of the files asks a judge, so that the model {judge!r} is not asked.")
    roots = [*sets[0].roots, *(metrics.roots if metrics is not None else ())]
    return Imported(set=eval_set, sentences=notes.sentences, left_out=list_left_out(roots))


def _all_metrics(eval_set: EvalSet) -> Iterator[EvalMetric]:
    yield from eval_set.defaults.metrics
    for case in eval_set.cases:
        yield from case.metrics


def _import_set(source: _File, metrics: _File | None, trpc: TrpcImporter, adk: AdkImporter) -> EvalSet:
    name = _stem(source.path)
    roots = None if metrics is None else metrics.roots
    if source.format is FileFormat.TRPC_RESULT:
        if roots is not None:
            trpc.notes.add("A result has its metrics: the other file was left out.")
        return trpc.import_result(source.roots[0], name=name)
    by_trpc = metrics is not None and metrics.format is FileFormat.TRPC_METRICS
    # An older set of trpc-agent-go has the form of ADK's.
    is_set = source.format in (FileFormat.TRPC_SET, FileFormat.ADK_SET)
    if (by_trpc and not is_set) or (source.format is FileFormat.TRPC_SET and metrics is not None and not by_trpc):
        raise ConfigurationError(f"{source.path}: The metrics are not those of {_article(source.format)}.")
    if by_trpc or source.format is FileFormat.TRPC_SET:
        return trpc.import_set(source.roots[0], roots, name=name)
    config = roots[0] if roots else None
    if source.format is FileFormat.ADK_SET:
        return adk.import_set(source.roots[0], config, name=name)
    return adk.import_tests(source.roots, config, name=name, path=str(source.path))


def _open(document: Document) -> _File:
    path, value = Path(document.path), document.value
    found = detect(value, path)
    roots = objects_at(document, value) if isinstance(value, list) else [object_at(document, value)]
    return _File(path=path, document=document, format=found, roots=roots)


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
    return _open(read_json(path))


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


def _object_format(source: JsonObject, path: Path) -> FileFormat | None:
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
    for case in _objects(source.peek("evalCases")):
        if any(case.has(name) for name in _TRPC_MEMBERS):
            return FileFormat.TRPC_SET
        for turn in _objects(case.peek("conversation")):
            if turn.has("tools") or any("content" in said.members for said in _objects([turn.peek("userContent")])):
                return FileFormat.TRPC_SET
            if turn.has("intermediateData") or any(said.has("parts") for said in _objects([turn.peek("userContent")])):
                return FileFormat.ADK_SET
    return FileFormat.ADK_SET if path.name.endswith(".test.json") else FileFormat.TRPC_SET


def _objects(value: JsonValue) -> Iterator[JsonObject]:
    """Yield the objects of a value that may be a list; what is wrong with it is found when it is imported."""
    yield from (_view(item) for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _view(members: dict[str, JsonValue]) -> JsonObject:
    """Return an object apart from those that an importer reads."""
    return JsonObject(members, document=Document(path="", value=members, lines={}))


def _describe_own_file(value: JsonValue) -> str:
    """Return what a file of ours is, as the end of a sentence; empty for any other."""
    if not isinstance(value, dict) or not isinstance(value.get("cases"), list):
        return ""
    if "verdict" in value or "evalSetName" in value or "evaluationId" in value:
        return "a result of `bough eval`, which needs no import: `bough eval compare` and `bough eval export` read it."
    return "an eval set of Bough, which needs no import: `bough eval run` and `bough eval validate` read it."


def _article(name: FileFormat) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
