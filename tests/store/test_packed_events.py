"""A stretch is the list of its events, in whatever part it is looked at."""

from hypothesis import given
from hypothesis import strategies as st

from bough_server.store.ports.log import StoredEvent
from bough_server.store.window import PackedEvents, data_of

ROWS = st.lists(st.tuples(st.integers(1, 99), st.binary(max_size=3)), max_size=6)
PLACES = st.none() | st.integers(-7, 7)


@given(rows=ROWS, first=st.integers(1, 1000), start=PLACES, end=PLACES)
def test_a_stretch_is_the_list_of_its_events(rows: list[tuple[int, bytes]], first: int, start: int, end: int) -> None:
    stretch = PackedEvents(first, rows)
    events = [StoredEvent(sequence, kind, data) for sequence, (kind, data) in enumerate(rows, first)]
    assert (list(stretch), len(stretch)) == (events, len(events))
    assert [stretch[place] for place in range(-len(rows), len(rows))] == [*events, *events]
    part = stretch[start:end]
    assert list(part) == events[start:end]
    assert data_of(part) == [event.data for event in events[start:end]] == data_of(list(part))
