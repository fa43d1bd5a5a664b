"""Where a fork starts whose policy does not abort any more, in logs that are hard to come by."""

from collections.abc import Sequence

from bough.v1 import event_pb2, execution_pb2, policy_pb2
from bough_server.runs.fork_point import find_start_under_policy

CONTINUE = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE)
ABORT = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)


def log_of(*events: event_pb2.AgentEvent, policy: policy_pb2.RunPolicy = ABORT) -> Sequence[event_pb2.AgentEvent]:
    """A log that begins with the start of a run."""
    started = event_pb2.AgentEvent(run_started=event_pb2.RunStarted(policy=policy))
    log = [started, *events]
    for number, event in enumerate(log):
        event.sequence, event.invocation_id = number + 1, event.invocation_id or "root"
    return log


def started(key: str, *, parent: str = "root") -> event_pb2.AgentEvent:
    """The start of a sub-agent; its key is its invocation's id as well."""
    made = event_pb2.AgentEvent(effect_key=key, invocation_id=key, parent_invocation_id=parent)
    made.sub_agent_started.SetInParent()
    return made


def failed(key: str, *, parent: str = "root") -> event_pb2.AgentEvent:
    """The end of a sub-agent that failed."""
    made = event_pb2.AgentEvent(effect_key=key, invocation_id=key, parent_invocation_id=parent)
    made.sub_agent_failed.SetInParent()
    return made


def cancelled(scope: str, *, caller: str = "root") -> event_pb2.AgentEvent:
    """A request of an abort."""
    requested = event_pb2.CancelRequested(effect_scope=scope, reason=execution_pb2.CANCEL_REASON_ABORT)
    return event_pb2.AgentEvent(effect_key=scope, invocation_id=caller, cancel_requested=requested)


def aborting() -> list[event_pb2.AgentEvent]:
    """Three sub-agents; the failure of the last, which is not recorded yet, ends the others."""
    return [*map(started, ("e0", "e1", "e2")), cancelled("e0"), cancelled("e1"), failed("e0")]


def test_an_abort_is_under_way_until_its_cause_has_ended() -> None:
    log = log_of(*aborting(), failed("e1"), failed("e2"))
    starts = [find_start_under_policy(log, sequence, CONTINUE) for sequence in range(1, len(log) + 1)]
    assert starts == [1, 2, 3, 4, 4, 4, 4, 4, 9]


def test_a_policy_that_judges_alike_starts_where_it_was_asked_to() -> None:
    assert find_start_under_policy(log_of(*aborting()), 6, ABORT) == 6
    of_a_link = log_of(*aborting(), policy=CONTINUE)
    assert find_start_under_policy(of_a_link, 6, CONTINUE) == find_start_under_policy(of_a_link, 6, ABORT) == 6


def test_the_policy_before_is_that_of_the_last_fork() -> None:
    forked = event_pb2.AgentEvent(run_forked=event_pb2.RunForked(policy=ABORT))
    log = log_of(forked, *aborting(), policy=CONTINUE)
    assert find_start_under_policy(log, 7, CONTINUE) == 5


def test_what_a_caller_left_open_is_no_abort() -> None:
    log = log_of(started("e0"), cancelled("e0"), started("e1"))
    assert find_start_under_policy(log, 4, CONTINUE) == 4


def test_an_abort_that_is_over_at_a_sequence_is_under_way_where_another_begins() -> None:
    below = [started(key, parent="e0") for key in ("e0/e0", "e0/e1")]
    log = log_of(
        started("e0"),
        *below,
        started("e1"),
        cancelled("e0/e0", caller="e0"),
        cancelled("e0"),
        *(failed(one.effect_key, parent="e0") for one in below),
        failed("e0"),
    )
    assert find_start_under_policy(log, len(log), CONTINUE) == 5
