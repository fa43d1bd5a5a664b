"""The data of server-sent events, out of bytes that come in any pieces; event names, ids and retry times are dropped.

Follows the event stream format of the HTML standard, except that an event at the very end needs no empty line after it.
"""

from typing import Final

_LARGEST: Final = 16 * 1024 * 1024


class EventTooLarge(ValueError):
    """One event is larger than 16 MiB."""


class EventDecoder:
    """Takes bytes as they arrive and gives the data of every event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes; several data lines are joined by a line feed.

        Raises EventTooLarge.
        """
        buffer = self._rest + piece if self._rest else piece
        if b"\r" in buffer:
            # A carriage return at the end may be the first half of a line's end.
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        lines = buffer.split(b"\n")
        self._rest = lines.pop() + held
        events: list[bytes] = []
        for line in lines:
            self._line(line, events)
        if len(self._rest) + self._size > _LARGEST:
            raise EventTooLarge("A server-sent event is larger than 16 MiB.")
        return events

    def finish(self) -> list[bytes]:
        """The data of an event that the end of the stream cut from its empty line."""
        events: list[bytes] = []
        for line in (self._rest.removesuffix(b"\r"), b""):
            self._line(line, events)
        self._rest = b""
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._size = 0
        elif line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._size += len(value)
        elif line == b"data":
            self._data.append(b"")
