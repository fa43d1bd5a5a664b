"""Consecutive events as the disk gives them: what is sent as it is stored never becomes an object; it reads no disk."""

from collections.abc import Iterator, Sequence
from itertools import count
from operator import attrgetter, itemgetter
from typing import Final, overload

from bough_server.store.ports import StoredEvent

_kind: Final = itemgetter(0)
_data: Final = itemgetter(1)
_data_of_one: Final = attrgetter("data")

Rows = Sequence[tuple[int, bytes]]
"""Kinds and bytes."""


class Stretch(Sequence[StoredEvent]):
    """Events without a gap, from a sequence on; each is made when it is looked at."""

    __slots__ = ("_first", "_rows")

    def __init__(self, first: int, rows: Rows) -> None:
        self._first, self._rows = first, rows

    def data(self) -> list[bytes]:
        """The stored bytes of all."""
        return list(map(_data, self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StoredEvent]:
        return map(StoredEvent, count(self._first), map(_kind, self._rows), map(_data, self._rows))

    @overload
    def __getitem__(self, place: int) -> StoredEvent: ...
    @overload
    def __getitem__(self, place: slice) -> "Stretch": ...
    def __getitem__(self, place: int | slice) -> "StoredEvent | Stretch":
        if isinstance(place, slice):
            first, _, step = place.indices(len(self._rows))
            assert step == 1, "a stretch has no gap"
            return Stretch(self._first + first, self._rows[place])
        row = self._rows[place]
        return StoredEvent(self._first + place % len(self._rows), *row)


def data_of(stored: Sequence[StoredEvent]) -> list[bytes]:
    """The stored bytes of events, one by one."""
    return stored.data() if isinstance(stored, Stretch) else list(map(_data_of_one, stored))
