"""Laws of a session's values: what a run sees at its end is what its log says, however its lanes took turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import event_pb2, session_pb2
from bough_server.log.session_state_fold import StateFold
from bough_server.runtime.state import LaneState

Plan: TypeAlias = "Sequence[Write | Lanes | Calls | Child]"
Lane: TypeAlias = Iterator[event_pb2.AgentEvent]


@dataclass(frozen=True)
class Write:
    """Code that writes; None deletes."""

    name: str
    value: int | None

    def change(self) -> session_pb2.SessionStateChange:
        text = None if self.value is None else str(self.value)
        return session_pb2.SessionStateChange(key=self.name, value_json=text)


@dataclass(frozen=True)
class Lanes:
    """Lanes of code at once; as many end their part of the run in the middle as are cut off."""

    plans: Sequence[Plan]
    is_cut_off: bool


@dataclass(frozen=True)
class Calls:
    """Calls of a step, at once or one by one: of agents, which may write, and of tools, which write at their ends."""

    plans: Sequence[tuple[Plan, Sequence[Write]]]
    is_parallel: bool


@dataclass(frozen=True)
class Child:
    """An agent that goes on in its caller's lane."""

    plan: Plan


_WRITES = st.builds(Write, st.sampled_from("abc"), st.none() | st.integers(0, 9))
PLANS = st.recursive(
    st.lists(_WRITES, max_size=3),
    lambda plans: st.lists(
        _WRITES
        | st.builds(Lanes, st.lists(plans, min_size=1, max_size=3), st.booleans())
        | st.builds(
            Calls,
            st.lists(st.tuples(plans, st.lists(_WRITES, max_size=2)), min_size=1, max_size=3),
            st.booleans(),
        )
        | st.builds(Child, plans),
        max_size=4,
    ),
    max_leaves=12,
)


class Run:
    """A run of plans whose lanes take turns at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def lane(self, plan: Plan, scope: str, state: LaneState) -> Lane:
        """What a lane records, as it goes."""
        for number, does in enumerate(plan):
            match does:
                case Write():
                    yield self._written(f"{scope}e{number}", [does], state)
                case Child():
                    yield from self.lane(does.plan, f"{scope}e{number}/", state)
                    state.join()
                case Lanes():
                    yield from self._lanes(does, f"{scope}e{number}.", state)
                case Calls():
                    yield from self._calls(does, f"{scope}s{number}.t", state)

    def _written(self, key: str, writes: Sequence[Write], state: LaneState) -> event_pb2.AgentEvent:
        changes = [write.change() for write in writes]
        state.apply(changes)
        if ".t" in key.rpartition("/")[2]:
            return event_pb2.AgentEvent(effect_key=key, tool_completed=event_pb2.ToolCompleted(state_changes=changes))
        return event_pb2.AgentEvent(
            effect_key=key, session_state_changed=event_pb2.SessionStateChanged(state_changes=changes)
        )

    def _lanes(self, lanes: Lanes, group: str, state: LaneState) -> Lane:
        made = [self.lane(plan, f"{group}{place}/", state.fork(group, place)) for place, plan in enumerate(lanes.plans)]
        yield from self._turns(made, stops=lanes.is_cut_off)
        state.join()

    def _calls(self, calls: Calls, group: str, state: LaneState) -> Lane:
        if calls.is_parallel:
            made = [self._call(calls, group, place, state.fork(group, place)) for place in range(len(calls.plans))]
            yield from self._turns(made, stops=False)
        for place in range(0 if calls.is_parallel else len(calls.plans)):
            state.join()
            yield from self._call(calls, group, place, state.fork(group, place))
        state.join()

    def _call(self, calls: Calls, group: str, place: int, state: LaneState) -> Lane:
        plan, delta = calls.plans[place]
        yield from self.lane(plan, f"{group}{place}/", state)
        state.join()
        if delta:
            yield self._written(f"{group}{place}", delta, state)

    def _turns(self, lanes: list[Lane], *, stops: bool) -> Lane:
        """Lanes at once; where it stops, some of them are left in the middle, whatever is open below them."""
        while lanes and not (stops and self._random.random() < 0.1):
            lane = self._random.choice(lanes)
            event = next(lane, None)
            if event is None:
                lanes.remove(lane)
            else:
                yield event


def _end(plan: Plan, random: Random) -> tuple[dict[str, str], dict[str, str]]:
    """What a run sees at its end, and what its log says."""
    state, fold = LaneState({"a": "0"}), StateFold()
    fold.apply(event_pb2.AgentEvent(run_started=event_pb2.RunStarted(state_json='{"a":0}')))
    for event in Run(random).lane(plan, "", state):
        fold.apply(event)
        assert fold.values is fold.values, "what is known of a log is kept"
    return state.values, fold.values


def _never_cut_off(plan: Plan) -> bool:
    for does in plan:
        if isinstance(does, Lanes) and (does.is_cut_off or not all(map(_never_cut_off, does.plans))):
            return False
        if isinstance(does, Calls) and not all(_never_cut_off(one) for one, _ in does.plans):
            return False
        if isinstance(does, Child) and not _never_cut_off(does.plan):
            return False
    return True


@given(PLANS, st.randoms(use_true_random=False))
def test_a_run_sees_at_its_end_what_its_log_says(plan: Plan, random: Random) -> None:
    seen, said = _end(plan, random)
    assert seen == said


@given(PLANS.filter(_never_cut_off), st.randoms(use_true_random=False), st.randoms(use_true_random=False))
def test_how_lanes_take_turns_changes_nothing(plan: Plan, one: Random, other: Random) -> None:
    assert _end(plan, one) == _end(plan, other)


@given(PLANS, st.randoms(use_true_random=False))
def test_a_fold_that_is_asked_all_the_time_says_what_one_says_that_is_asked_once(plan: Plan, random: Random) -> None:
    log = list(Run(random).lane(plan, "", LaneState({})))
    asked, silent = StateFold(), StateFold()
    for event in log:
        asked.apply(event)
        _ = asked.values
        silent.apply(event)
    assert asked.values == silent.values
