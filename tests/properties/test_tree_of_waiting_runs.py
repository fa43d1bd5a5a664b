"""Laws of the fold where runs wait, are recovered and are forked, and where events are read and then changed."""

from collections.abc import Sequence
from itertools import count

from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import event_pb2, execution_pb2, follow_pb2, invocation_pb2
from bough_server.log.views import Selection
from bough_server.tree.fold import Tree, fold, fold_log
from tests.support.event_strategies import called, gave, request, told_logs, waiting
from tests.support.logs import RUN_ID, SESSION_ID, AgentEvent, desk, numbered, stamped, stored
from tests.support.waiting_run_log import DELEGATE, asking_desk, clerk, lead

FULL = Selection(follow_pb2.EVENT_VIEW_FULL)
EVERYTHING = invocation_pb2.InvocationOptions(max_agents=10_000, max_tools=10_000, include_steps=True)

Log = list[AgentEvent]

WHOLE_TURNS = st.sampled_from((desk(), asking_desk()))


@given(told_logs())
def test_every_prefix_of_any_log_has_a_record(log: Log) -> None:
    tree = Tree(EVERYTHING)
    for length, event in enumerate(log, start=1):
        tree.add(event)
        assert tree.invocation() == fold(log[:length], EVERYTHING)


@given(told_logs())
def test_the_tree_of_the_full_view_is_the_tree_of_the_log(log: Log) -> None:
    shown = [event for one in log if (event := FULL.apply(one)) is not None]
    assert fold(shown, EVERYTHING) == fold(log, EVERYTHING)


@given(told_logs())
def test_what_becomes_of_an_event_after_it_was_read_changes_nothing(log: Log) -> None:
    expected = fold(log, EVERYTHING)
    tree = Tree(EVERYTHING)
    for event in log:
        read = AgentEvent()
        read.CopyFrom(event)
        tree.add(read)
        scramble(read)
    assert tree.invocation() == expected


def scramble(message: Message) -> None:
    """Changes everything that a message holds, in place."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value.clear()
        elif field.message_type is not None:
            for one in value if field.is_repeated else (value,):
                scramble(one)
        elif field.is_repeated:
            del value[:]
        elif isinstance(value, str):
            setattr(message, field.name, "scrambled")
        elif isinstance(value, int):
            setattr(message, field.name, 1)


@given(st.data())
def test_stored_bytes_and_the_stream_make_one_record_of_every_prefix(data: st.DataObject) -> None:
    log = data.draw(turns_with_crashes(data.draw(WHOLE_TURNS)))
    end = data.draw(st.integers(1, len(log)))
    from_bytes = fold_log(stored(log[:end]), run_id=RUN_ID, session_id=SESSION_ID, options=EVERYTHING)
    assert from_bytes == fold(stamped(log[:end]), EVERYTHING)


@st.composite
def turns_with_crashes(draw: st.DrawFn, turn: Log) -> Log:
    """The turn, with the server dying at some places; tools that run there begin again."""
    places = draw(st.sets(st.integers(1, len(turn) - 1), max_size=4))
    attempts: dict[str, AgentEvent] = {}
    log = []
    for place, event in enumerate(turn):
        if place in places:
            log.append(lead(run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_RECOVERY)))
            log += [again(started) for started in attempts.values()]
        log.append(event)
        if event.HasField("tool_started"):
            attempts[event.tool_started.call.call_id] = event
        elif event.HasField("tool_completed"):
            attempts.pop(event.tool_completed.result.call.call_id, None)
    return [sequenced(event, sequence) for sequence, event in enumerate(log, start=1)]


def again(started: AgentEvent) -> AgentEvent:
    """The next attempt of a tool."""
    event = AgentEvent()
    event.CopyFrom(started)
    event.attempt += 1
    event.ClearField("record_time")
    return event


def sequenced(event: AgentEvent, sequence: int) -> AgentEvent:
    """A copy at another place of the log; its time stays."""
    copy = AgentEvent()
    copy.CopyFrom(event)
    copy.sequence = sequence
    return copy


@given(st.data())
def test_crashes_leave_no_trace_in_the_record_of_a_turn(data: st.DataObject) -> None:
    turn = data.draw(WHOLE_TURNS)
    record, expected = fold(data.draw(turns_with_crashes(turn)), EVERYTHING), fold(turn, EVERYTHING)
    for one in (record, expected):
        one.ClearField("as_of_sequence")
        for tool in one.tools:
            tool.ClearField("sequence")
    assert record == expected


@st.composite
def waits(draw: st.DrawFn) -> tuple[Log, set[str]]:
    """A run of a lead and a clerk that asks, is answered and is interrupted at will; and which requests are open."""
    log = [
        lead(run_started=event_pb2.RunStarted(invocation_id="L", agent="lead")),
        lead(tool_started=event_pb2.ToolStarted(call=DELEGATE)),
        clerk(sub_agent_started=event_pb2.SubAgentStarted(call_id="delegate")),
    ]
    numbers, is_open = count(), dict[str, AgentEvent]()
    for _ in range(draw(st.integers(0, 12))):
        what = draw(st.sampled_from(("ask", "answer", "end")))
        if what == "ask" or not is_open:
            speaker, number = draw(st.sampled_from((lead, clerk))), str(next(numbers))
            call_id = draw(st.sampled_from(("", number)))
            event = speaker()
            event.input_requested.request.CopyFrom(request(f"q{number}", call_id, event.invocation_id))
            is_open[f"q{number}"] = event
            log.append(event)
            continue
        request_id = draw(st.sampled_from(sorted(is_open)))
        asked = is_open[request_id]
        call_id = asked.input_requested.request.call_id
        event = lead() if asked.invocation_id == "L" else clerk()
        if what == "answer" or not call_id:
            event.input_received.answer.input_id = request_id
            log.append(event)
        else:
            event.MergeFrom(gave(call_id))
            log.append(event)
        del is_open[request_id]
    return log, set(is_open)


@given(waits())
def test_exactly_those_wait_whose_requests_are_open(drawn: tuple[Log, set[str]]) -> None:
    log, is_open = drawn
    asked = [event.input_requested.request for event in log if event.input_requested.request.input_id in is_open]
    going = fold(numbered(log))
    waits = fold(numbered([*log, with_envelope(waiting(asked))]))
    calls = {(one.invocation_id, one.call_id) for one in asked if one.call_id}
    for record in (going, waits):
        waiting_calls = {(tool.invocation_id, tool.call_id) for tool in record.tools if is_waiting(tool.state)}
        assert waiting_calls == calls
    assert not any(is_waiting(agent.state) for agent in going.agents)
    assert {agent.invocation_id for agent in waits.agents if is_waiting(agent.state)} == {
        one.invocation_id for one in asked
    }
    assert is_waiting(waits.state)
    assert not is_waiting(going.state)


def with_envelope(event: AgentEvent) -> AgentEvent:
    """The event as the root's."""
    placed = lead()
    placed.MergeFrom(event)
    return placed


def is_waiting(state: execution_pb2.ExecutionState.ValueType) -> bool:
    return state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED


@given(st.lists(st.sampled_from("12"), max_size=8), st.integers(0, 2))
def test_a_call_is_counted_once_however_often_it_is_tried(tries: Sequence[str], max_tools: int) -> None:
    log = [with_envelope(called(call_id, attempt)) for attempt, call_id in enumerate(tries, start=1)]
    record = fold(numbered(log), invocation_pb2.InvocationOptions(max_tools=max_tools))
    assert record.tree_usage.tool_calls == record.tools_total == len(set(tries))
