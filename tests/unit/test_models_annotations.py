"""Notes of providers: verdicts, sources and extras in our words, bounded, whatever they are made of."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import step_pb2
from bough_server.models.annotations import (
    MAX_CITATIONS,
    MAX_CITED_BYTES,
    MAX_EXTRA_BYTES,
    MAX_NOTES,
    AnnotationCollector,
    Content,
    ContentPosition,
)

ALLOW, REVIEW, BLOCK = 1, 2, 3
PROMPT, ANSWER = step_pb2.SAFETY_SUBJECT_PROMPT, step_pb2.SAFETY_SUBJECT_ANSWER
TEXT: Content = ("message", 0)


def noted(notes: AnnotationCollector) -> step_pb2.Annotations:
    message = notes.build({})
    assert message is not None
    return message


def test_nothing_noted_is_no_annotation() -> None:
    assert AnnotationCollector().build({}) is None


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ({"filtered": False, "severity": "safe"}, ALLOW),
        ({"filtered": False, "severity": "low"}, REVIEW),
        ({"filtered": True, "severity": "high"}, BLOCK),
        ({"filtered": False, "detected": False}, ALLOW),
        ({"filtered": False, "detected": True}, REVIEW),
    ],
)
def test_a_filters_result_is_a_verdict_on_its_category(result: object, verdict: int) -> None:
    notes = AnnotationCollector()
    notes.add_filter_results({"hate": result, "error": {"code": "x"}, "profanity": None})
    notes.add_prompt_filter_results([{"prompt_index": 0, "content_filter_results": {"hate": result}}])
    assert [(note.subject, note.category, note.verdict) for note in noted(notes).safety] == [
        (ANSWER, "hate", verdict),
        (PROMPT, "hate", verdict),
    ]


def test_the_gravest_verdict_of_a_category_counts() -> None:
    notes = AnnotationCollector()
    for severity in ("low", "safe"):
        notes.add_filter_results({"hate": {"filtered": False, "severity": severity}})
    notes.add_refusal()
    notes.add_refusal()
    assert [(note.category, note.verdict) for note in noted(notes).safety] == [("hate", REVIEW), ("refusal", BLOCK)]


def test_sources_are_told_once_by_their_address_or_their_file() -> None:
    notes = AnnotationCollector()
    for _ in range(2):
        notes.cite({"type": "url_citation", "url_citation": {"url": "https://a.example", "title": "A"}}, TEXT)
        notes.cite({"type": "url_citation", "url": "https://b.example", "title": "B", "start_index": 1}, TEXT)
        notes.cite({"type": "file_citation", "file_id": "file-1", "filename": "c.pdf", "index": 3}, TEXT)
    notes.cite({"type": "something_else", "url": "https://d.example"}, TEXT)
    notes.cite({"type": "url_citation", "title": "Nowhere"}, TEXT)
    notes.cite_addresses(["https://e.example", 3])
    assert list(noted(notes).citations) == [
        step_pb2.CitationRef(label="A", url="https://a.example"),
        step_pb2.CitationRef(label="B", url="https://b.example"),
        step_pb2.CitationRef(label="c.pdf", provider_ref="file-1"),
        step_pb2.CitationRef(url="https://e.example"),
    ]


def test_a_source_is_told_with_its_span_and_its_words_once_for_each_place_that_cites_it() -> None:
    notes = AnnotationCollector()
    url = {"url": "https://a.example", "start_index": 0, "end_index": 4, "content": "Oaks are trees."}
    file = {"type": "file_citation", "start_index": 7, "end_index": 9, "file_citation": {"file_id": "f", "quote": "q"}}
    for _ in range(2):
        notes.cite({"type": "url_citation", "url_citation": url}, TEXT)
        notes.cite({"type": "url_citation", "url_citation": {**url, "start_index": 2}}, TEXT)
        notes.cite(file, ("elsewhere", 0))
    annotations = notes.build({TEXT: ContentPosition(part_index=1, offset=10)})
    assert annotations is not None
    words, page = "Oaks are trees.", "https://a.example"
    assert list(annotations.citations) == [
        step_pb2.CitationRef(url=page, part_index=1, start_offset=10, end_offset=14, snippet=words),
        step_pb2.CitationRef(url=page, part_index=1, start_offset=12, end_offset=14, snippet=words),
        step_pb2.CitationRef(provider_ref="f", start_offset=7, end_offset=9, snippet="q"),
    ]


@pytest.mark.parametrize(("start", "end"), [(4, 3), (-1, 3), ("0", 3), (0, None), (0, 2**40), (True, 3)])
def test_a_span_that_is_none_is_left_out(start: object, end: object) -> None:
    notes = AnnotationCollector()
    notes.cite({"type": "url_citation", "url": "https://a.example", "start_index": start, "end_index": end}, TEXT)
    assert list(noted(notes).citations) == [step_pb2.CitationRef(url="https://a.example")]


def test_an_address_that_would_have_to_be_cut_is_left_out() -> None:
    notes = AnnotationCollector()
    notes.cite_addresses([f"https://a.example/{'x' * 3000}"])
    assert notes.build({}) is None


def test_extras_are_json_by_name_and_those_that_do_not_fit_are_left_out() -> None:
    notes = AnnotationCollector()
    notes.add("tier", "one")
    notes.add("tier", "two")
    notes.add("nothing", None)
    notes.add("large", "x" * MAX_EXTRA_BYTES)
    assert noted(notes).extra_json == '{"tier":"two"}'


SPAN = ("start_index", "end_index", "content")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from(["safe", "url_citation"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "url", "title", "file_id", "filtered", "severity", "url_citation", *SPAN])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=6))
def test_whatever_a_provider_says_the_annotations_are_bounded(said: list[object]) -> None:
    notes = AnnotationCollector()
    for number in range(80):
        for value in said:
            notes.add_filter_results({f"category-{number}": value} if isinstance(value, dict) else value)
            notes.add_prompt_filter_results([{"content_filter_results": value}])
            notes.cite_addresses(value)
            notes.cite_addresses([f"https://example.org/{number}/{'y' * 1900}"])
            notes.add(f"name-{number}", value)
            if isinstance(value, dict):
                notes.cite(value, (number, 0))
    positions: dict[Content, ContentPosition] = {
        (number, 0): ContentPosition(part_index=2**31 - 1, offset=2**30) for number in range(80)
    }
    made = notes.build(positions) or step_pb2.Annotations()
    assert len(made.safety) <= MAX_NOTES
    assert len(made.citations) <= MAX_CITATIONS
    assert sum(each.ByteSize() for each in made.citations) <= MAX_CITED_BYTES
    assert len(made.extra_json.encode()) <= MAX_EXTRA_BYTES
    assert not made.extra_json or isinstance(json.loads(made.extra_json), dict)
