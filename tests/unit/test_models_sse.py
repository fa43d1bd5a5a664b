"""The data of server-sent events comes out the same, however the bytes are cut and their lines end."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough_server.models import sse
from bough_server.models.sse import EventDecoder, EventTooLarge

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))
EVENTS = st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6)
NOISE = st.sampled_from([b": keep-alive", b":", b"event: delta", b"id: 7", b"retry: 10", b"dat: x", b"database"])


def decoded(pieces: Sequence[bytes]) -> list[bytes]:
    decoder = EventDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.finish()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places})
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(events=EVENTS, end=LINE_ENDS, noise=st.lists(NOISE, max_size=3), places=st.lists(st.integers(0), max_size=20))
def test_events_survive_every_cut_line_end_and_comment(
    events: list[list[bytes]], end: bytes, noise: list[bytes], places: list[int]
) -> None:
    data = b"".join(end.join([*noise, *(b"data: " + line for line in lines), b"", b""]) for lines in events)
    assert decoded(cut(data, places)) == [b"\n".join(lines) for lines in events]


@given(st.binary(max_size=200), st.lists(st.integers(0), max_size=20))
def test_any_bytes_decode_the_same_whole_or_cut(data: bytes, places: list[int]) -> None:
    assert decoded(cut(data, places)) == decoded([data])


def test_the_blank_after_the_colon_is_optional_and_only_one_is_dropped() -> None:
    assert decoded([b"data:a\n\ndata:  b\n\ndata\n\ndata:\n\n"]) == [b"a", b" b", b"", b""]


def test_the_last_event_needs_no_empty_line() -> None:
    assert decoded([b"data: {}\n\ndata: [DONE]"]) == [b"{}", b"[DONE]"]
    assert decoded([b"data: [DONE]\r"]) == [b"[DONE]"]


def test_events_come_as_soon_as_they_are_complete() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\ndata: b\n\nda") == [b"a", b"b"]
    assert decoder.feed(b"ta: c\n\n") == [b"c"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EventTooLarge):
        EventDecoder().feed(b"data: " + b"a" * 100)
    many_lines = EventDecoder()
    many_lines.feed(b"data: aaaaaaaaaa\n" * 10)
    with pytest.raises(EventTooLarge):
        many_lines.feed(b"data: aaaaaaaaaa\n")


@pytest.mark.parametrize("line", [30 * 2**20, 1000])
def test_an_event_of_30_mb_costs_as_much_as_its_bytes_however_many_pieces_it_has(line: int) -> None:
    lines = [b"a" * line] * (30 * 2**20 // line)
    data = b"".join(b"data: " + each + b"\n" for each in lines) + b"\n"
    began = time.process_time()
    (event,) = decoded([data[start : start + 1024] for start in range(0, len(data), 1024)])
    # 30,000 pieces: where each costs what came before it, this takes minutes.
    assert time.process_time() - began < 10
    assert event == b"\n".join(lines)


def test_a_larger_event_is_refused_and_the_next_one_counts_anew() -> None:
    decoder = EventDecoder()
    for _ in range(3):
        assert len(decoder.feed(b"data: " + b"a" * (20 * 2**20) + b"\n\n")) == 1
    with pytest.raises(EventTooLarge):
        decoder.feed(b"data: " + b"a" * (33 * 2**20))
