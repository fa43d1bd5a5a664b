"""Server-sent events, read as bytes, in the event stream format of the HTML standard.

The last event needs no empty line after it; event names, ids and retry times are ignored: all providers repeat the name
in the data.
"""

from typing import Final

MAX_EVENT_BYTES: Final = 32 * 1024 * 1024


class EventTooLarge(ValueError):
    """One event is larger than 32 MiB."""


class EventDecoder:
    """Incremental decoder of server-sent events: bytes in, the data of each completed event out.

    Every byte is copied a few times, however many pieces an event has.
    """

    def __init__(self) -> None:
        self._line_pieces: list[bytes] = []
        self._line_size = 0
        self._data: list[bytes] = []
        self._data_size = 0
        self._ends_with_return = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes; several data lines are joined by a line feed.

        Raises EventTooLarge.
        """
        lines = self._normalize_line_ends(piece).split(b"\n")
        events: list[bytes] = []
        if len(lines) > 1:
            if self._line_pieces:
                lines[0] = b"".join([*self._line_pieces, lines[0]])
                self._line_pieces, self._line_size = [], 0
            self._read_lines(lines[:-1], events)
        if rest := lines[-1]:
            self._line_pieces.append(rest)
            self._line_size += len(rest)
        if self._line_size + self._data_size > MAX_EVENT_BYTES:
            raise EventTooLarge("A server-sent event is larger than 32 MiB.")
        return events

    def finish(self) -> list[bytes]:
        """Return the data of a last event that the stream ended without an empty line."""
        events: list[bytes] = []
        self._read_lines([b"".join(self._line_pieces), b""], events)
        self._line_pieces, self._line_size = [], 0
        return events

    def _normalize_line_ends(self, piece: bytes) -> bytes:
        """Return a piece whose lines end with a line feed."""
        if self._ends_with_return:
            piece = b"\r" + piece
        # A carriage return at the end may be the first half of CR LF: hold it until the next piece.
        self._ends_with_return = piece.endswith(b"\r")
        if b"\r" not in piece:
            return piece
        return piece.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _read_lines(self, lines: list[bytes], events: list[bytes]) -> None:
        for line in lines:
            if not line:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data, self._data_size = [], 0
            elif line.startswith(b"data:"):
                value = line[6:] if line[5:6] == b" " else line[5:]
                self._data.append(value)
                self._data_size += len(value)
            elif line == b"data":
                self._data.append(b"")
