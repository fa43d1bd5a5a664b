"""One agent execution as the live view knows it: who it is, what it is in the middle of; it writes no lines."""

from dataclasses import dataclass, field
from typing import Final, Literal

from rich.text import Text

from bough.v1 import event_pb2
from bough_server.cli.render.amounts import depth_style
from bough_server.cli.render.speech import Speech

Mode = Literal["text", "reasoning"]
STARTING: Final = "starting"
"""What an agent waits for until it does something."""

_DEEPEST: Final = 12
_NARROWEST: Final = 20


@dataclass(slots=True, kw_only=True)
class Speaker:
    """An agent's execution. `activity` is what it waits for, since `since` on the viewer's clock; empty for nothing."""

    invocation_id: str
    parent: str
    name: str
    branch: str
    depth: int
    speech: Speech
    kind: event_pb2.AgentKind.ValueType = event_pb2.AGENT_KIND_UNSPECIFIED
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
    speech: Speech


def speaker_of(event: event_pb2.AgentEvent, *, width: int, number: int) -> Speaker:
    """The speaker of an event; the `number` tells executions of one branch apart, from 1."""
    suffix = f" #{number}" if number > 1 else ""
    return Speaker(
        invocation_id=event.invocation_id,
        parent=event.parent_invocation_id,
        name=(event.agent or "?") + suffix,
        branch=(event.branch or event.agent or "?") + suffix,
        depth=event.depth,
        speech=Speech(room(event.depth, width)),
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
