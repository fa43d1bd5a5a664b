"""Notes of providers: verdicts, sources and extras in our words, bounded, whatever they are made of."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import step_pb2
from bough_server.models.openai.annotations import MAX_CITATIONS, MAX_CITED_BYTES, MAX_EXTRA_BYTES, MAX_NOTES, Notes

ALLOW, REVIEW, BLOCK = 1, 2, 3


def noted(notes: Notes) -> step_pb2.Annotations:
    message = notes.message()
    assert message is not None
    return message


def test_nothing_noted_is_no_annotation() -> None:
    assert Notes().message() is None


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
    notes = Notes()
    notes.filters({"hate": result, "error": {"code": "x"}, "profanity": None})
    notes.prompt_filters([{"prompt_index": 0, "content_filter_results": {"hate": result}}])
    assert [(note.category, note.verdict) for note in noted(notes).safety] == [
        ("hate", verdict),
        ("prompt.hate", verdict),
    ]


def test_the_gravest_verdict_of_a_category_counts() -> None:
    notes = Notes()
    for severity in ("low", "safe"):
        notes.filters({"hate": {"filtered": False, "severity": severity}})
    notes.refused()
    notes.refused()
    assert [(note.category, note.verdict) for note in noted(notes).safety] == [("hate", REVIEW), ("refusal", BLOCK)]


def test_sources_are_told_once_by_their_address_or_their_file() -> None:
    notes = Notes()
    for _ in range(2):
        notes.cite({"type": "url_citation", "url_citation": {"url": "https://a.example", "title": "A"}})
        notes.cite({"type": "url_citation", "url": "https://b.example", "title": "B", "start_index": 1})
        notes.cite({"type": "file_citation", "file_id": "file-1", "filename": "c.pdf", "index": 3})
    notes.cite({"type": "something_else", "url": "https://d.example"})
    notes.cite({"type": "url_citation", "title": "Nowhere"})
    notes.cite_addresses(["https://e.example", 3])
    assert list(noted(notes).citations) == [
        step_pb2.CitationRef(label="A", url="https://a.example"),
        step_pb2.CitationRef(label="B", url="https://b.example"),
        step_pb2.CitationRef(label="c.pdf", provider_ref="file-1"),
        step_pb2.CitationRef(url="https://e.example"),
    ]


def test_an_address_that_would_have_to_be_cut_is_left_out() -> None:
    notes = Notes()
    notes.cite_addresses([f"https://a.example/{'x' * 3000}"])
    assert notes.message() is None


def test_extras_are_json_by_name_and_those_that_do_not_fit_are_left_out() -> None:
    notes = Notes()
    notes.add("tier", "one")
    notes.add("tier", "two")
    notes.add("nothing", None)
    notes.add("large", "x" * MAX_EXTRA_BYTES)
    assert noted(notes).extra_json == '{"tier":"two"}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from(["safe", "url_citation"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "url", "title", "file_id", "filtered", "severity", "url_citation"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=6))
def test_whatever_a_provider_says_the_annotations_are_bounded(said: list[object]) -> None:
    notes = Notes()
    for number in range(80):
        for value in said:
            notes.filters({f"category-{number}": value} if isinstance(value, dict) else value)
            notes.prompt_filters([{"content_filter_results": value}])
            notes.cite_addresses(value)
            notes.cite_addresses([f"https://example.org/{number}/{'y' * 1900}"])
            notes.add(f"name-{number}", value)
            if isinstance(value, dict):
                notes.cite(value)
    made = notes.message() or step_pb2.Annotations()
    assert len(made.safety) <= MAX_NOTES
    assert len(made.citations) <= MAX_CITATIONS
    assert sum(each.ByteSize() for each in made.citations) <= MAX_CITED_BYTES
    assert len(made.extra_json.encode()) <= MAX_EXTRA_BYTES
    assert not made.extra_json or isinstance(json.loads(made.extra_json), dict)
