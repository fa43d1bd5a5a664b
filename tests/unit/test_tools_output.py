"""What a tool gives back, as parts that fit an event."""

import json
import threading
from dataclasses import dataclass
from datetime import date
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.tools.output import Excerpt, result_parts
from bough_server.truncation import MAX_TEXT_BYTES, truncate_result

Part = message_pb2.Part


class Note(BaseModel):
    title: str
    day: date


@dataclass
class Pair:
    second: int
    first: str


class Mood(Enum):
    GOOD = "good"


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("leaves", Part(text="leaves")),
        ("", Part(text="")),
        (None, Part(text="")),
        (Mood.GOOD, Part(text="good")),
        ({"b": 1, "a": [None, True]}, Part(data_json='{"b":1,"a":[null,true]}')),
        ([], Part(data_json="[]")),
        (3, Part(data_json="3")),
        (False, Part(data_json="false")),
        (1.5, Part(data_json="1.5")),
        (Pair(second=2, first="ä"), Part(data_json='{"second":2,"first":"ä"}')),
        (Note(title="t", day=date(2026, 1, 31)), Part(data_json='{"title":"t","day":"2026-01-31"}')),
        (Part(data_json="{}", metadata_json='{"a":"b"}'), Part(data_json="{}", metadata_json='{"a":"b"}')),
        ("half \ud800", Part(text="half ?")),
    ],
)
def test_a_result_becomes_one_part(value: object, part: message_pb2.Part) -> None:
    assert result_parts(value) == [part]


def test_parts_are_taken_as_they_are() -> None:
    parts = [Part(text="see"), Part(blob=message_pb2.Blob(uri="https://example.com/a.png", media_type="image/png"))]
    assert result_parts(parts) == parts


@pytest.mark.parametrize("part", [Part(tool_call=message_pb2.ToolCall()), Part()])
def test_a_result_holds_no_calls_and_nothing_empty(part: message_pb2.Part) -> None:
    with pytest.raises(TypeError, match="holds text, data or a blob"):
        result_parts([part])


def test_what_is_no_json_is_refused_with_its_type() -> None:
    with pytest.raises(TypeError, match="a lock is neither text nor JSON"):
        result_parts(threading.Lock())


def test_too_long_a_text_keeps_its_head_and_its_tail() -> None:
    text = "a" * MAX_TEXT_BYTES + "é" * 1_000
    [part] = result_parts(text)
    assert (part.truncated, part.original_bytes) == (True, MAX_TEXT_BYTES + 2_000)
    assert len(part.text.encode()) <= MAX_TEXT_BYTES
    assert (part.text[:3], part.text[-3:]) == ("aaa", "ééé")


def test_too_long_a_json_is_cut_as_text() -> None:
    value = {"a": "x" * MAX_TEXT_BYTES}
    [part] = result_parts(value)
    assert part.WhichOneof("content") == "text"
    assert (part.truncated, part.original_bytes) == (True, len(json.dumps(value, separators=(",", ":"))))


def test_parts_share_the_room_for_text() -> None:
    parts = result_parts([Part(text="a" * (MAX_TEXT_BYTES - 100)), Part(text="b" * 1_000)])
    assert [part.truncated for part in parts] == [False, True]
    assert sum(len(part.text.encode()) for part in parts) <= MAX_TEXT_BYTES


def test_the_data_of_files_does_not_count() -> None:
    parts = [Part(blob=message_pb2.Blob(data=bytes(5 * 1024 * 1024)))]
    assert result_parts(parts) == parts


def test_parts_that_do_not_fit_are_refused_with_what_to_do() -> None:
    with pytest.raises(
        RunError, match=r"besides the data of files, .* It should return large content as a file"
    ) as refused:
        result_parts([Part(text="see", metadata_json='{"a":"' + "x" * 1024 * 1024 + '"}')])
    assert refused.value.reason == error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE


@given(st.lists(st.text(max_size=40), max_size=30), st.integers(min_value=16, max_value=200))
def test_an_excerpt_is_whole_or_within_its_limit_and_says_so(pieces: list[str], limit: int) -> None:
    excerpt = Excerpt(limit)
    for piece in pieces:
        excerpt.add(piece)
    text = "".join(pieces)
    size = len(text.encode())
    part = excerpt.part()
    if size <= limit:
        assert part == Part(text=text)
        return
    assert (part.truncated, part.original_bytes) == (True, size)
    assert len(part.text.encode()) <= limit
    head, _, tail = part.text.partition("\n[...]\n")
    assert text.startswith(head)
    assert text.endswith(tail)


def test_a_text_that_is_cut_keeps_its_metadata() -> None:
    long = Part(text="x" * (MAX_TEXT_BYTES + 1), metadata_json='{"a":"b"}')
    (part,) = result_parts(long)
    assert (part.truncated, part.metadata_json) == (True, '{"a":"b"}')


def test_a_cut_result_keeps_metadata_that_fits_and_leaves_out_what_does_not() -> None:
    small, large = '{"a":1}', '{"a":"' + "x" * 2_000 + '"}'
    parts = [Part(text="x" * 5_000, metadata_json=small), Part(text="y", metadata_json=large)]
    cut = truncate_result(message_pb2.ToolResult(parts=parts), 1_000)
    assert [part.metadata_json for part in cut.parts] == [small, ""]
    assert cut.truncated
