"""Session state as a log leaves it, and conflicts between its writes.

Concurrent lanes and calls do not see each other's writes, and afterwards the later lane or call wins. A log's writes
therefore apply in the order of their keys, not of their sequences.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Final

from bough.v1 import event_pb2
from bough_server.log import events
from bough_server.log.session_state import Write, apply_bounded_writes, changes_of, values_of

_LANE: Final = re.compile(r"(?:(?:^|/)g|\.t|\.)([0-9]{1,9})(?=[/.]|$)")
"""Numbers of concurrent parts in a key: lanes of an agent, calls of a step, lanes of code."""


@dataclass(slots=True)
class _Group:
    """Lanes that run concurrently, by number."""

    name: str
    lanes: "dict[int, Writes]" = field(default_factory=dict)


class Writes:
    """Writes of one lane and of the groups of concurrent lanes nested in it."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[Write | _Group] = []

    @property
    def has_group_last(self) -> bool:
        """True if the last entry is a group of concurrent lanes."""
        return bool(self._entries) and isinstance(self._entries[-1], _Group)

    def add(self, changes: Write) -> None:
        """Add a write of the lane itself."""
        self._entries.append(changes)

    def lane(self, group: str, number: int) -> "Writes":
        """Return the writes of a lane nested in this one; the next write of this lane itself ends the group."""
        while self._entries:
            last = self._entries[-1]
            if not isinstance(last, _Group):
                break
            if last.name == group:
                return last.lanes.setdefault(number, Writes())
            if any(lane._entries and lane.in_order() for lane in last.lanes.values()):
                break
            self._entries.pop()  # no lane of it wrote anything, so it would only separate the groups around it
        made = _Group(group)
        self._entries.append(made)
        return made.lanes.setdefault(number, Writes())

    def is_newest(self, number: int) -> bool:
        """Return whether no lane of the last group comes after this one."""
        last = self._entries[-1]
        return isinstance(last, _Group) and number == max(last.lanes)

    def in_order(self) -> list[Write]:
        """Return all writes in the order in which they apply; concurrent lanes in the order of their numbers."""
        found: list[Write] = []
        # A stack of iterators instead of recursion: the log of another system may nest lanes deeper than the stack.
        open_lanes: list[Iterator[Write | _Group]] = [iter(self._entries)]
        while open_lanes:
            entry = next(open_lanes[-1], None)
            if entry is None:
                open_lanes.pop()
            elif isinstance(entry, _Group):
                lanes = [entry.lanes[number]._entries for number in sorted(entry.lanes)]
                open_lanes.append(chain.from_iterable(lanes))
            else:
                found.append(entry)
        return found


class StateFold:
    """Fold of session state over one run's log: apply every event that concerns it, once and in order.

    Accepts events of any source and never raises: a state that is not a JSON object counts as empty.
    """

    def __init__(self) -> None:
        self._began: Mapping[str, str] = {}
        self._writes = Writes()
        self._values: dict[str, str] | None = {}

    def apply(self, event: event_pb2.AgentEvent) -> bool:
        """Apply an event; return whether it concerns session state."""
        kind = event.WhichOneof("payload")
        if kind == "run_started" or kind == "run_dequeued":
            begun = event.run_started if kind == "run_started" else event.run_dequeued
            self._began, self._values = _values(begun.state_json), None
            return bool(self._began)
        changes = changes_of(event)
        if changes:
            self._write(event.effect_key, changes)
        return bool(changes)

    @property
    def values(self) -> dict[str, str]:
        """JSON text of each value, by key."""
        if self._values is None:
            self._values = apply_bounded_writes(self._began, self._writes.in_order())
        return self._values

    def _write(self, key: str, changes: Write) -> None:
        lane, at, is_newest = self._writes, 0, True
        for found in _LANE.finditer(key):
            above, number = lane, int(found[1])
            lane = above.lane(key[at : found.start(1)], number)
            is_newest, at = is_newest and above.is_newest(number), found.end()
        lane.add(changes)
        # A write that sorts after all others applies on top of the known values; any other needs a new fold.
        is_known = is_newest and self._values is not None
        self._values = apply_bounded_writes(self._values or {}, [changes]) if is_known else None


_BEGIN: Final = frozenset({events.TOOL_STARTED, events.INPUT_REQUESTED})

CONCERNED: Final = frozenset({*_BEGIN, *events.TOOL_END_KINDS, events.SESSION_STATE_CHANGED})
"""Kinds of events that record writes, or the start and end of calls."""


MAX_NOTED: Final = 100_000
"""The most lanes, and the most writes in them, that are compared; events of other systems may have many more."""


class Conflicts:
    """Values that concurrent lanes or calls wrote differently: apply the events of CONCERNED kinds in order.

    Accepts events of any source and never raises. Two calls of a step do not conflict if one began after the other had
    ended, because the later one could see what the earlier wrote.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], int] = {}
        """Number of each group and lane by parent and name. Whole keys would be as long as calls are deep."""
        self._written: dict[tuple[int, str], dict[int, tuple[int, str | None]]] = {}
        """By group and key, then by the lane's number in the group: the lane, and the last value that it wrote."""
        self._noted = 0
        self._began: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._applied = 0

    def apply(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """Apply an event."""
        self._applied += 1
        write = changes_of(event)
        is_call = kind in _BEGIN or kind in events.TOOL_END_KINDS
        key = event.effect_key.removesuffix(".ok")
        lanes = list(self._lanes(key)) if write or is_call else []
        # A call of a step is a lane itself. One of code lies in a lane that does not end with it.
        is_lane = is_call and bool(lanes) and _LANE.search(key.rpartition("/")[2]) is not None
        if kind in _BEGIN and is_lane:
            self._began.setdefault(lanes[-1][2], self._applied)
        for group, number, lane in lanes:
            self._note(group, number, lane, write)
        if kind in events.TOOL_END_KINDS and is_lane:
            self._ended[lanes[-1][2]] = self._applied

    def names(self) -> list[str]:
        """Return the keys of the conflicting values, sorted."""
        return sorted({name for (_, name), lanes in self._written.items() if self._differ(lanes)})

    def _lanes(self, key: str) -> Iterator[tuple[int, int, int]]:
        """Yield the lanes that contain a key, from the root down: group, number in the group, lane."""
        above, at = 0, 0
        for found in _LANE.finditer(key):
            if len(self._places) >= MAX_NOTED:
                return
            group = self._place(above, key[at : found.start(1)])
            above = self._place(group, found[1])
            at = found.end()
            yield group, int(found[1]), above

    def _place(self, above: int, name: str) -> int:
        return self._places.setdefault((above, name), len(self._places) + 1)

    def _note(self, group: int, number: int, lane: int, write: Write) -> None:
        for name, text in write[: MAX_NOTED - self._noted]:
            self._noted += 1
            self._written.setdefault((group, name), {})[number] = (lane, text)

    def _differ(self, lanes: Mapping[int, tuple[int, str | None]]) -> bool:
        ordered = [lanes[number] for number in sorted(lanes)]
        return any(
            one != other and self._overlap(lane, next_lane) for (lane, one), (next_lane, other) in pairwise(ordered)
        )

    def _overlap(self, one: int, other: int) -> bool:
        """Return whether neither lane had ended when the other began."""
        never = self._applied + 1
        return self._began.get(one, 0) < self._ended.get(other, never) and self._began.get(other, 0) < self._ended.get(
            one, never
        )


def _values(state_json: str) -> Mapping[str, str]:
    try:
        return values_of(state_json)
    except ValueError:
        return {}
