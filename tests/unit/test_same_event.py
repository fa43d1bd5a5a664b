"""When two events say the same: measures at any depth apart, and nothing else apart."""

from bough.v1 import event_pb2, message_pb2, step_pb2
from bough_server.engine.event_writer import is_same_event
from tests.support.logs import LOOK, at, desk, result_of


def step_at(second: int, *, text: str = "found") -> event_pb2.AgentEvent:
    """The end of a step whose every measure is of another time, down to a result within a message."""
    result = result_of(LOOK, message_pb2.Part(text=text))
    result.start_time.CopyFrom(at(second))
    result.duration.FromSeconds(second)
    said = message_pb2.Message(create_time=at(second), parts=[message_pb2.Part(tool_result=result)])
    step = step_pb2.AgentStep(
        step_id="s", start_time=at(second), llm_response=step_pb2.LlmResponse(message=said), tool_results=[result]
    )
    step.duration.FromSeconds(second)
    return event_pb2.AgentEvent(
        sequence=second, record_time=at(second), trace_id=f"{second}", step_completed=event_pb2.StepCompleted(step=step)
    )


def test_an_event_made_at_another_time_says_the_same() -> None:
    assert is_same_event(step_at(1), step_at(2))
    for event in desk():
        later = event_pb2.AgentEvent()
        later.CopyFrom(event)
        later.sequence, later.span_id = 1000, "another"
        later.record_time.CopyFrom(at(1000))
        assert is_same_event(event, later)


def test_another_word_in_the_depth_of_an_event_is_another_fact() -> None:
    assert not is_same_event(step_at(1), step_at(1, text="lost"))
    assert not is_same_event(step_at(1), event_pb2.AgentEvent(step_completed=event_pb2.StepCompleted()))


def test_events_that_are_compared_stay_as_they_are() -> None:
    one, other = step_at(1), step_at(2)
    is_same_event(one, other)
    assert (one, other) == (step_at(1), step_at(2))
