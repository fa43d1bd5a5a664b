"""Lines in blocks, one for each agent that speaks, which parallel agents cannot garble; what is said is not its own."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from rich.text import Text

from bough.v1 import event_pb2
from bough_server.cli.render.amounts import clip, depth_style
from bough_server.cli.render.speaker import Mode, Speaker, bars, room, speaker_of
from bough_server.cli.render.status import STYLES, fitted

AgentEvent = event_pb2.AgentEvent


class Blocks:
    """Lines for a terminal of that many cells, and the agents that speak in them."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._speakers: dict[str, Speaker] = {}
        self._branches: Counter[str] = Counter()
        self._current = ""
        self._lines: list[Text] = []

    @property
    def speakers(self) -> Collection[Speaker]:
        """All that were heard of, in that order."""
        return self._speakers.values()

    def taken(self) -> list[Text]:
        """The lines that were written since the last time."""
        lines, self._lines = self._lines, []
        return lines

    def speaker(self, event: AgentEvent) -> Speaker:
        """Whose event it is."""
        speaker = self._speakers.get(event.invocation_id)
        if speaker is None:
            branch = event.branch or event.agent
            self._branches[branch] += 1
            speaker = speaker_of(event, width=self._width, number=self._branches[branch])
            self._speakers[event.invocation_id] = speaker
        return speaker

    def caller(self, speaker: Speaker) -> Speaker | None:
        """Who called it; None for a root, and for one whose caller was not heard of."""
        return self._speakers.get(speaker.parent)

    def room(self, speaker: Speaker) -> int:
        """How many cells a line of a speaker's has."""
        return room(speaker.depth, self._width)

    def open(self, speaker: Speaker, words: str = "") -> None:
        """Begins a speaker's block, with words on what it is."""
        header = bars(speaker.depth)
        style = depth_style(speaker.depth)
        header.append("● ", style=style).append(speaker.name, style=f"bold {style}")
        header.append(f"  {words}" if words else "", style="dim")
        self._lines.append(fitted(header, self._width))
        self._current = speaker.invocation_id

    def close(self, speaker: Speaker, mark: str, style: str, words: str) -> None:
        """Ends a speaker's block, with words on how it ended."""
        self.flush(speaker)
        line = bars(speaker.depth).append(f"{mark} ", style=style)
        line.append(speaker.name, style=f"bold {depth_style(speaker.depth)}")
        line.append(f"  {words}" if words else "", style="dim" if mark == "✓" else style)
        self._lines.append(fitted(line, self._width))
        # Only after its own block is it plain that the caller goes on.
        self._current = speaker.parent if self._current == speaker.invocation_id else ""
        speaker.has_ended = True

    def say(self, speaker: Speaker, text: str, style: str = "") -> None:
        """Writes a line into a speaker's block; says whose it is where another one spoke last."""
        if self._current != speaker.invocation_id:
            label = bars(speaker.depth).append(f"▸ {speaker.branch}", style=f"dim {depth_style(speaker.depth)}")
            self._lines.append(fitted(label, self._width))
            self._current = speaker.invocation_id
        line = bars(speaker.depth + 1)
        line.append(clip(text, self.room(speaker)), style=style)
        line.rstrip()
        self._lines.append(line)

    def flush(self, speaker: Speaker) -> None:
        """Writes the line that a speaker has not finished."""
        self._print(speaker, speaker.speech.finish())

    def speak(self, event: AgentEvent, speaker: Speaker, mode: Mode, text: str) -> None:
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

    def begin_again(self, event: AgentEvent, speaker: Speaker) -> None:
        """Begins the attempt of an event: what the one before said is void."""
        self._void(speaker)
        speaker.attempt = (event.step_index, event.attempt)
        speaker.has_spoken = speaker.has_shown = False

    def _print(self, speaker: Speaker, lines: list[str]) -> None:
        for line in lines:
            self.say(speaker, line, STYLES[speaker.mode])
        speaker.has_shown = speaker.has_shown or (bool(lines) and speaker.mode == "text")

    def _void(self, speaker: Speaker) -> None:
        """Takes back what an attempt said that is lost, as far as it is not on the screen yet."""
        speaker.speech.finish()
        if speaker.has_shown:
            self.say(speaker, "  what it said in this step does not count", "dim yellow")


Handler: TypeAlias = Callable[[Blocks, AgentEvent, Speaker, float], None]
"""Writes what an event says, at a time in seconds on the viewer's clock."""

Handlers: TypeAlias = Mapping[str, Handler]
"""Handlers by the name of the payload that they show."""
