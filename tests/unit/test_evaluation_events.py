"""Events of evaluations: their kinds and their bytes."""

from bough_server.log import evaluation_events, events
from bough_server.log.evaluation_events import EvaluationEvent


def test_a_kind_says_which_message_an_event_is() -> None:
    assert sorted(evaluation_events.KIND_OF_FIELD.values()) == list(range(200, 212))
    assert not set(evaluation_events.KIND_OF_FIELD.values()) & set(events.KIND_OF_FIELD.values())


def test_the_stamp_is_what_the_stored_bytes_leave_out() -> None:
    event = EvaluationEvent(sequence=7)
    event.case_trial_started.case_id = "one"
    stored = event.SerializeToString(deterministic=True)
    event.evaluation_id = "01890000-0000-7000-a000-000000000001"
    assert evaluation_events.parse(evaluation_events.stamp(event.evaluation_id) + stored) == event
    assert evaluation_events.kind_of(event) == evaluation_events.KIND_OF_FIELD["case_trial_started"]
    assert evaluation_events.kind_of(EvaluationEvent()) == 0
