"""What of the files of other tools an import did not read: each member by its place, and why it was left out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bough_server.documents.yaml import Document, FieldPath, field_text
from bough_server.evals.importers.values import JsonObject
from bough_server.plain_text import escape_controls

_MOST: Final = 50
"""The most kinds of members that are listed of each sort."""
_LONGEST: Final = 200

_UNKNOWN: Final = "the importer does not know it"

_REASONS: Final[Mapping[str, str]] = {
    "contextMessages": "the agent does not see these messages",
    "conversationScenario": "no model plays the user; name a configured one by --user",
    "driver": "the evaluated agent always answers",
    "errorMessage": "the record counts as a run that succeeded",
    "expectedIntermediateAgentResponses": "no metric compares what is said before the answer",
    "expectedRunnerEnabled": "only the expectations of the file are used",
    "extension": "no metric reads it",
    "finalResponse.parts.inlineData": "answers are compared as texts",
    "finalResponse.parts.fileData": "answers are compared as texts",
    "finalResponse.contentParts.image": "answers are compared as texts",
    "llmGenerator": "no model answers calls; the mock fails them",
    "intermediateResponses": "no metric compares what is said before the answer",
    "rouge.threshold.precision": "rouge_1 bounds F1 alone",
    "rouge.threshold.recall": "rouge_1 bounds F1 alone",
    "rouge.useStemmer": "rouge_1 compares whole words",
    "rubrics": "no metric of the set asks for it",
    "state.*": "it is not a key of a session's state",
    "finalSessionState.*": "it is not a key of a session's state",
    "userPersona": "a persona that is a name is not known here",
    "userSimulatorConfig": "no model plays the user; name a configured one by --user",
}
"""Why members are left out that change what is run or scored, by the end of their path without indices."""

_WITHOUT_EFFECT: Final = frozenset(
    {
        *("creationTimestamp", "invocationId", "role", "id", "name", "description", "type"),
        *("appDetails", "agents", "executionTrace", "author", "branch", "willContinue", "partMetadata"),
        *("parts.text", "contentParts.text", "thoughtSignature", "reasoningContent", "reasoningSignature"),
        *(
            "generationConfig.stream",
            "contentParts.type",
            "image.detail",
            "sessionInput.appName",
            "sessionInput.userId",
        ),
        *("initialSession.appName", "initialSession.userId", "customMetrics.*"),
        *("includeIntermediateResponsesInFinal", "sampleParallelism", "sampleParallelismEnabled"),
        *("violationRubrics", "behaviors.name", "userPersona.id"),
        # ADK does not compare results, and where nothing runs nothing is mocked.
        *("toolResponses", "functionResponse", "toolMock", "toolMock.expected"),
        # What a result says beside its conversations: they can be scored again.
        *("evalSetResultId", "evalSetResultName", "evalCaseResults.evalSetId", "finalEvalStatus", "summary"),
        *("score", "evalStatus", "details", "evalMetricResults", "sessionId", "evalCaseResults.userId"),
    }
)
"""Ends of the paths of members that change neither what is run nor what is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Members of files that an import did not read, which differ in the indices of their path at most."""

    path: str
    """The file."""
    line: int
    """The line of the first of them."""
    field: str
    """The path of the first of them, in the file."""
    places: int
    """How many there are."""
    reason: str
    """Why they were left out; empty if that changes neither what is run nor what is scored."""

    def __str__(self) -> str:
        """Return the place of the first one, how many more there are, and the reason."""
        more = f" (and {self.places - 1:,} more)" if self.places > 1 else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.path}:{self.line}: {self.field}{more}{why}"


def list_left_out(objects: Iterable[JsonObject]) -> list[LeftOut]:
    """Return what was not read of the outermost objects of files: first what changes what is run or scored."""
    first: dict[tuple[str, tuple[str, ...]], tuple[Document, FieldPath]] = {}
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    for each in objects:
        for path in each.unread():
            key = each.document.path, tuple(step for step in path if isinstance(step, str))
            first.setdefault(key, (each.document, path))
            counts[key] = counts.get(key, 0) + 1
    found = [_describe(document, path, counts[key]) for key, (document, path) in first.items()]
    return sorted(found, key=lambda each: not each.reason)


def list_lines(found: Sequence[LeftOut]) -> list[str]:
    """Return what was left out as lines for people: what changes what is run or scored, then the rest."""
    loud = [each for each in found if each.reason]
    quiet = [each for each in found if not each.reason]
    return [
        *_list_under("Left out, which can change what is run or scored:", loud),
        *_list_under("Left out with no effect on runs and scores:", quiet),
    ]


def _list_under(heading: str, found: Sequence[LeftOut]) -> list[str]:
    more = [f"  and {len(found) - _MOST:,} more"] if len(found) > _MOST else []
    return [heading, *(f"  {each}" for each in found[:_MOST]), *more] if found else []


def _describe(document: Document, path: FieldPath, places: int) -> LeftOut:
    names = [_camel_case(step) for step in path if isinstance(step, str)]
    text = escape_controls(field_text(path).replace("\n", "\\n"))
    return LeftOut(
        path=document.path,
        line=document.line(path),
        field=text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…",
        places=places,
        reason=_find_reason(names),
    )


def _find_reason(names: list[str]) -> str:
    """Return why a member is left out, by the longest end of its path that is known; empty if that has no effect."""
    for start in range(len(names)):
        for end in (".".join(names[start:]), ".".join([*names[start:-1], "*"])):
            if end in _WITHOUT_EFFECT:
                return ""
            if end in _REASONS:
                return _REASONS[end]
    return _UNKNOWN


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return "".join([first, *(part.capitalize() for part in rest)]) if first else name
