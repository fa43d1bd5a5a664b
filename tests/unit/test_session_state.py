"""The values of a session: their texts, their bound, and in which order a log's writes count."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import event_pb2, invocation_pb2, session_pb2
from bough_server.log import events
from bough_server.log.session_state import (
    MAX_STATE_BYTES,
    Write,
    apply_bounded_writes,
    fits,
    is_key,
    is_value,
    json_of,
    values_of,
)
from bough_server.log.session_state_fold import Conflicts, StateFold
from bough_server.tree.fold import fold, fold_log
from tests.support.logs import stored

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)

CONFLICT = invocation_pb2.ANOMALY_KIND_STATE_CONFLICT


def change(key: str, value: object = None) -> session_pb2.SessionStateChange:
    """A change; None deletes."""
    return session_pb2.SessionStateChange(key=key, value_json=None if value is None else json.dumps(value))


def wrote(effect: str, *changes: session_pb2.SessionStateChange) -> event_pb2.AgentEvent:
    """What code wrote."""
    return event_pb2.AgentEvent(
        effect_key=effect, session_state_changed=event_pb2.SessionStateChanged(state_changes=changes)
    )


def began(effect: str) -> event_pb2.AgentEvent:
    """The beginning of a call."""
    return event_pb2.AgentEvent(effect_key=effect, tool_started=event_pb2.ToolStarted())


def called(effect: str, *delta: session_pb2.SessionStateChange) -> event_pb2.AgentEvent:
    """The end of a call that wrote."""
    return event_pb2.AgentEvent(effect_key=effect, tool_completed=event_pb2.ToolCompleted(state_changes=delta))


def folded(*log: event_pb2.AgentEvent) -> dict[str, object]:
    """The values that a log leaves."""
    fold = StateFold()
    for event in log:
        fold.apply(event)
    return {name: json.loads(text) for name, text in fold.values.items()}


def conflicts(*log: event_pb2.AgentEvent) -> list[str]:
    """The names that several gave values at once."""
    found = Conflicts()
    for event in log:
        found.apply(event, events.kind_of(event))
    return found.names()


@given(st.dictionaries(st.text(), _JSON, max_size=5), st.sampled_from([None, 1]))
def test_a_state_is_read_as_the_texts_of_its_values(state: dict[str, object], indent: int | None) -> None:
    read = values_of(json.dumps(state, indent=indent))
    assert {name: json.loads(text) for name, text in read.items()} == state


def test_a_value_stays_the_text_that_it_was_written_as() -> None:
    text = '{ "price" : 1.50 , "big":12345678901234567890.5, "escaped":"\\u00e9" }'
    assert values_of(text) == {"price": "1.50", "big": "12345678901234567890.5", "escaped": '"\\u00e9"'}


def test_a_state_is_written_in_the_order_of_its_names_and_an_empty_one_is_empty_text() -> None:
    assert json_of({"b": "2", "a": "[1.0]"}) == '{"a":[1.0],"b":2}'
    assert json_of({}) == ""
    assert values_of("") == values_of("{}") == values_of(" { } ") == {}


@pytest.mark.parametrize(
    "text", ["[]", "1", "{", '{"a"}', '{"a":}', '{"a":1', '{"a":1,}', "{1:2}", "{} {}", '{"a":1} x', "[" * 100_000]
)
def test_what_is_no_json_object_is_no_state(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting|nested"):
        values_of(text)


@pytest.mark.parametrize("name", ["a", "user.name", "a:b-c_1", "A" * 128])
def test_names_that_a_value_may_have(name: str) -> None:
    assert is_key(name)


@pytest.mark.parametrize("name", ["", "1a", ".a", "a b", "é", "A" * 129, "a\n"])
def test_names_that_no_value_may_have(name: str) -> None:
    assert not is_key(name)


@pytest.mark.parametrize("text", ["1", '"x"', "null", "[1.5]", '{"a":{}}'])
def test_texts_that_a_value_may_be(text: str) -> None:
    assert is_value(text)


@pytest.mark.parametrize("text", ["", "x", "NaN", "1e999", '"\\ud800"', "[" * 100_000, "1" * 5_000, "{} {}"])
def test_texts_that_no_value_may_be(text: str) -> None:
    assert not is_value(text)


def test_a_state_is_as_large_as_its_json() -> None:
    room = MAX_STATE_BYTES - len('{"a":"","é":1}'.encode())
    largest = {"a": json.dumps("x" * room), "é": "1"}
    assert len(json_of(largest).encode()) == MAX_STATE_BYTES
    assert fits(largest)
    assert not fits({**largest, "a": json.dumps("x" * (room + 1))})


def test_a_write_that_makes_the_state_too_large_has_no_effect_and_is_not_taken_in_part() -> None:
    large = ("large", json.dumps("x" * MAX_STATE_BYTES))
    writes: list[Write] = [[("a", "2"), large], [("b", "3")], [("a", None)], [("b", None), ("b", "4")]]
    assert apply_bounded_writes({"a": "1"}, writes) == {"b": "4"}


def test_a_write_may_take_the_place_of_what_it_deletes() -> None:
    half = json.dumps("x" * (MAX_STATE_BYTES * 2 // 3))
    assert apply_bounded_writes({"a": half}, [[("b", half), ("a", None)]]) == {"b": half}


def test_a_state_that_is_too_large_already_may_shrink() -> None:
    large = json.dumps("x" * MAX_STATE_BYTES)
    assert apply_bounded_writes({"a": large, "b": "1"}, [[("c", "1")], [("b", None)]]) == {"a": large}


def test_writes_of_one_lane_count_in_their_order() -> None:
    assert folded(wrote("e9", change("a", 1)), wrote("e1", change("a", 2))) == {"a": 2}


def test_writes_at_once_count_in_the_order_of_calls_and_lanes_whenever_they_came() -> None:
    assert folded(called("s0.t1", change("a", 1)), called("s0.t0", change("a", 0))) == {"a": 1}
    assert folded(wrote("e0.10/e0", change("a", 10)), wrote("e0.9/e0", change("a", 9))) == {"a": 10}
    assert folded(wrote("g1/e0", change("a", 1)), wrote("g0/c0/e0", change("a", 0))) == {"a": 1}


def test_what_follows_lanes_counts_after_all_of_them() -> None:
    log = [wrote("e0.1/e0", change("a", 1)), wrote("e0.0/e0", change("a", 0)), wrote("e1", change("a", 2))]
    assert folded(*log) == {"a": 2}


def test_a_name_that_code_gives_an_effect_makes_no_lane_of_it() -> None:
    assert folded(wrote("t2/e0", change("a", 2)), wrote("t1/e0", change("a", 1))) == {"a": 1}
    assert folded(wrote("2/e0", change("a", 2)), wrote("1/e0", change("a", 1))) == {"a": 1}


def test_calls_of_a_step_between_which_code_writes_count_in_their_order() -> None:
    log = [called("s0.t1", change("a", 1)), wrote("e0", change("a", 2)), called("s0.t0", change("a", 3))]
    assert folded(*log) == {"a": 3}


def test_a_run_begins_with_the_state_of_its_beginning() -> None:
    started = event_pb2.AgentEvent(run_started=event_pb2.RunStarted(state_json='{"a":1,"b":1}'))
    dequeued = event_pb2.AgentEvent(run_dequeued=event_pb2.RunDequeued(state_json='{"b":2}'))
    assert folded(started, wrote("e0", change("a"))) == {"b": 1}
    assert folded(event_pb2.AgentEvent(run_started=event_pb2.RunStarted()), dequeued) == {"b": 2}


def test_an_event_that_says_nothing_of_the_state_is_said_to() -> None:
    fold = StateFold()
    assert not fold.apply(called("s0.t0"))
    assert not fold.apply(event_pb2.AgentEvent(run_started=event_pb2.RunStarted()))
    assert fold.apply(called("s0.t0", change("a", 1)))


@given(
    st.lists(
        st.builds(wrote, st.text(alphabet="egst.0123/9", max_size=20), st.builds(change, st.text(), st.text()))
        | st.builds(
            lambda text: event_pb2.AgentEvent(run_started=event_pb2.RunStarted(state_json=text)),
            st.text() | st.sampled_from(["{", "[]", '{"a":']),
        )
        | st.builds(lambda key: called(key, session_pb2.SessionStateChange(key="a", value_json="no json")), st.text()),
        max_size=6,
    )
)
def test_events_of_any_log_are_folded(log: list[event_pb2.AgentEvent]) -> None:
    fold = StateFold()
    for event in log:
        fold.apply(event)
    assert isinstance(fold.values, dict)
    assert isinstance(conflicts(*log), list)


def test_lanes_nested_as_deep_as_agents_may_be_are_no_trouble() -> None:
    key = "/".join(["s0.t0"] * 2_000)
    assert folded(wrote(f"{key}/e0", change("a", 1)), wrote(f"{key}/e1", change("a", 2))) == {"a": 2}


def test_different_values_of_one_name_at_once_are_a_conflict() -> None:
    assert conflicts(wrote("e0.0/e0", change("a", 1)), wrote("e0.1/e0", change("a", 2))) == ["a"]
    assert conflicts(began("s0.t0"), began("s0.t1"), called("s0.t1", change("a", 1)), called("s0.t0", change("a"))) == [
        "a"
    ]
    assert conflicts(wrote("g0/e0", change("a", 1)), wrote("g1/s0.t0/e0", change("a", 2))) == ["a"]


def test_what_did_not_run_at_once_or_is_the_same_is_no_conflict() -> None:
    assert conflicts(wrote("e0", change("a", 1)), wrote("e1", change("a", 2))) == []
    assert conflicts(wrote("e0.0/e0", change("a", 1)), wrote("e0.1/e0", change("a", 1))) == []
    assert conflicts(wrote("e0.0/e0", change("a", 1)), wrote("e0.1/e0", change("b", 2))) == []
    assert conflicts(wrote("e0.0/e0", change("a", 1)), wrote("e1.1/e0", change("a", 2))) == []


def test_lanes_without_number_or_end_are_bounded() -> None:
    deep = "/".join(["g0"] * 300_000)
    many = [change(f"a{number}", number) for number in range(10)]
    assert conflicts(wrote(deep, *many), wrote("g1", *many)) == []
    assert len(conflicts(wrote("g0", *many), wrote("g1", *many[1:], change("a0", 7)), wrote(deep, *many))) == 1


def test_calls_that_ran_one_after_the_other_are_no_conflict() -> None:
    one_by_one = [began("s0.t0"), called("s0.t0", change("a", 1)), began("s0.t1"), called("s0.t1", change("a", 2))]
    assert conflicts(*one_by_one) == []
    asked = event_pb2.AgentEvent(effect_key="s0.t1.ok", input_requested=event_pb2.InputRequested())
    assert conflicts(asked, *one_by_one) == ["a"]


def test_lanes_of_code_run_at_once_whenever_the_calls_in_them_end() -> None:
    first = [began("e0.0/e0"), called("e0.0/e0", change("a", 1))]
    second = [began("e0.1/e0"), called("e0.1/e0", change("a", 2))]
    assert conflicts(*first, *second) == ["a"]
    one_by_one = [began("e0"), called("e0", change("a", 1)), began("e1"), called("e1", change("a", 2))]
    assert conflicts(*one_by_one) == []
    assert folded(*second, *first) == {"a": 2}


def test_a_failed_tool_writes_nothing() -> None:
    failed = event_pb2.AgentEvent(effect_key="s0.t0", tool_failed=event_pb2.ToolFailed())
    assert folded(wrote("e0", change("a", 1)), failed) == {"a": 1}


def _of_root(event: event_pb2.AgentEvent) -> event_pb2.AgentEvent:
    event.invocation_id = "r"
    return event


def test_a_tree_names_some_of_many_conflicts() -> None:
    log = [wrote(f"g{lane}", *(change(f"a{number:02}", lane) for number in range(20))) for lane in (0, 1)]
    said = [each.message for each in fold(map(_of_root, log)).anomalies if each.kind == CONFLICT]
    assert ("'a00'" in said[0], "'a15'" in said[15], said[16:]) == (True, True, ["So were 4 more."])


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_conflict_is_an_anomaly_of_the_tree(is_ours: bool) -> None:
    started = event_pb2.RunStarted(invocation_id="r", agent="lead", state_json="{")
    lanes = [wrote("e0.1/e0", change("a", 1)), wrote("e0.0/e0", change("a", 2)), wrote("e1", change("b", 1))]
    log = [*map(_of_root, [event_pb2.AgentEvent(run_started=started), *lanes])]
    for sequence, event in enumerate(log, 1):
        event.sequence = sequence
    made = fold_log(stored(log), run_id="x", session_id="y") if is_ours else fold(log)
    said = "The value 'a' of session state was set by several parallel paths; the last in order wins."
    assert list(made.anomalies) == [invocation_pb2.Anomaly(kind=CONFLICT, message=said)]
