"""The values that the runs of a session share, as text, and how a log changes them; pure.

What runs at once does not see each other's writes, and afterwards the later lane or call wins: so a log's writes count
in the order of their keys, not of their sequences.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2, state_pb2
from bough_server.cutting import size_of

MAX_STATE_BYTES: Final = 256 * 1024
"""The most bytes of a session's state as JSON; a write beyond it is refused, and one in a log that is has no effect."""

KEY: Final = r"[A-Za-z][A-Za-z0-9_.:-]{0,127}"
"""What a value may be called."""

_PARALLEL: Final = re.compile(r"t[0-9]+|g[0-9]+|[0-9]+")
"""The names of what runs at once: calls of a step, lanes of an agent, lanes of code."""

Place = tuple[tuple[int, int], ...]
"""Where a write stands among others: for each name of its key when that, or what ran at once with it, first wrote, and
its number there."""


def values_of(state_json: str) -> dict[str, str]:
    """A state as JSON text of each value, by name; empty text is an empty state."""
    return {key: json_text(value) for key, value in json.loads(state_json or "{}").items()}


def json_of(values: Mapping[str, str]) -> str:
    """A state as one JSON object, in the order of its values' names; an empty one is empty text."""
    return "{" + ",".join(f"{json_text(key)}:{values[key]}" for key in sorted(values)) + "}" if values else ""


def json_text(value: object) -> str:
    """A value as JSON text. Raises TypeError or ValueError for what JSON cannot hold."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def changed(values: Mapping[str, str], changes: Iterable[state_pb2.StateChange]) -> dict[str, str]:
    """Values after changes, in order. A change that would make them too large is left out."""
    after = dict(values)
    for change in changes:
        before = after.pop(change.key, None)
        if not change.HasField("value_json"):
            continue
        after[change.key] = change.value_json
        if size_of(json_of(after)) > MAX_STATE_BYTES:
            del after[change.key]
            if before is not None:
                after[change.key] = before
    return after


def is_key(name: str) -> bool:
    """Whether a value may be called so."""
    return re.fullmatch(KEY, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    names: tuple[str, ...]
    place: Place
    changes: tuple[state_pb2.StateChange, ...]


class StateFold:
    """A session's state as one run's log leaves it: give it every event that is no delta, once and in order."""

    def __init__(self) -> None:
        self._began: Mapping[str, str] = {}
        self._writes: list[_Write] = []
        self._first: dict[tuple[str, ...], int] = {}

    def take(self, event: event_pb2.AgentEvent) -> bool:
        """Takes an event in; gives whether it says anything of the state."""
        kind = event.WhichOneof("payload")
        if kind == "run_started" or kind == "run_dequeued":
            begun = event.run_started if kind == "run_started" else event.run_dequeued
            self._began = values_of(begun.state_json)
            return bool(self._began)
        changes = changes_of(event)
        if not changes:
            return False
        names = tuple(re.split(r"[/.]", event.effect_key))
        self._writes.append(_Write(names=names, place=self._place(names), changes=tuple(changes)))
        return True

    @property
    def values(self) -> dict[str, str]:
        """JSON text of each value, by name."""
        ordered = sorted(self._writes, key=lambda write: write.place)
        return changed(self._began, (change for write in ordered for change in write.changes))

    @property
    def state_json(self) -> str:
        """The state as one JSON object; empty text where there is none."""
        return json_of(self.values)

    def conflicts(self) -> list[str]:
        """The names that several of what ran at once gave different values, sorted; the last of them won."""
        found: set[str] = set()
        last: dict[str, tuple[_Write, state_pb2.StateChange]] = {}
        for write in sorted(self._writes, key=lambda write: write.place):
            for change in write.changes:
                before = last.get(change.key)
                if before is not None and before[1] != change and _ran_at_once(before[0].names, write.names):
                    found.add(change.key)
                last[change.key] = (write, change)
        return sorted(found)

    def _place(self, names: tuple[str, ...]) -> Place:
        place = []
        for depth, name in enumerate(names):
            is_parallel = _PARALLEL.fullmatch(name) is not None
            # What runs at once first wrote when the first of it did.
            group = (*names[:depth], name.rstrip("0123456789") + "*" if is_parallel else name)
            first = self._first.setdefault(group, len(self._first))
            place.append((first, int(name.lstrip("tg")) if is_parallel else 0))
        return tuple(place)


def changes_of(event: event_pb2.AgentEvent) -> Iterable[state_pb2.StateChange]:
    """What an event changes of its session's state."""
    kind = event.WhichOneof("payload")
    if kind == "state_changed":
        return event.state_changed.changes
    return event.tool_completed.state_delta if kind == "tool_completed" else ()


def _ran_at_once(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return all(_PARALLEL.fullmatch(name) for name in (mine, theirs))
    return False
