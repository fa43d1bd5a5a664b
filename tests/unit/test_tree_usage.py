"""Usage in a record: each invocation's own, the sums above it, and the difference between zero and unknown."""

from bough.v1 import error_pb2, event_pb2, step_pb2, usage_pb2
from bough_server.tree.fold import fold
from tests.support.logs import AgentEvent, desk, failure, tokens


def test_an_invocation_that_has_not_ended_has_used_what_its_events_tell() -> None:
    record = fold(desk()[:-1])
    lead, researcher = record.agents
    assert lead.usage == tokens(25, 3, model_calls=2, tool_calls=1)
    assert researcher.usage == tokens(30, 5, model_calls=2, tool_calls=1)
    assert record.tree_usage == lead.tree_usage == tokens(55, 8, model_calls=4, tool_calls=2)


def test_running_sums_come_to_what_the_ends_say() -> None:
    running = fold([event for event in desk() if not _is_end(event)])
    ended = fold(desk())
    assert [agent.usage for agent in running.agents] == [agent.usage for agent in ended.agents]
    assert running.tree_usage == ended.tree_usage


def _is_end(event: AgentEvent) -> bool:
    return event.HasField("sub_agent_completed") or event.HasField("run_completed")


def test_attempts_that_were_lost_are_counted_with_what_their_provider_said() -> None:
    started = AgentEvent(invocation_id="R", effect_key="s0.m", llm_started=event_pb2.LlmStarted())
    retrying = AgentEvent(
        invocation_id="R", effect_key="s0.m", llm_retrying=event_pb2.LlmRetrying(lost_usage=tokens(7, 1))
    )
    failed = AgentEvent(invocation_id="R", effect_key="s0.m", llm_failed=event_pb2.LlmFailed())
    record = fold([started, retrying, failed])
    assert record.agents[0].usage == tokens(7, 1, model_calls=2, model_calls_without_usage=1)
    assert record.agents[0].step_count == 1


def test_faults_of_attempts_are_counted_by_number_and_numbers_that_no_run_has_are_not() -> None:
    numbers = (3, 0, 3, -1, 64, 2**31 - 1)
    retries = [event_pb2.LlmRetrying(fault_index=number) for number in numbers]
    log = [AgentEvent(invocation_id="R", effect_key="s0.m", llm_retrying=retry) for retry in retries]
    log.append(AgentEvent(invocation_id="R", effect_key="s0.m", llm_failed=event_pb2.LlmFailed(fault_index=0)))
    (agent,) = fold(log).agents
    assert [(fault.index, fault.count) for fault in agent.model_faults] == [(0, 2), (3, 2)]


def test_a_model_call_that_was_refused_counts_nothing() -> None:
    error = failure(error_pb2.ERROR_REASON_LIMIT_EXCEEDED)
    refused = AgentEvent(invocation_id="R", effect_key="s0.m", llm_failed=event_pb2.LlmFailed(error=error))
    assert fold([refused]).agents[0].usage == usage_pb2.Usage()


def test_unknown_is_not_zero() -> None:
    silent = event_pb2.LlmCompleted(response=step_pb2.LlmResponse())
    zero = event_pb2.LlmCompleted(response=step_pb2.LlmResponse(usage=usage_pb2.Usage(output_tokens=0)))
    record = fold(
        [
            AgentEvent(invocation_id="R", llm_completed=silent),
            AgentEvent(invocation_id="c", parent_invocation_id="R", llm_completed=zero),
        ]
    )
    lead, child = record.agents
    assert lead.usage == usage_pb2.Usage(model_calls=1, model_calls_without_usage=1)
    assert child.usage == usage_pb2.Usage(model_calls=1, output_tokens=0)
    assert not lead.usage.HasField("output_tokens")
    assert child.usage.HasField("output_tokens")
    assert lead.tree_usage == usage_pb2.Usage(model_calls=2, model_calls_without_usage=1, output_tokens=0)


def test_a_failed_child_s_usage_is_in_the_tree() -> None:
    ended = event_pb2.SubAgentFailed(usage=tokens(9, 1), tree_usage=tokens(9, 1))
    record = fold(
        [
            AgentEvent(invocation_id="R", agent="r"),
            AgentEvent(invocation_id="c", parent_invocation_id="R", sub_agent_failed=ended),
        ]
    )
    assert [agent.tree_usage for agent in record.agents] == [tokens(9, 1), tokens(9, 1)]
    assert record.agents[0].usage == usage_pb2.Usage()
    assert record.tree_usage == tokens(9, 1)


def test_a_tree_usage_that_an_event_claims_is_not_added_up() -> None:
    ended = event_pb2.RunCompleted(usage=tokens(1, 1), tree_usage=tokens(1_000, 1_000))
    assert fold([AgentEvent(invocation_id="R", run_completed=ended)]).tree_usage == tokens(1, 1)


def test_sums_beyond_their_field_are_the_largest_that_fits() -> None:
    huge = event_pb2.SubAgentCompleted(usage=usage_pb2.Usage(input_tokens=2**63 - 1, model_calls=2**31 - 1))
    record = fold([AgentEvent(invocation_id=one, sub_agent_completed=huge) for one in ("a", "b")])
    assert record.tree_usage == usage_pb2.Usage(input_tokens=2**63 - 1, model_calls=2**31 - 1)
