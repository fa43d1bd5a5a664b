"""One block of output for each agent: wrapped text, and the status line of its work."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from rich.cells import cell_len
from rich.text import Text

from bough.v1 import event_pb2, execution_pb2
from bough_server.cli.render.format import clip, depth_style, printable, seconds_text

Mode = Literal["text", "reasoning"]
STARTING: Final = "starting"
"""What an agent waits for until it does something."""

_DEEPEST: Final = 12
_NARROWEST: Final = 20

AgentEvent = event_pb2.AgentEvent

STYLES: Final[Mapping[Mode, str]] = {"text": "", "reasoning": "dim italic"}
"""How each kind of speech looks."""

_MOST_LINES: Final = 8


class TextWrapper:
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


@dataclass(slots=True, kw_only=True)
class AgentLane:
    """An agent's execution. `activity` is what it waits for, since `since` on the viewer's clock; empty for nothing."""

    invocation_id: str
    parent: str
    name: str
    branch: str
    depth: int
    speech: TextWrapper
    kind: execution_pb2.AgentKind.ValueType = execution_pb2.AGENT_KIND_UNSPECIFIED
    model: str = ""
    """Which model its last attempt of a call asks, by its name in the configuration; empty where it is not known."""
    mode: Mode = "text"
    activity: str = ""
    since: float = 0.0
    attempt: tuple[int, int] = (0, 0)
    has_spoken: bool = False
    """Whether text came in this attempt."""
    has_shown: bool = False
    """Whether lines of this attempt's text stand on the screen."""
    has_ended: bool = False
    forked_ns: int = 0
    """When its run was forked, since the Unix epoch; 0 where that is not known."""
    tools: dict[str, "Running"] = field(default_factory=dict)

    def wait_for(self, what: str, now: float) -> None:
        """From now on it waits for something."""
        self.activity, self.since = what, now


@dataclass(slots=True, kw_only=True)
class Running:
    """A tool at work: its name, since when, and what it says meanwhile."""

    name: str
    since: float
    speech: TextWrapper


def speaker_of(event: event_pb2.AgentEvent, *, width: int, number: int) -> AgentLane:
    """The speaker of an event; the `number` tells executions of one branch apart, from 1."""
    suffix = f" #{number}" if number > 1 else ""
    return AgentLane(
        invocation_id=event.invocation_id,
        parent=event.parent_invocation_id,
        name=(event.agent or "?") + suffix,
        branch=(event.branch or event.agent or "?") + suffix,
        depth=event.depth,
        speech=TextWrapper(room(event.depth, width)),
    )


def room(depth: int, width: int) -> int:
    """How many cells a line inside an agent's block has."""
    return max(_NARROWEST, width - len(bars(depth + 1)))


def bars(levels: int) -> Text:
    """One bar for each level above, in the level's color; very deep ones as a number."""
    line = Text()
    for level in range(min(levels, _DEEPEST)):
        line.append("│ ", style=depth_style(level))
    if levels > _DEEPEST:
        line.append(f"⋯{levels} ", style="dim")
    return line


class AgentBlocks:
    """Lines for a terminal of that many cells, and the agents that speak in them."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._speakers: dict[str, AgentLane] = {}
        self._branches: Counter[str] = Counter()
        self._current = ""
        self._lines: list[Text] = []

    @property
    def speakers(self) -> Collection[AgentLane]:
        """All that were heard of, in that order."""
        return self._speakers.values()

    def taken(self) -> list[Text]:
        """The lines that were written since the last time."""
        lines, self._lines = self._lines, []
        return lines

    def speaker(self, event: AgentEvent) -> AgentLane:
        """Whose event it is."""
        speaker = self._speakers.get(event.invocation_id)
        if speaker is None:
            branch = event.branch or event.agent
            self._branches[branch] += 1
            speaker = speaker_of(event, width=self._width, number=self._branches[branch])
            self._speakers[event.invocation_id] = speaker
        return speaker

    def caller(self, speaker: AgentLane) -> AgentLane | None:
        """Who called it; None for a root, and for one whose caller was not heard of."""
        return self._speakers.get(speaker.parent)

    def room(self, speaker: AgentLane) -> int:
        """How many cells a line of a speaker's has."""
        return room(speaker.depth, self._width)

    def open(self, speaker: AgentLane, words: str = "") -> None:
        """Begins a speaker's block, with words on what it is."""
        header = bars(speaker.depth)
        style = depth_style(speaker.depth)
        header.append("● ", style=style).append(speaker.name, style=f"bold {style}")
        header.append(f"  {words}" if words else "", style="dim")
        self._lines.append(fitted(header, self._width))
        self._current = speaker.invocation_id

    def close(self, speaker: AgentLane, mark: str, style: str, words: str) -> None:
        """Ends a speaker's block, with words on how it ended."""
        self.flush(speaker)
        line = bars(speaker.depth).append(f"{mark} ", style=style)
        line.append(speaker.name, style=f"bold {depth_style(speaker.depth)}")
        line.append(f"  {words}" if words else "", style="dim" if mark == "✓" else style)
        self._lines.append(fitted(line, self._width))
        # Only after its own block is it plain that the caller goes on.
        self._current = speaker.parent if self._current == speaker.invocation_id else ""
        speaker.has_ended = True

    def say(self, speaker: AgentLane, text: str, style: str = "") -> None:
        """Writes a line into a speaker's block; says whose it is where another one spoke last."""
        if self._current != speaker.invocation_id:
            label = bars(speaker.depth).append(f"▸ {speaker.branch}", style=f"dim {depth_style(speaker.depth)}")
            self._lines.append(fitted(label, self._width))
            self._current = speaker.invocation_id
        line = bars(speaker.depth + 1)
        line.append(clip(text, self.room(speaker)), style=style)
        line.rstrip()
        self._lines.append(line)

    def flush(self, speaker: AgentLane) -> None:
        """Writes the line that a speaker has not finished."""
        self._print(speaker, speaker.speech.finish())

    def speak(self, event: AgentEvent, speaker: AgentLane, mode: Mode, text: str) -> None:
        """Adds a piece of what a model streams; a late one of an attempt that is void is dropped."""
        attempt = (event.step_index, event.attempt)
        if attempt < speaker.attempt:
            return
        if attempt > speaker.attempt:
            if event.step_index == speaker.attempt[0]:
                self._void(speaker)
            else:
                self.flush(speaker)
            speaker.attempt, speaker.has_spoken, speaker.has_shown = attempt, False, False
        if mode != speaker.mode:
            self.flush(speaker)
            speaker.mode = mode
        speaker.activity = ""
        speaker.has_spoken = speaker.has_spoken or mode == "text"
        self._print(speaker, speaker.speech.add(text))

    def begin_again(self, event: AgentEvent, speaker: AgentLane) -> None:
        """Begins the attempt of an event: what the one before said is void."""
        self._void(speaker)
        speaker.attempt = (event.step_index, event.attempt)
        speaker.has_spoken = speaker.has_shown = False

    def _print(self, speaker: AgentLane, lines: list[str]) -> None:
        for line in lines:
            self.say(speaker, line, STYLES[speaker.mode])
        speaker.has_shown = speaker.has_shown or (bool(lines) and speaker.mode == "text")

    def _void(self, speaker: AgentLane) -> None:
        """Takes back what an attempt said that is lost, as far as it is not on the screen yet."""
        speaker.speech.finish()
        if speaker.has_shown:
            self.say(speaker, "  what it said in this step does not count", "dim yellow")


Handler: TypeAlias = Callable[[AgentBlocks, AgentEvent, AgentLane, float], None]
"""Writes what an event says, at a time in seconds on the viewer's clock."""


Handlers: TypeAlias = Mapping[str, Handler]
"""Handlers by the name of the payload that they show."""


def status_lines(speakers: Iterable[AgentLane], now: float, *, width: int) -> list[Text]:
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


def _doing(speaker: AgentLane, now: float) -> list[Text]:
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
