"""Output blocks of agents: wrapped text, and status lines about work in progress."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from rich.cells import cell_len
from rich.text import Text

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server.cli.render.format import clip, depth_style, error_text, seconds_text
from bough_server.plain_text import one_line, printable

Mode = Literal["text", "reasoning"]
STARTING: Final = "starting"
"""The activity of an agent that has not done anything yet."""

_DEEPEST: Final = 12
_NARROWEST: Final = 20

AgentEvent = event_pb2.AgentEvent

STYLES: Final[Mapping[Mode, str]] = {"text": "", "reasoning": "dim italic"}
"""Style of each mode's text."""

_MOST_LINES: Final = 8


class TextWrapper:
    """Splits streamed text into lines. A line is complete at its newline, or when it exceeds the width."""

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self.pending = ""
        """The incomplete line."""

    def add(self, text: str) -> list[str]:
        """Add a piece and return the lines that it completes, broken at spaces if possible."""
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
        """Return the incomplete line, if there is one, and clear it."""
        line, self.pending = self.pending.rstrip(), ""
        return [line] if line else []

    def _end(self, line: str) -> int:
        """Return where to break a long line: at the last space that fits, else after the last character that fits."""
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
    """An agent's execution and its part of the screen.

    `activity` names what it waits for, empty for nothing, and `since` is its start in seconds on the viewer's clock.
    """

    invocation_id: str
    parent: str
    name: str
    branch: str
    depth: int
    text: TextWrapper
    kind: execution_pb2.AgentKind.ValueType = execution_pb2.AGENT_KIND_UNSPECIFIED
    model: str = ""
    """The configured name of the model that the last attempt calls; empty if it is not known."""
    retried: str = ""
    """The message of the last attempt that was made again."""
    mode: Mode = "text"
    activity: str = ""
    since: float = 0.0
    until: float = 0.0
    """When a wait of known length ends, on the viewer's clock; 0 for any other wait."""
    reason: str = ""
    """Why it waits, if it waits until a known time."""
    step_id: str = ""
    """The step whose text arrived last; branches of an agent that run in parallel take turns."""
    attempts: "dict[str, Attempt]" = field(default_factory=dict)
    """The last attempt of each step."""
    has_ended: bool = False
    forked_ns: int = 0
    """When its run was forked, in nanoseconds since the Unix epoch; 0 if it is not a fork, as far as known."""
    tools: dict[str, "Running"] = field(default_factory=dict)

    def wait_for(self, what: str, now: float, *, seconds: float = 0.0, reason: str = "") -> None:
        """Set the activity that the agent waits for from now on, and how long and why it waits, if that is known."""
        self.activity, self.since = what, now
        self.until, self.reason = (now + seconds if seconds > 0 else 0.0), reason


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Text of a step's last attempt: whether any has arrived, and whether lines of it are on the screen."""

    number: int
    has_text: bool = False
    has_shown: bool = False


@dataclass(slots=True, kw_only=True)
class Running:
    """A running tool: its name, its start on the viewer's clock, and its output so far."""

    name: str
    since: float
    output: TextWrapper


def lane_of(event: event_pb2.AgentEvent, *, width: int, number: int) -> AgentLane:
    """Create the lane of an event's agent. `number` distinguishes executions of one branch, from 1."""
    suffix = f" #{number}" if number > 1 else ""
    return AgentLane(
        invocation_id=event.invocation_id,
        parent=event.parent_invocation_id,
        name=(event.agent or "?") + suffix,
        branch=(event.branch or event.agent or "?") + suffix,
        depth=event.depth,
        text=TextWrapper(room(event.depth, width)),
    )


def room(depth: int, width: int) -> int:
    """Return the width in cells of a line inside the block of an agent at a depth."""
    return max(_NARROWEST, width - len(bars(depth + 1)))


def bars(levels: int) -> Text:
    """Return a bar for each level, in the level's color; levels below the deepest drawn one as a number."""
    line = Text()
    for level in range(min(levels, _DEEPEST)):
        line.append("│ ", style=depth_style(level))
    if levels > _DEEPEST:
        line.append(f"⋯{levels} ", style="dim")
    return line


class AgentBlocks:
    """Blocks of agents on a terminal of `width` cells, written as lines; in a pipe errors are on one line each."""

    def __init__(self, width: int, *, is_pipe: bool = False) -> None:
        self._width, self._is_pipe = width, is_pipe
        self.shown_errors: list[str] = []
        """The messages of all errors that were written, the longest first."""
        self._lanes: dict[str, AgentLane] = {}
        self._branches: Counter[str] = Counter()
        self._current = ""
        self._lines: list[Text] = []

    @property
    def lanes(self) -> Collection[AgentLane]:
        """All agents seen so far, in order of their first events."""
        return self._lanes.values()

    def take_lines(self) -> list[Text]:
        """Return and clear the lines written since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def lane(self, event: AgentEvent) -> AgentLane:
        """Return the lane of an event's agent, created at its first event."""
        lane = self._lanes.get(event.invocation_id)
        if lane is None:
            branch = event.branch or event.agent
            self._branches[branch] += 1
            lane = lane_of(event, width=self._width, number=self._branches[branch])
            self._lanes[event.invocation_id] = lane
        return lane

    def caller(self, lane: AgentLane) -> AgentLane | None:
        """Return the caller's lane; None for the root, and if the caller has not been seen."""
        return self._lanes.get(lane.parent)

    def room(self, lane: AgentLane) -> int:
        """Return the width in cells of a line in a lane's block."""
        return room(lane.depth, self._width)

    def open(self, lane: AgentLane, words: str = "") -> None:
        """Begin a lane's block, with words about the agent."""
        header = bars(lane.depth)
        style = depth_style(lane.depth)
        header.append("● ", style=style).append(lane.name, style=f"bold {style}")
        header.append(f"  {words}" if words else "", style="dim")
        self._lines.append(truncate_line(header, self._width))
        self._current = lane.invocation_id

    def close(self, lane: AgentLane, mark: str, style: str, words: str) -> None:
        """End a lane's block, with words about its end."""
        self.flush(lane)
        line = bars(lane.depth).append(f"{mark} ", style=style)
        line.append(lane.name, style=f"bold {depth_style(lane.depth)}")
        line.append(f"  {words}" if words else "", style="dim" if mark == "✓" else style)
        self._lines.append(truncate_line(line, self._width))
        self._leave(lane)

    def fail(self, lane: AgentLane, error: error_pb2.AgentError) -> None:
        """End a lane's block with an error."""
        self.flush(lane)
        for piece in self._pieces(
            f"✗ {lane.name}  {self.format_error(error)}", self._width - bars(lane.depth).cell_len
        ):
            self._lines.append(bars(lane.depth).append(piece, style="red"))
        self._leave(lane)

    def _leave(self, lane: AgentLane) -> None:
        # Right below this block the caller can continue without a label; anywhere else the next line needs one.
        self._current = lane.parent if self._current == lane.invocation_id else ""
        lane.has_ended = True

    def write_line(self, lane: AgentLane, text: str, style: str = "") -> None:
        """Write a line into a lane's block, below a label with its branch if another lane wrote last."""
        self._write(lane, clip(text, self.room(lane)), style)

    def write_error(self, lane: AgentLane, text: str, style: str = "red") -> None:
        """Write a text with an error as `write_line` does, but whole: on as many lines of a terminal as it needs."""
        for piece in self._pieces(text, self.room(lane)):
            self._write(lane, piece, style)

    def _write(self, lane: AgentLane, text: str, style: str) -> None:
        if self._current != lane.invocation_id:
            label = bars(lane.depth).append(f"▸ {lane.branch}", style=f"dim {depth_style(lane.depth)}")
            self._lines.append(truncate_line(label, self._width))
            self._current = lane.invocation_id
        line = bars(lane.depth + 1)
        line.append(text, style=style)
        line.rstrip()
        self._lines.append(line)

    def _pieces(self, text: str, width: int) -> list[str]:
        if self._is_pipe:
            return [text]
        wrapper = TextWrapper(max(_NARROWEST, width))
        return [*wrapper.add(text), *wrapper.finish()]

    def format_error(self, error: error_pb2.AgentError) -> str:
        """Return an error as text, without messages that were shown before; its message counts as shown from now on."""
        text = error_text(error, self.shown_errors)
        message = one_line(error.message)
        if message and message not in self.shown_errors:
            self.shown_errors = sorted([*self.shown_errors, message], key=len, reverse=True)
        return text

    def flush(self, lane: AgentLane) -> None:
        """Write a lane's incomplete line."""
        self._print(lane, lane.text.finish())

    def add_text(self, event: AgentEvent, lane: AgentLane, mode: Mode, text: str) -> None:
        """Add a piece of streamed text; a late piece of an earlier attempt is dropped."""
        known = lane.attempts.get(event.step_id)
        if known is not None and event.attempt < known.number:
            return
        if known is None or event.attempt > known.number:
            known = self.begin_again(event, lane)
        if mode != lane.mode or event.step_id != lane.step_id:
            self.flush(lane)
            lane.mode, lane.step_id = mode, event.step_id
        lane.activity = ""
        known.has_text = known.has_text or mode == "text"
        self._print(lane, lane.text.add(text))

    def begin_again(self, event: AgentEvent, lane: AgentLane) -> Attempt:
        """Start the attempt of an event and return it; the text of the step's attempt before is discarded."""
        self._discard(lane, event.step_id)
        lane.attempts[event.step_id] = begun = Attempt(number=event.attempt)
        return begun

    def _print(self, lane: AgentLane, lines: list[str]) -> None:
        for line in lines:
            self.write_line(lane, line, STYLES[lane.mode])
        if lines and lane.mode == "text" and (known := lane.attempts.get(lane.step_id)) is not None:
            known.has_shown = True

    def _discard(self, lane: AgentLane, step_id: str) -> None:
        """Discard the text of a step's lost attempt; lines that are already on the screen get a note."""
        if step_id == lane.step_id:
            lane.text.finish()
        if (lost := lane.attempts.get(step_id)) is not None and lost.has_shown:
            self.write_line(lane, "  the text of this step so far is discarded", "dim yellow")


Handler: TypeAlias = Callable[[AgentBlocks, AgentEvent, AgentLane, float], None]
"""Writes the lines of an event. The last argument is the time in seconds on the viewer's clock."""


Handlers: TypeAlias = Mapping[str, Handler]
"""Handlers by the name of the event's payload."""


def status_lines(lanes: Iterable[AgentLane], now: float, *, width: int) -> list[Text]:
    """Return lines about work in progress: incomplete text, activities, running tools; at most 8, and how many more."""
    lines = [line for lane in lanes if not lane.has_ended for line in _in_progress(lane, now)]
    fitting = [truncate_line(line, width) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        fitting.append(Text(f"… and {len(lines) - _MOST_LINES} more", style="dim"))
    return fitting


def truncate_line(line: Text, width: int) -> Text:
    """Cut a line to a width, in place, and return it."""
    line.truncate(width, overflow="ellipsis")
    return line


def _in_progress(lane: AgentLane, now: float) -> list[Text]:
    lines = []
    if lane.text.pending:
        lines.append(bars(lane.depth + 1).append(lane.text.pending, style=STYLES[lane.mode]))
    elif lane.activity:
        lines.append(bars(lane.depth + 1).append(f"… {lane.name}: {_activity(lane, now)}", style="dim"))
    for tool in lane.tools.values():
        text = f"… {lane.name}: {tool.name} {seconds_text(now - tool.since)}"
        lines.append(bars(lane.depth + 1).append(text, style="dim"))
    return lines


def _activity(lane: AgentLane, now: float) -> str:
    """Describe what an agent waits for: how long it has waited, or how long it still will, if that is known."""
    if now >= lane.until:
        return f"{lane.activity} {seconds_text(now - max(lane.since, lane.until))}"
    reason = f": {lane.reason}" if lane.reason else ""
    return f"{lane.activity} in {seconds_text(lane.until - now)}{reason}"
