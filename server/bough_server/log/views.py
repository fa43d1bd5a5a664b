"""Views of a log: FULL, SUMMARY, event masks, and evaluations without trees, applied to one event at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import eval_result_pb2, event_pb2, follow_pb2
from bough_server.documents.yaml import nearest
from bough_server.log import evaluation_events, events
from bough_server.log.events import AgentEvent

_SUB_AGENT_KINDS: Final = frozenset(
    kind for kind, name in events.NAME_OF_KIND.items() if name.startswith("agent.sub_agent.")
)
_RUN_KINDS: Final = frozenset(kind for kind, name in events.NAME_OF_KIND.items() if name.startswith("agent.run."))
_INPUT_KINDS: Final = frozenset({events.INPUT_REQUESTED, events.INPUT_RECEIVED})
_MOVES: Final = frozenset({events.AGENT_TRANSFERRED})

_OF_ANY_DEPTH: Final = _SUB_AGENT_KINDS | _INPUT_KINDS | _RUN_KINDS | _MOVES
"""Events that SUMMARY shows of every agent: a client that answers requests need not follow the full view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNames:
    """The names of the events of a log: dotted ones, those of payload fields, and groups such as "agent.llm.*"."""

    name_of_kind: Mapping[int, str]
    kind_of_field: Mapping[str, int]
    always: frozenset[int]
    """The kinds that no mask hides."""

    def kinds(self, names: Sequence[str]) -> frozenset[int]:
        """Return the kinds that pass a mask of these names."""
        groups = tuple(name.removesuffix("*") for name in names if name.endswith(".*"))
        matching = {kind for kind, name in self.name_of_kind.items() if name in names or name.startswith(groups)}
        matching |= {kind for field, kind in self.kind_of_field.items() if field in names}
        return frozenset(matching | self.always)

    def problem(self, name: str) -> str | None:
        """Return a sentence with the closest name if no event matches a name or group, else None."""
        names = frozenset(self.name_of_kind.values())
        groups = {f"{name[:end]}.*" for name in names for end, sign in enumerate(name) if sign == "."}
        known = groups if name.endswith(".*") else names | self.kind_of_field.keys()
        return None if name in known else f"There is no event {name!r}. {nearest(name, known)}".rstrip()


RUN_EVENT_NAMES: Final = EventNames(
    name_of_kind=events.NAME_OF_KIND, kind_of_field=events.KIND_OF_FIELD, always=_RUN_KINDS
)
EVALUATION_EVENT_NAMES: Final = EventNames(
    name_of_kind=evaluation_events.NAME_OF_KIND,
    kind_of_field=evaluation_events.KIND_OF_FIELD,
    always=evaluation_events.TERMINAL_KINDS | {evaluation_events.EVALUATION_TOTALED},
)


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
        shown = RUN_EVENT_NAMES.kinds(self.event_names) if self.event_names else None
        object.__setattr__(self, "_shown", shown)

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
                return self._apply_mask(events.SUB_AGENT_PARTIAL, lambda: _partial(event))
            if kind not in _OF_ANY_DEPTH:
                return None
        return self._apply_mask(kind, lambda: event)

    def show(self, stamped: bytes) -> bytes | None:
        """Return the bytes of an event as the view shows it, or None."""
        event = self.apply(events.parse(stamped))
        return None if event is None else event.SerializeToString()

    def _apply_mask(self, kind: int, shown: Callable[[], AgentEvent]) -> AgentEvent | None:
        return shown() if self._shown is None or kind in self._shown else None


def _partial(event: AgentEvent) -> AgentEvent:
    """Return a sub-agent's delta as a partial; the rest of the envelope is kept."""
    partial = AgentEvent()
    partial.CopyFrom(event)
    partial.sub_agent_partial.CopyFrom(event_pb2.SubAgentPartial(text=event.llm_output_text_delta.text))
    return partial


@dataclass(frozen=True, slots=True)
class EvaluationSelection:
    """An event mask of an evaluation's log, and whether its results are shown without what makes them large."""

    event_names: tuple[str, ...] = ()
    without_trees: bool = False
    _shown: frozenset[int] | None = field(init=False, repr=False, compare=False)
    """The kinds that pass the mask; None for all, including those that this reader does not know."""

    def __post_init__(self) -> None:
        shown = EVALUATION_EVENT_NAMES.kinds(self.event_names) if self.event_names else None
        object.__setattr__(self, "_shown", shown)

    @property
    def takes_all(self) -> bool:
        """True if every event passes unchanged, so that stored bytes need no parsing."""
        return self._shown is None and not self.without_trees

    def takes_kind(self, kind: int) -> bool:
        """Return whether an event of this kind is shown."""
        return self._shown is None or kind in self._shown

    def show(self, stamped: bytes) -> bytes | None:
        """Return the bytes of an event whose kind is shown."""
        if not self.without_trees:
            return stamped
        event = evaluation_events.parse(stamped)
        if not event.HasField("case_trial_scored"):
            return stamped
        _remove_trees(event.case_trial_scored.result)
        return event.SerializeToString()


def _remove_trees(result: eval_result_pb2.CaseTrialResult) -> None:
    """Remove agents, calls, what was said, and the details of scores."""
    for turn in result.turns:
        turn.truncated = turn.truncated or bool(turn.agents or turn.answer or turn.user)
        for name in ("agents", "answer", "user"):
            turn.ClearField(name)
    for score in result.scores:
        score.ClearField("tree_comparisons")
        score.ClearField("judgments")
