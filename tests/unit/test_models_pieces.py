"""Texts in pieces: halves of surrogate pairs are joined across pieces, and single halves are marked."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough_server.models.provider_json import BadChunk, TextPieces, compact_json, json_object, string

ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def joined(pieces: Sequence[str]) -> tuple[list[str], str]:
    text = TextPieces()
    return [text.add(piece) for piece in pieces], str(text)


@given(st.lists(ANY, max_size=6))
def test_pieces_of_whole_characters_stay_as_they_are(pieces: list[str]) -> None:
    assert joined(pieces) == (pieces, "".join(pieces))


@given(ANY, st.lists(st.integers(0, 60), max_size=6))
def test_a_text_is_the_same_however_its_code_units_are_cut(text: str, places: list[int]) -> None:
    units = text.encode("utf-16-le")
    ends = sorted({min(2 * place, len(units)) for place in places})
    cuts = zip([0, *ends], [*ends, len(units)], strict=True)
    shown, whole = joined([units[start:end].decode("utf-16-le", "surrogatepass") for start, end in cuts])
    assert ("".join(shown), whole) == (text, text)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["a\ud83d", "b"], "a\ufffdb"),
        (["\ude00a"], "\ufffda"),
        (["a\ud83d"], "a"),
        (["\ud83d", "\ud83d\ude00"], "\ufffd\U0001f600"),
    ],
)
def test_a_half_without_its_other_is_marked_or_left_out_at_the_end(pieces: list[str], text: str) -> None:
    assert joined(pieces)[1] == text


def test_json_with_halves_is_read_and_is_text_that_can_be_stored() -> None:
    value = json_object(json.dumps({"a": "\ud83d", "b": "x"}).encode())
    assert (string(value["a"]), string(value["b"])) == ("\ufffd", "x")
    assert compact_json(value) == '{"a":"\ufffd","b":"x"}'


@pytest.mark.parametrize("data", [b'{"a": "\\ud83d"', b"{", b"[" * 100_000])
def test_what_is_no_json_is_refused_all_the_same(data: bytes) -> None:
    with pytest.raises(BadChunk):
        json_object(data)
