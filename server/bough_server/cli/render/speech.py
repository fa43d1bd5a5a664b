"""Streamed text cut into lines that fit; whose text it is and how it looks is not its own."""

from rich.cells import cell_len

from bough_server.cli.render.amounts import printable


class Speech:
    """Text that arrives in pieces. A line is given out when it is whole: at its end, or when it fills the width."""

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self.pending = ""
        """The unfinished line."""

    def add(self, text: str) -> list[str]:
        """The lines that this piece finishes, broken at spaces where there are any."""
        self.pending += printable(text)
        lines: list[str] = []
        while True:
            line, newline, rest = self.pending.partition("\n")
            if cell_len(line) > self._width:
                end = self._end(line)
                lines.append(line[:end].rstrip())
                self.pending = self.pending[end:].lstrip(" ")
            elif newline:
                lines.append(line.rstrip())
                self.pending = rest
            else:
                return lines

    def finish(self) -> list[str]:
        """The unfinished line, if there is one; nothing is pending afterwards."""
        line, self.pending = self.pending.rstrip(), ""
        return [line] if line else []

    def _end(self, line: str) -> int:
        """Where to break a line that is too long: at the last space that fits, else at the last character that does."""
        cells = fits = 0
        for character in line:
            cells += cell_len(character)
            if cells > self._width:
                break
            fits += 1
        space = line.rfind(" ", 0, fits + 1)
        return space if space > 0 else max(1, fits)
