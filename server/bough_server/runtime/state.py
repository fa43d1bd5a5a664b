"""Session state as one lane of a run sees and changes it.

A lane sees the values at its fork and its own writes. When lanes are joined, the last lane's writes win.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from threading import Lock
from typing import Any

from bough.v1 import error_pb2, session_pb2
from bough_server.errors import RunError
from bough_server.log.session_state import (
    KEY,
    LIMITS,
    MAX_STATE_BYTES,
    apply_bounded_writes,
    is_key,
    is_value,
    state_size,
    value_size,
    value_text,
    write_of,
)
from bough_server.log.session_state_fold import Writes


class LaneState:
    """The recorded values of one lane. Invocations that run one after another share one."""

    def __init__(self, values: Mapping[str, str], writes: Writes | None = None) -> None:
        self._began = values
        self._writes = writes or Writes()
        self.values = dict(values)
        """JSON text of each value, by name."""

    def fork(self, group: str, number: int) -> "LaneState":
        """Return the values of a lane that starts now, in a group of parallel lanes."""
        return LaneState(self.values, self._writes.lane(group, number))

    def apply(self, changes: Iterable[session_pb2.SessionStateChange]) -> None:
        """Apply changes that are recorded."""
        if made := write_of(changes):
            self._writes.add(made)
            self.values = apply_bounded_writes(self.values, [made])

    def join(self) -> None:
        """Apply the writes of the lanes forked from this one, in lane order; also those of cancelled lanes."""
        # Recomputed from the initial values: lanes may end after an earlier join, and writes apply in lane order.
        if self._writes.has_group_last:
            self.values = apply_bounded_writes(self._began, self._writes.in_order())


class StateView(MutableMapping[str, Any]):
    """The session state as code sees it: JSON values by name. Reading returns a copy: assign a value to change it.

    Writes are buffered here until they are recorded. Raises KeyError for a missing value, and RunError BAD_ARGUMENTS
    for an invalid name or value.
    """

    def __init__(self, state: LaneState) -> None:
        self._state = state
        self._pending: dict[str, str | None] = {}
        self._writing = Lock()
        """Guards the writes and their size: a synchronous tool function writes from its own thread."""
        self._size = 0
        self._sized: Mapping[str, str] | None = None
        """The recorded values with which the size was computed; None if it was not."""

    def __getitem__(self, key: str) -> Any:
        text = self._text(key)
        if text is None:
            raise KeyError(key)
        return json.loads(text)

    def __setitem__(self, key: str, value: Any) -> None:
        try:
            text = value_text(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _bad_arguments(f"The value {key!r} of the state cannot be written as JSON: {error}.") from None
        self._keep(key, text)

    def keep_text(self, key: str, text: str) -> None:
        """Set a value given as JSON text. Raises RunError BAD_ARGUMENTS."""
        if not is_value(text):
            raise _bad_arguments(f"The value {key!r} of the state is not JSON that a state can hold: {LIMITS}.")
        self._keep(key, text.strip())

    def _keep(self, key: str, text: str) -> None:
        if not isinstance(key, str) or not is_key(key):
            raise _bad_arguments(f"{key!r} cannot name a value of the state: use a string that matches {KEY}.")
        with self._writing:
            size = self._measure_size() + value_size(key, text) - value_size(key, self._text(key))
            if size > MAX_STATE_BYTES:
                raise _bad_arguments(
                    f"With {key!r} the session's state would be larger than {MAX_STATE_BYTES // 1024} KiB. Keep large "
                    "values elsewhere and put references to them here."
                )
            self._pending[key], self._size = text, size

    def __delitem__(self, key: str) -> None:
        with self._writing:
            if (text := self._text(key)) is None:
                raise KeyError(key)
            self._size = self._measure_size() - value_size(key, text)
            if key in self._state.values:
                self._pending[key] = None
            else:
                del self._pending[key]  # never recorded: there is nothing to delete in the log

    def clear(self) -> None:
        """Delete all values."""
        for key in self.texts():
            del self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.texts()))

    def __len__(self) -> int:
        return len(self.texts())

    def pending(self) -> list[session_pb2.SessionStateChange]:
        """Return the buffered writes, each name once, in the order of the first write to it."""
        # Copied first: a function that timed out may still be writing in its thread.
        return [session_pb2.SessionStateChange(key=key, value_json=text) for key, text in list(self._pending.items())]

    def take_changes(self) -> list[session_pb2.SessionStateChange]:
        """Return the buffered writes and clear the buffer."""
        changes = self.pending()
        self._pending.clear()
        self._sized = None
        return changes

    def _text(self, key: str) -> str | None:
        return self._pending[key] if key in self._pending else self._state.values.get(key)

    def _measure_size(self) -> int:
        """Return the size of the current values in bytes, computed anew only if the recorded ones changed."""
        # Identity is enough: LaneState replaces its mapping when it changes.
        if self._sized is not self._state.values:
            self._sized, self._size = self._state.values, state_size(self.texts())
        return self._size

    def texts(self) -> dict[str, str]:
        """Return the JSON text of each value, by name."""
        return {key: text for key, text in {**self._state.values, **self._pending}.items() if text is not None}


def _bad_arguments(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
