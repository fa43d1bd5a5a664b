"""The tree that events make: the rules and cases of the design, and events from other systems."""

from collections.abc import Iterable

from bough.v1 import error_pb2, event_pb2, execution_pb2, invocation_pb2, usage_pb2
from bough_server.tree.fold import Tree, fold
from tests.support.logs import (
    AgentEvent,
    desk,
    failure,
    numbered,
    says,
    shape,
)

COMPLETED = event_pb2.RunCompleted()
MISSING_PARENT, PARENT_CYCLE = invocation_pb2.ANOMALY_KIND_MISSING_PARENT, invocation_pb2.ANOMALY_KIND_PARENT_CYCLE
NO_END, REPEATED = invocation_pb2.ANOMALY_KIND_NO_END, invocation_pb2.ANOMALY_KIND_REPEATED


def said(invocation_id: str, parent: str = "", branch: str = "", agent: str = "") -> AgentEvent:
    """Any event that tells nothing but where it stands."""
    return AgentEvent(
        invocation_id=invocation_id,
        parent_invocation_id=parent,
        branch=branch,
        agent=agent,
        llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="hm"),
    )


def ends(invocation_id: str) -> AgentEvent:
    """The end of the run."""
    return AgentEvent(invocation_id=invocation_id, run_completed=COMPLETED)


def noted(anomalies: Iterable[invocation_pb2.Anomaly]) -> list[tuple[int, str, str]]:
    """Each as its kind, its sentence and the invocation that it names."""
    return [(each.kind, each.message, each.invocation_id) for each in anomalies]


def tree_of(*told: AgentEvent) -> invocation_pb2.Invocation:
    return fold(numbered(told))


def test_children_and_orphans_are_ordered_by_first_appearance_and_the_main_root_is_first() -> None:
    record = tree_of(
        said("b", "root", "R/childB"),
        said("root", "", "R"),
        said("a", "root", "R/childA"),
        said("grand", "a", "R/childA/grand"),
        said("orphan", "missing", "orphanAgent"),
        ends("root"),
    )
    assert shape(record) == [
        (0, "root", "R"),
        (1, "b", "childB"),
        (1, "a", "childA"),
        (2, "grand", "grand"),
        (0, "orphan", "orphanAgent"),
    ]
    assert (record.invocation_id, record.agent, record.agents_total) == ("root", "R", 5)
    assert record.agents[4].parent_invocation_id == "missing"
    assert noted(record.agents[4].anomalies)[1:] == [(MISSING_PARENT, "Its parent is not among the events.", "orphan")]
    many = "Invocations whose parent is not among the events: 1."
    assert noted(record.anomalies) == [(MISSING_PARENT, many, "")]


def test_one_name_with_two_executions_is_two_nodes() -> None:
    record = tree_of(said("c1", "R", "r/x"), said("c2", "R", "r/x"), said("c1", "R"), said("R", "", "r"), ends("R"))
    assert shape(record) == [(0, "R", "r"), (1, "c1", "x"), (1, "c2", "x")]


def test_a_cycle_of_parents_is_listed_last_and_flagged() -> None:
    record = tree_of(said("A", "B", "a"), said("B", "A", "b"), ends("R"))
    assert shape(record) == [(0, "R", ""), (0, "A", "a"), (0, "B", "b")]
    cycle = "Its chain of parents leads back to itself."
    no_end = "It has no end, although the run has ended."
    assert [noted(agent.anomalies) for agent in record.agents] == [
        [],
        [(NO_END, no_end, "A"), (PARENT_CYCLE, cycle, "A")],
        [(NO_END, no_end, "B"), (PARENT_CYCLE, cycle, "B")],
    ]
    many = "Invocations whose chain of parents leads back to themselves: 2."
    assert noted(record.anomalies) == [(PARENT_CYCLE, many, "")]


def test_what_hangs_below_a_cycle_stays_below_it() -> None:
    record = tree_of(said("x", "A", "x"), said("A", "A", "a"), ends("R"))
    assert shape(record) == [(0, "R", ""), (0, "A", "a"), (1, "x", "x")]
    assert [agent.child_count for agent in record.agents] == [0, 1, 0]


def test_a_parent_that_is_named_later_counts() -> None:
    record = tree_of(said("B", "", "b"), said("B", "A", "b"), said("A", "", "a"), ends("A"))
    assert shape(record) == [(0, "A", "a"), (1, "B", "b")]


def test_a_name_without_a_branch_is_the_first_author_that_is_an_agent() -> None:
    record = tree_of(said("X", agent="user"), said("X", agent="bot"), said("X", agent="other"), ends("R"))
    assert shape(record) == [(0, "R", ""), (0, "X", "bot")]


def test_a_name_is_the_last_segment_of_the_branch_that_is_not_empty() -> None:
    assert shape(tree_of(said("R", branch="a//b/"), ends("R"))) == [(0, "R", "b")]


def test_an_event_without_an_invocation_makes_no_node() -> None:
    assert shape(tree_of(said("", branch="ghost"), said("R", agent="r"), ends("R"))) == [(0, "R", "r")]


def test_an_error_in_a_child_marks_the_child_and_keeps_the_tree() -> None:
    error = failure(error_pb2.ERROR_REASON_MODEL_UNAVAILABLE)
    broken = AgentEvent(invocation_id="c", step_failed=event_pb2.StepFailed(error=error))
    record = tree_of(said("R", agent="r"), said("c", "R", "r/c"), broken, said("d", "R", "r/d"), ends("R"))
    assert shape(record) == [(0, "R", "r"), (1, "c", "c"), (1, "d", "d")]
    assert record.agents[1].state == execution_pb2.EXECUTION_STATE_FAILED
    assert record.agents[1].error == error
    assert record.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


def test_a_model_error_that_was_followed_by_another_call_marks_no_agent() -> None:
    error = failure(error_pb2.ERROR_REASON_MODEL_UNAVAILABLE)
    record = tree_of(
        AgentEvent(invocation_id="R", llm_failed=event_pb2.LlmFailed(error=error)),
        AgentEvent(invocation_id="R", llm_started=event_pb2.LlmStarted()),
        AgentEvent(run_cancelled=event_pb2.RunCancelled()),
    )
    assert record.agents[0].state == execution_pb2.EXECUTION_STATE_UNSPECIFIED
    assert not record.agents[0].HasField("error")


def test_an_agent_called_as_a_tool_is_in_the_tree_with_its_tools_and_children() -> None:
    log = [*desk()[:-8], *_grandchild(), *desk()[-8:]]
    record = tree_of(*log)
    assert shape(record) == [(0, "L", "lead"), (1, "C", "researcher"), (2, "G", "helper")]
    assert [(tool.agent, tool.name, tool.child_invocation_id) for tool in record.tools] == [
        ("lead", "call_researcher", "C"),
        ("researcher", "search", ""),
    ]


def _grandchild() -> Iterable[AgentEvent]:
    place = AgentEvent(invocation_id="G", parent_invocation_id="C", agent="helper", branch="lead/researcher/helper")
    for payload in (
        AgentEvent(sub_agent_started=event_pb2.SubAgentStarted(trigger=execution_pb2.INVOCATION_TRIGGER_WORKFLOW)),
        AgentEvent(sub_agent_completed=event_pb2.SubAgentCompleted()),
    ):
        payload.MergeFrom(place)
        yield payload


def test_composites_that_said_nothing_are_nodes_with_their_children_below() -> None:
    def starts(invocation_id: str, parent: str, agent: str, kind: execution_pb2.AgentKind.ValueType) -> AgentEvent:
        return AgentEvent(
            invocation_id=invocation_id,
            parent_invocation_id=parent,
            agent=agent,
            sub_agent_started=event_pb2.SubAgentStarted(kind=kind),
        )

    record = tree_of(
        AgentEvent(
            invocation_id="R", run_started=event_pb2.RunStarted(agent="outer", kind=execution_pb2.AGENT_KIND_SEQUENCE)
        ),
        starts("p", "R", "inner", execution_pb2.AGENT_KIND_PARALLEL),
        starts("x", "p", "left", execution_pb2.AGENT_KIND_LLM),
        starts("y", "p", "right", execution_pb2.AGENT_KIND_LLM),
        said("x", "p"),
        said("y", "p"),
        ends("R"),
    )
    assert shape(record) == [(0, "R", "outer"), (1, "p", "inner"), (2, "x", "left"), (2, "y", "right")]
    assert record.agents[1].kind == execution_pb2.AGENT_KIND_PARALLEL


def test_nodes_of_a_graph_are_no_agents() -> None:
    record = tree_of(
        AgentEvent(
            invocation_id="R",
            agent="flow",
            run_started=event_pb2.RunStarted(agent="flow", kind=execution_pb2.AGENT_KIND_GRAPH),
        ),
        AgentEvent(invocation_id="R", agent="graph-pregel"),
        AgentEvent(invocation_id="R", agent="graph-node"),
        said("c", "R", agent="worker"),
        AgentEvent(invocation_id="R", agent="graph-executor"),
        ends("R"),
    )
    assert shape(record) == [(0, "R", "flow"), (1, "c", "worker")]


def test_a_start_is_the_authority_for_name_and_parent_wherever_it_comes() -> None:
    start = AgentEvent(
        invocation_id="c", parent_invocation_id="R", agent="real", sub_agent_started=event_pb2.SubAgentStarted()
    )
    record = tree_of(said("x"), said("c", "x", "r/guess", "guess"), start, said("R"), ends("R"))
    assert shape(record) == [(0, "R", ""), (1, "c", "real"), (0, "x", "")]


def test_sequences_that_do_not_rise_are_an_anomaly_and_no_error() -> None:
    log = [AgentEvent(invocation_id="R", sequence=sequence) for sequence in (5, 3, 5, 6)]
    record = fold(log)
    expected = (invocation_pb2.ANOMALY_KIND_SEQUENCE_NOT_RISING, "Sequences that do not rise: 2.", "")
    assert (record.as_of_sequence, noted(record.anomalies)) == (6, [expected])


def test_events_without_sequences_are_read_in_order_of_arrival() -> None:
    record = fold([said("R", agent="r"), said("c", "R", agent="c"), ends("R")])
    assert shape(record) == [(0, "R", "r"), (1, "c", "c")]
    assert (record.as_of_sequence, list(record.anomalies)) == (0, [])


def test_events_of_more_than_one_run_are_an_anomaly() -> None:
    record = fold([AgentEvent(run_id=run_id, invocation_id=run_id) for run_id in ("one", "two", "two")])
    expected = (invocation_pb2.ANOMALY_KIND_SEVERAL_RUNS, "The events are of more than one run.", "")
    assert (record.run_id, noted(record.anomalies)) == ("one", [expected])
    assert shape(record) == [(0, "one", ""), (0, "two", "")]


def test_starts_and_ends_that_come_twice_count_once() -> None:
    record = fold([*desk(), desk()[0], desk()[-1]])
    assert noted(record.agents[0].anomalies) == [
        (REPEATED, "It began more than once.", "L"),
        (REPEATED, "It ended more than once.", "L"),
    ]
    assert noted(record.anomalies[:2]) == [
        (REPEATED, "The run began more than once.", ""),
        (REPEATED, "The run ended more than once.", ""),
    ]
    assert record.agents[0].output == says("One.")


def test_an_unknown_payload_counts_for_its_invocation() -> None:
    unknown = AgentEvent.FromString(AgentEvent(invocation_id="x", agent="later").SerializeToString() + b"\xca\x08\x00")
    assert unknown.WhichOneof("payload") is None
    assert shape(fold([unknown])) == [(0, "x", "later")]


def test_no_events_make_an_empty_record() -> None:
    assert fold([]) == invocation_pb2.Invocation(tree_usage=usage_pb2.Usage())


def test_a_fold_in_progress_gives_the_same_as_a_fold_of_what_it_has_seen() -> None:
    tree = Tree()
    for count, event in enumerate(desk(), start=1):
        tree.add(event)
        assert tree.invocation() == fold(desk()[:count])


def test_a_chain_of_20_000_agents_is_folded() -> None:
    depth = 20_000
    log = [said(str(number), str(number - 1) if number else "", agent="a") for number in range(depth)]
    record = fold([*log, ends("0")], invocation_pb2.InvocationOptions(max_agents=2_000))
    assert record.agents_total == depth
    assert [agent.depth for agent in record.agents] == list(range(2_000))


def test_a_ring_of_20_000_agents_is_folded() -> None:
    size = 20_000
    log = [said(str(number), str((number + 1) % size)) for number in range(size)]
    record = fold([*log, ends("R")], invocation_pb2.InvocationOptions(max_agents=2))
    assert shape(record) == [(0, "R", ""), (0, "0", "")]
    assert record.agents_total == size + 1
