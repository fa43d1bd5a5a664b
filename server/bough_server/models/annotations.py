"""Annotations of an answer: verdicts on safety, citations, and whatever else a provider notes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import step_pb2
from bough_server.models.provider_json import compact_json, count, is_object, objects, string
from bough_server.truncation import size_of

MAX_NOTES: Final = 64
MAX_CITATIONS: Final = 256
MAX_CITED_BYTES: Final = 32 * 1024
MAX_EXTRA_BYTES: Final = 16 * 1024

_PLACE_BYTES: Final = 16
"""The most bytes that a citation's position adds to its offsets within the content."""
_LONGEST_LABEL: Final = 512
_LONGEST_URL: Final = 2048
_LONGEST_SNIPPET: Final = 2048
_LARGEST_OFFSET: Final = 2**30
"""Far beyond any text; with the offset of a content added it still fits the int32 field."""
_CITED: Final = ("url_citation", "file_citation", "container_file_citation", "file_path")
_Verdict: TypeAlias = step_pb2.SafetyVerdict.ValueType
_Subject: TypeAlias = step_pb2.SafetySubject.ValueType

Content: TypeAlias = tuple[int | str, int]
"""Key of a piece of an answer: its output item, and the index of the content in that, from 0."""


class AnnotationCollector:
    """Collects the annotations of one answer while it is streamed."""

    def __init__(self) -> None:
        self._safety: dict[tuple[_Subject, str], _Verdict] = {}
        self._citations: dict[tuple[Content | None, bytes], step_pb2.CitationRef] = {}
        self._cited_bytes = 0
        self._extra: dict[str, object] = {}

    def add_refusal(self) -> None:
        """Add that the model refused to answer."""
        self._add_verdict(step_pb2.SAFETY_SUBJECT_ANSWER, "refusal", step_pb2.SAFETY_VERDICT_BLOCK)

    def add_content_filter(self) -> None:
        """Add that the provider's content filter cut the answer off."""
        self._add_verdict(step_pb2.SAFETY_SUBJECT_ANSWER, "content_filter", step_pb2.SAFETY_VERDICT_BLOCK)

    def add_filter_results(self, results: object, *, of_prompt: bool = False) -> None:
        """Record content filter results by category: `{"hate": {"filtered": false, "severity": "low"}}`."""
        subject = step_pb2.SAFETY_SUBJECT_PROMPT if of_prompt else step_pb2.SAFETY_SUBJECT_ANSWER
        for category, result in results.items() if is_object(results) else ():
            if is_object(result) and result.keys() & {"filtered", "detected", "severity"}:
                self._add_verdict(subject, category, _verdict(result))

    def add_prompt_filter_results(self, results: object) -> None:
        """Record results for parts of the prompt: `[{"prompt_index": 0, "content_filter_results": {...}}]`."""
        for each in objects(results):
            self.add_filter_results(each.get("content_filter_results"), of_prompt=True)

    def cite(self, annotation: Mapping[str, object], content: Content) -> None:
        """Record a citation, whose details are in the annotation itself or under its type; ignore other annotations.

        Providers may send the same one repeatedly; it is recorded once.
        """
        kind = string(annotation.get("type"))
        if kind not in _CITED:
            return
        inner = annotation.get(kind)
        details = inner if is_object(inner) else annotation
        citation = step_pb2.CitationRef(
            label=(string(details.get("title")) or string(details.get("filename")))[:_LONGEST_LABEL],
            url=string(details.get("url")),
            provider_ref=string(details.get("file_id")),
            snippet=(string(details.get("content")) or string(details.get("quote")))[:_LONGEST_SNIPPET],
        )
        # The span of a page is among its details, that of a file is beside them.
        span = details if "start_index" in details else annotation
        start, end = _offset(span.get("start_index")), _offset(span.get("end_index"))
        if start is not None and end is not None and start <= end:
            citation.start_offset, citation.end_offset = start, end
        self._cite(citation, content)

    def cite_addresses(self, addresses: object) -> None:
        """Record citations that are only URLs: `["https://example.org"]`."""
        for address in addresses if isinstance(addresses, list) else ():
            if isinstance(address, str):
                self._cite(step_pb2.CitationRef(url=address), None)

    def add(self, name: str, value: object) -> None:
        """Record any other value of the provider; the last one of a name wins."""
        if value is not None:
            self._extra[name] = value

    def build(self, positions: "Mapping[Content, ContentPosition]") -> step_pb2.Annotations | None:
        """Return the annotations; None if there are none. `positions` has that of each content."""
        safety = [
            step_pb2.SafetyNote(verdict=verdict, category=category, subject=subject)
            for (subject, category), verdict in self._safety.items()
        ]
        citations = [
            _place_citation(citation, positions.get(content) if content is not None else None)
            for (content, _), citation in self._citations.items()
        ]
        extra = self._extra_json()
        if not safety and not citations and not extra:
            return None
        return step_pb2.Annotations(safety=safety, citations=citations, extra_json=extra)

    def _add_verdict(self, subject: _Subject, category: str, verdict: _Verdict) -> None:
        key = (subject, category)
        if key in self._safety or len(self._safety) < MAX_NOTES:
            # Filters run repeatedly while an answer streams; the enum rises with severity and the worst verdict stays.
            self._safety[key] = max(verdict, self._safety.get(key, verdict))

    def _cite(self, citation: step_pb2.CitationRef, content: Content | None) -> None:
        """Record a citation that has a URL or an id within its length limit, once per content that has it."""
        url, reference = citation.url, citation.provider_ref
        if not (url or reference) or len(url) > _LONGEST_URL or len(reference) > _LONGEST_LABEL:
            return
        key = (content, citation.SerializeToString(deterministic=True))
        if key not in self._citations and len(self._citations) < MAX_CITATIONS:
            self._cited_bytes += citation.ByteSize() + _PLACE_BYTES
            if self._cited_bytes <= MAX_CITED_BYTES:
                self._citations[key] = citation

    def _extra_json(self) -> str:
        """Return the other values as one JSON object, without the one that exceeds the limit and all after it."""
        kept: dict[str, object] = {}
        size = 0
        for name, value in self._extra.items():
            size += size_of(json.dumps({name: value}))
            if size > MAX_EXTRA_BYTES:
                break
            kept[name] = value
        return compact_json(kept) if kept else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPosition:
    """Position of a content in the answer."""

    part_index: int
    offset: int = 0
    """Characters of the part before the content."""


def _place_citation(citation: step_pb2.CitationRef, position: ContentPosition | None) -> step_pb2.CitationRef:
    """Return a copy of a citation with the part that cites it, and with offsets from the start of that part."""
    positioned = step_pb2.CitationRef()
    positioned.CopyFrom(citation)
    if position is not None:
        positioned.part_index = position.part_index
    if citation.HasField("start_offset"):
        offset = position.offset if position is not None else 0
        positioned.start_offset, positioned.end_offset = citation.start_offset + offset, citation.end_offset + offset
    return positioned


def _offset(value: object) -> int | None:
    """Return a value as an offset in characters; None if it is none."""
    number = count(value)
    return number if number is not None and number <= _LARGEST_OFFSET else None


def _verdict(result: Mapping[str, object]) -> _Verdict:
    """Return the verdict of a filter's result: BLOCK if filtered, REVIEW if detected or not safe, else ALLOW."""
    if result.get("filtered") is True:
        return step_pb2.SAFETY_VERDICT_BLOCK
    is_noticed = result.get("detected") is True or string(result.get("severity")) not in ("", "safe")
    return step_pb2.SAFETY_VERDICT_REVIEW if is_noticed else step_pb2.SAFETY_VERDICT_ALLOW
