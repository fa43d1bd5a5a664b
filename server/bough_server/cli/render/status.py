"""What agents are in the middle of, as lines that are drawn again and again; finished lines are the live view's."""

from collections.abc import Iterable, Mapping
from typing import Final

from rich.text import Text

from bough_server.cli.render.amounts import seconds_text
from bough_server.cli.render.speaker import Mode, Speaker, bars

STYLES: Final[Mapping[Mode, str]] = {"text": "", "reasoning": "dim italic"}
"""How each kind of speech looks."""

_MOST_LINES: Final = 8


def status_lines(speakers: Iterable[Speaker], now: float, *, width: int) -> list[Text]:
    """An unfinished line, what an agent waits for, tools at work; the first few, and how many more."""
    lines = [line for speaker in speakers if not speaker.has_ended for line in _doing(speaker, now)]
    fitting = [fitted(line, width) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        fitting.append(Text(f"… and {len(lines) - _MOST_LINES} more", style="dim"))
    return fitting


def fitted(line: Text, width: int) -> Text:
    """The line itself, cut to a width."""
    line.truncate(width, overflow="ellipsis")
    return line


def _doing(speaker: Speaker, now: float) -> list[Text]:
    lines = []
    if speaker.speech.pending:
        lines.append(bars(speaker.depth + 1).append(speaker.speech.pending, style=STYLES[speaker.mode]))
    elif speaker.activity:
        waited = seconds_text(now - speaker.since)
        lines.append(bars(speaker.depth + 1).append(f"… {speaker.name}: {speaker.activity} {waited}", style="dim"))
    for tool in speaker.tools.values():
        text = f"… {speaker.name}: {tool.name} {seconds_text(now - tool.since)}"
        lines.append(bars(speaker.depth + 1).append(text, style="dim"))
    return lines
