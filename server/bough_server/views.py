"""Views of a log: FULL, SUMMARY and event masks, applied to one event at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import event_pb2, follow_pb2
from bough_server import events
from bough_server.documents import nearest
from bough_server.events import AgentEvent

_NAMES: Final = frozenset(events.NAME_OF_KIND.values())
_GROUPS: Final = frozenset(f"{name[:end]}.*" for name in _NAMES for end, sign in enumerate(name) if sign == ".")
_SUB_AGENT_KINDS: Final = frozenset(
    kind for kind, name in events.NAME_OF_KIND.items() if name.startswith("agent.sub_agent.")
)
_RUN_KINDS: Final = frozenset(kind for kind, name in events.NAME_OF_KIND.items() if name.startswith("agent.run."))
_INPUT_KINDS: Final = frozenset({events.INPUT_REQUESTED, events.INPUT_RECEIVED})
_MOVES: Final = frozenset({events.AGENT_TRANSFERRED})

_OF_ANY_DEPTH: Final = _SUB_AGENT_KINDS | _INPUT_KINDS | _RUN_KINDS | _MOVES
"""Events that SUMMARY shows of every agent: a client that answers requests need not follow the full view."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A view and an event mask, both pure functions of one event.

    `event_names` are dotted names, names of payload fields, or groups such as "agent.llm.*"; empty means all. They are
    names as the view shows them, so in SUMMARY a sub-agent's text is "agent.sub_agent.partial". Run events are always
    shown.
    """

    view: follow_pb2.EventView.ValueType = follow_pb2.EVENT_VIEW_UNSPECIFIED
    event_names: Sequence[str] = ()
    _shown: frozenset[int] | None = field(init=False, repr=False, compare=False)
    """The kinds that pass the mask; None for all, including those that this reader does not know."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "event_names", tuple(self.event_names))
        object.__setattr__(self, "_shown", _kinds(self.event_names) if self.event_names else None)

    @property
    def takes_all(self) -> bool:
        """True if every event passes unchanged, so that stored bytes need no parsing."""
        return self._shown is None and not self._is_summary

    @property
    def _is_summary(self) -> bool:
        return self.view == follow_pb2.EVENT_VIEW_SUMMARY

    def takes_kind(self, kind: int) -> bool:
        """Return whether an event of this kind may be shown; if not, it need not be parsed."""
        if self._shown is None or kind in self._shown:
            return True
        return self._is_summary and kind == events.LLM_OUTPUT_TEXT_DELTA and events.SUB_AGENT_PARTIAL in self._shown

    def apply(self, event: AgentEvent) -> AgentEvent | None:
        """Return the event as the view shows it, at the same sequence, or None. The given event is not changed."""
        kind = events.kind_of(event)
        if self._is_summary and event.parent_invocation_id:
            if kind == events.LLM_OUTPUT_TEXT_DELTA:
                return self._masked(events.SUB_AGENT_PARTIAL, lambda: _partial(event))
            if kind not in _OF_ANY_DEPTH:
                return None
        return self._masked(kind, lambda: event)

    def _masked(self, kind: int, shown: Callable[[], AgentEvent]) -> AgentEvent | None:
        return shown() if self._shown is None or kind in self._shown else None


def unknown_name(name: str) -> str | None:
    """Return a sentence with the closest name if no event matches a name or group, else None."""
    known = _GROUPS if name.endswith(".*") else _NAMES | events.KIND_OF_FIELD.keys()
    return None if name in known else f"There is no event {name!r}. {nearest(name, known)}".rstrip()


def _partial(event: AgentEvent) -> AgentEvent:
    """Return a sub-agent's delta as a partial; the rest of the envelope is kept."""
    partial = AgentEvent()
    partial.CopyFrom(event)
    partial.sub_agent_partial.CopyFrom(event_pb2.SubAgentPartial(text=event.llm_output_text_delta.text))
    return partial


def _kinds(event_names: Sequence[str]) -> frozenset[int]:
    exact = frozenset(event_names)
    groups = tuple(name.removesuffix("*") for name in event_names if name.endswith(".*"))
    matching = {kind for kind, name in events.NAME_OF_KIND.items() if name in exact or name.startswith(groups)}
    matching |= {kind for field, kind in events.KIND_OF_FIELD.items() if field in exact}
    return frozenset(matching | _RUN_KINDS)
