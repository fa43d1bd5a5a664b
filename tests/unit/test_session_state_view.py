"""What code sees of a session's values: how much it may write, how deep, and what it never wrote for other lanes."""

import json
from time import thread_time

import pytest

from bough.v1 import session_pb2
from bough_server.errors import RunError
from bough_server.log.session_state import MAX_DEPTH, MAX_STATE_BYTES, is_value, json_of, values_of
from bough_server.runtime.state import LaneState, StateView


def nested(depth: int) -> object:
    """Lists in lists."""
    made: object = "["
    for _ in range(depth):
        made = [made]
    return made


def test_a_value_is_as_deep_as_it_can_be_read_from_any_stack() -> None:
    view = StateView(LaneState({}))
    view["deep"] = nested(MAX_DEPTH)
    assert view["deep"] == nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(RunError, match="deep"):
            view["deep"] = nested(depth)
    assert is_value(json.dumps(nested(MAX_DEPTH)))
    assert is_value(json.dumps([{"a": '"[{' * MAX_DEPTH}, "\\" * MAX_DEPTH, *[[]] * MAX_DEPTH]))
    assert not is_value(json.dumps(nested(MAX_DEPTH + 1)))
    assert not is_value('{"a":' * 900 + "1" + "}" * 900)


def test_a_number_is_one_that_a_double_can_hold() -> None:
    view = StateView(LaneState({}))
    view["large"] = 10**308
    with pytest.raises(RunError, match="double"):
        view["large"] = [10**309]
    assert (is_value("1" + "0" * 308), is_value("1" + "0" * 309), is_value(f'"{"1" * 400}"')) == (True, False, True)


def test_a_value_written_and_deleted_before_it_was_sent_is_no_change() -> None:
    view = StateView(LaneState(values_of('{"old":1}')))
    for number in range(1000):
        view[f"k{number}"] = number
        del view[f"k{number}"]
    del view["old"]
    assert view.take_changes() == [session_pb2.SessionStateChange(key="old")]


def test_a_state_is_as_large_as_it_may_be_to_the_byte_however_it_came_to_be() -> None:
    state = LaneState({})
    view = StateView(state)
    for text in ("x" * 1000, "y", "x" * 100_000):
        view["a"], view["é".encode().hex()] = text, text
        del view["a"]
        state.apply(view.take_changes())
    view["b"] = "z"
    left = MAX_STATE_BYTES - len(json_of({**state.values, "b": '"z"'}))
    view["b"] = "z" * (left + 1)
    with pytest.raises(RunError, match="larger"):
        view["b"] = "z" * (left + 2)
    state.apply(view.take_changes())
    assert len(json_of(state.values)) == MAX_STATE_BYTES
    with pytest.raises(RunError, match="larger"):
        view["c"] = 1
    view.clear()
    assert (len(view), len(view.take_changes())) == (0, 2)


def test_many_small_values_take_no_longer_each_than_few() -> None:
    view = StateView(LaneState({}))
    began = thread_time()
    for number in range(8000):
        view[f"k{number}"] = number
    view.clear()
    assert thread_time() - began < 5, "it was minutes when each write counted all of them"
