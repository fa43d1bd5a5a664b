"""New ids: their form, and that all of them come from one source."""

import random
import uuid

import pytest

from bough_server import ids


def draw() -> list[str]:
    return [ids.new_uuid7(1_750_000_000_000_000_000), ids.new_uuid7(1_750_000_001_000_000_000), ids.new_uuid4()]


def test_new_ids_are_of_their_versions_and_differ() -> None:
    drawn = [*draw(), *draw()]
    assert [uuid.UUID(each).version for each in drawn] == [7, 7, 4] * 2
    assert {uuid.UUID(each).variant for each in drawn} == {uuid.RFC_4122}
    assert len(set(drawn)) == 6
    assert drawn[0] < drawn[1]


def test_with_a_seeded_source_the_same_ids_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_with(seed: int) -> list[str]:
        monkeypatch.setattr(ids, "random_bytes", random.Random(seed).randbytes)
        return draw()

    assert draw_with(1) == draw_with(1) != draw_with(2)
