"""Readings of a provider's JSON: annotations of an answer, raw events, checked values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, TypeGuard

from pydantic_core import from_json

from bough.v1 import step_pb2, usage_pb2
from bough_server.models.model import Delta
from bough_server.truncation import size_of

MAX_NOTES: Final = 64
MAX_CITATIONS: Final = 256
MAX_CITED_BYTES: Final = 32 * 1024
MAX_EXTRA_BYTES: Final = 16 * 1024

_PLACE_BYTES: Final = 16
"""What the place of a citation takes at most, beyond its offsets in their content."""
_LONGEST_LABEL: Final = 512
_LONGEST_URL: Final = 2048
_LONGEST_SNIPPET: Final = 2048
_LARGEST_OFFSET: Final = 2**30
"""Far beyond any text; with the offset of a content added it still fits its field."""
_CITED: Final = ("url_citation", "file_citation", "container_file_citation", "file_path")
_Verdict: TypeAlias = step_pb2.SafetyVerdict.ValueType
_Subject: TypeAlias = step_pb2.SafetySubject.ValueType

Content: TypeAlias = tuple[int | str, int]
"""A piece of an answer as its provider names it: the item of its output, and the content in that, from 0."""

DONE: Final = b"[DONE]"
"""The data of the event after which nothing more comes."""

MAX_RAW_BYTES: Final = 256 * 1024
"""The most bytes of events that are kept of an answer; those that come later are counted only."""


class AnnotationCollector:
    """The notes of one answer, as far as they have come."""

    def __init__(self) -> None:
        self._safety: dict[tuple[_Subject, str], _Verdict] = {}
        self._citations: dict[tuple[Content | None, bytes], step_pb2.CitationRef] = {}
        self._cited_bytes = 0
        self._extra: dict[str, object] = {}

    def refused(self) -> None:
        """The model would not answer."""
        self._judged(step_pb2.SAFETY_SUBJECT_ANSWER, "refusal", step_pb2.SAFETY_VERDICT_BLOCK)

    def filtered(self) -> None:
        """The provider cut the answer off."""
        self._judged(step_pb2.SAFETY_SUBJECT_ANSWER, "content_filter", step_pb2.SAFETY_VERDICT_BLOCK)

    def filters(self, results: object, *, of_prompt: bool = False) -> None:
        """Results of content filters by category: `{"hate": {"filtered": false, "severity": "low"}}`."""
        subject = step_pb2.SAFETY_SUBJECT_PROMPT if of_prompt else step_pb2.SAFETY_SUBJECT_ANSWER
        for category, result in results.items() if is_object(results) else ():
            if is_object(result) and result.keys() & {"filtered", "detected", "severity"}:
                self._judged(subject, category, _verdict(result))

    def prompt_filters(self, results: object) -> None:
        """The same for the parts of a prompt: `[{"prompt_index": 0, "content_filter_results": {...}}]`."""
        for each in objects(results):
            self.filters(each.get("content_filter_results"), of_prompt=True)

    def cite(self, said: Mapping[str, object], content: Content) -> None:
        """An annotation of a content, with its details in itself or under its type; other kinds are left out.

        The same one is taken once, however often the provider sends it.
        """
        kind = string(said.get("type"))
        if kind not in _CITED:
            return
        inner = said.get(kind)
        details = inner if is_object(inner) else said
        citation = step_pb2.CitationRef(
            label=(string(details.get("title")) or string(details.get("filename")))[:_LONGEST_LABEL],
            url=string(details.get("url")),
            provider_ref=string(details.get("file_id")),
            snippet=(string(details.get("content")) or string(details.get("quote")))[:_LONGEST_SNIPPET],
        )
        # Of a file the span is given beside its details, of a page among them.
        span = details if "start_index" in details else said
        start, end = _offset(span.get("start_index")), _offset(span.get("end_index"))
        if start is not None and end is not None and start <= end:
            citation.start, citation.end = start, end
        self._cite(citation, content)

    def cite_addresses(self, addresses: object) -> None:
        """Addresses alone: `["https://example.org"]`."""
        for address in addresses if isinstance(addresses, list) else ():
            if isinstance(address, str):
                self._cite(step_pb2.CitationRef(url=address), None)

    def add(self, name: str, value: object) -> None:
        """Something else that the provider says; the last word of a name counts."""
        if value is not None:
            self._extra[name] = value

    def message(self, places: "Mapping[Content, Place]") -> step_pb2.Annotations | None:
        """The annotations; None if there are none. `places` says in which part of the answer each content is."""
        safety = [
            step_pb2.SafetyNote(verdict=verdict, category=category, subject=subject)
            for (subject, category), verdict in self._safety.items()
        ]
        citations = [
            _placed(citation, places.get(content) if content is not None else None)
            for (content, _), citation in self._citations.items()
        ]
        extra = self._extra_json()
        if not safety and not citations and not extra:
            return None
        return step_pb2.Annotations(safety=safety, citations=citations, extra_json=extra)

    def _judged(self, subject: _Subject, category: str, verdict: _Verdict) -> None:
        key = (subject, category)
        if key in self._safety or len(self._safety) < MAX_NOTES:
            self._safety[key] = max(verdict, self._safety.get(key, verdict))

    def _cite(self, made: step_pb2.CitationRef, content: Content | None) -> None:
        """Takes a source that has an address or an id of bearable length, once for each place that cites it."""
        url, reference = made.url, made.provider_ref
        if not (url or reference) or len(url) > _LONGEST_URL or len(reference) > _LONGEST_LABEL:
            return
        key = (content, made.SerializeToString(deterministic=True))
        if key not in self._citations and len(self._citations) < MAX_CITATIONS:
            self._cited_bytes += made.ByteSize() + _PLACE_BYTES
            if self._cited_bytes <= MAX_CITED_BYTES:
                self._citations[key] = made

    def _extra_json(self) -> str:
        """The rest as one JSON object; what does not fit is left out by its name."""
        kept: dict[str, object] = {}
        size = 0
        for name, value in self._extra.items():
            size += size_of(json.dumps({name: value}))
            if size > MAX_EXTRA_BYTES:
                break
            kept[name] = value
        return json.dumps(kept, ensure_ascii=False, separators=(",", ":")) if kept else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a content is in the answer."""

    part_index: int
    offset: int = 0
    """The characters of the part before it."""


def _placed(citation: step_pb2.CitationRef, place: Place | None) -> step_pb2.CitationRef:
    """A citation with the part that cites it, its offsets counted from the beginning of the part."""
    placed = step_pb2.CitationRef()
    placed.CopyFrom(citation)
    if place is not None:
        placed.part_index = place.part_index
    if citation.HasField("start"):
        offset = place.offset if place is not None else 0
        placed.start, placed.end = citation.start + offset, citation.end + offset
    return placed


def _offset(value: object) -> int | None:
    """A number of characters; None if it is none."""
    number = count(value)
    return number if number is not None and number <= _LARGEST_OFFSET else None


def _verdict(result: Mapping[str, object]) -> _Verdict:
    """What a filter's result means: filtered out, noticed, or nothing."""
    if result.get("filtered") is True:
        return step_pb2.SAFETY_VERDICT_BLOCK
    is_noticed = result.get("detected") is True or string(result.get("severity")) not in ("", "safe")
    return step_pb2.SAFETY_VERDICT_REVIEW if is_noticed else step_pb2.SAFETY_VERDICT_ALLOW


class BadChunk(ValueError):
    """What came is not a piece of an answer."""


class ReportedError(Exception):
    """The provider put an error into its stream; `value` is what it said."""

    def __init__(self, value: object) -> None:
        super().__init__("The stream carries an error.")
        self.value = value


class Answer(Protocol):
    """One answer that is being put together: the data of events in, deltas out, the whole at the end."""

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """What the provider reported so far; None where it said nothing."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the provider said that nothing more comes."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its end; a stream that stops before was cut."""
        ...

    def take(self, data: bytes) -> list[Delta]:
        """The deltas in the data of one event. Raises BadChunk or ReportedError."""
        ...

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """The whole answer; `model` stands in where the provider names none."""
        ...


def json_object(data: bytes) -> dict[str, object]:
    """The JSON object in the data of an event. Raises BadChunk."""
    try:
        value: object = from_json(data)
    except ValueError as error:
        raise BadChunk("not JSON") from error
    if not is_object(value):
        raise BadChunk("not a JSON object")
    return value


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a JSON value is an object."""
    return isinstance(value, dict)


def objects(value: object) -> list[dict[str, object]]:
    """The objects in a list; none where it is no list."""
    return [each for each in value if is_object(each)] if isinstance(value, list) else []


def string(value: object) -> str:
    """A text; empty where it is none."""
    return value if isinstance(value, str) else ""


def count(value: object) -> int | None:
    """A number of things; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        return None
    return value


class RawAnswer:
    """Another answer, with its events beside it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events: list[str] = []
        self._size = 0
        self._left_out = 0

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """What the provider reported so far; None where it said nothing."""
        return self._answer.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider said that nothing more comes."""
        return self._answer.is_done

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its end."""
        return self._answer.is_whole

    def take(self, data: bytes) -> list[Delta]:
        """The deltas in the data of one event. Raises BadChunk or ReportedError."""
        deltas = self._answer.take(data)
        if data != DONE:
            self._keep(data)
        return deltas

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """The whole answer, and its events as a JSON array; `{"left_out": 7}` at the end stands for seven more."""
        response = self._answer.response(provider=provider, model=model)
        rest = [f'{{"left_out":{self._left_out}}}'] if self._left_out else []
        response.raw_events_json = f"[{','.join([*self._events, *rest])}]"
        return response

    def _keep(self, data: bytes) -> None:
        self._size += len(data) + 1
        if self._left_out or self._size > MAX_RAW_BYTES:
            self._left_out += 1
        else:
            self._events.append(data.decode(errors="replace"))
