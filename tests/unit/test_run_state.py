"""The deadline in force of a run, as it follows from its log."""

from bough.v1 import event_pb2
from bough_server.log.run_state import RunStateFold, fold_run_state
from tests.support.logs import AgentEvent, at

STARTED = AgentEvent(run_started=event_pb2.RunStarted(deadline_time=at(10)))
INTERRUPTED = AgentEvent(run_interrupted=event_pb2.RunInterrupted())


def resumed(second: int | None = None) -> AgentEvent:
    return AgentEvent(run_resumed=event_pb2.RunResumed(deadline_time=at(second) if second else None))


def forked(second: int | None = None) -> AgentEvent:
    return AgentEvent(run_forked=event_pb2.RunForked(deadline_time=at(second) if second else None))


def in_force(*log: AgentEvent) -> int | None:
    """The deadline after a log, in seconds."""
    deadline = fold_run_state(log).deadline_ns
    return None if deadline is None else deadline // 10**9


def test_a_run_has_the_deadline_of_the_call_that_started_it() -> None:
    assert in_force(STARTED) == 10
    assert in_force(STARTED, AgentEvent(step_completed=event_pb2.StepCompleted())) == 10
    assert in_force(AgentEvent(run_started=event_pb2.RunStarted())) is None


def test_a_deadline_lapses_at_an_interruption_and_the_call_that_answers_brings_its_own() -> None:
    assert in_force(STARTED, INTERRUPTED) is None
    assert in_force(STARTED, INTERRUPTED, resumed()) is None
    assert in_force(STARTED, INTERRUPTED, resumed(20)) == 20


def test_a_recovery_leaves_the_deadline_in_force() -> None:
    assert in_force(STARTED, resumed()) == 10


def test_a_fork_has_its_callers_deadline_and_never_its_origins() -> None:
    assert in_force(STARTED, forked()) is None
    assert in_force(STARTED, forked(30)) == 30


def test_a_row_says_the_deadline_with_every_change() -> None:
    fold = RunStateFold()
    fold.apply(STARTED)
    assert fold.change() is None
    told = []
    for event in (INTERRUPTED, resumed(20), INTERRUPTED, resumed()):
        fold.apply(event)
        standing = fold.change()
        assert standing is not None
        told.append(standing.deadline_time_ns)
    assert told == [None, 20 * 10**9, None, None]
