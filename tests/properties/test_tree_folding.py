"""Laws of the fold: for any events in any order, no agent is lost and everything is counted once."""

import json
from collections.abc import Sequence

from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.v1 import invocation_pb2, message_pb2
from bough_server.tree.fold import fold, fold_log
from tests.support.event_strategies import IDS, TOLD, Story, interleavings, stories, told_logs
from tests.support.logs import AgentEvent, desk, stored
from tests.support.usages import summed

EVERYTHING = invocation_pb2.InvocationOptions(max_agents=10_000, max_tools=10_000, include_steps=True)


def links(record: invocation_pb2.Invocation) -> dict[str, str]:
    return {agent.invocation_id: agent.parent_invocation_id for agent in record.agents}


def first_appearances(log: Sequence[AgentEvent]) -> list[str]:
    return list(dict.fromkeys(event.invocation_id for event in log if event.invocation_id))


def says_nothing_of_the_run(story: Story) -> bool:
    """Whether no event says where the run begins or ends, which the first to come would decide."""
    return not any(
        event.HasField(payload)
        for told in story.values()
        for event in told
        for payload in ("run_started", "run_completed", "run_failed", "run_cancelled")
    )


@given(st.data())
def test_any_interleaving_makes_the_same_nodes_and_edges(data: st.DataObject) -> None:
    story = data.draw(stories())
    one, other = (fold(data.draw(interleavings(story)), EVERYTHING) for _ in range(2))
    assert links(one) == links(other)
    mine, theirs = ({agent.invocation_id: agent for agent in record.agents} for record in (one, other))
    for invocation_id, agent in mine.items():
        twin = theirs[invocation_id]
        assert (agent.name, agent.branch, agent.usage) == (twin.name, twin.branch, twin.usage)
        assert (agent.step_count, agent.child_count) == (twin.step_count, twin.child_count)


@given(st.data())
def test_the_order_is_the_same_where_first_appearances_are(data: st.DataObject) -> None:
    story = data.draw(stories().filter(says_nothing_of_the_run))
    log = data.draw(interleavings(story))
    rest = {one: told[1:] for one, told in story.items() if told[1:]}
    firsts = [story[one][0] for one in first_appearances(log)]
    other = fold([*firsts, *data.draw(interleavings(rest))], EVERYTHING)
    expected = fold(log, EVERYTHING)
    assert [(agent.invocation_id, agent.depth) for agent in other.agents] == [
        (agent.invocation_id, agent.depth) for agent in expected.agents
    ]


@given(told_logs(), st.data())
def test_the_fold_of_a_prefix_is_the_tree_so_far(log: list[AgentEvent], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(log)))
    before, after = links(fold(log[:cut], EVERYTHING)), links(fold(log, EVERYTHING))
    named_later = {event.invocation_id for event in log[cut:] if event.parent_invocation_id or starts(event)}
    assert before.keys() <= after.keys()
    assert all(after[one] == parent for one, parent in before.items() if one not in named_later)


def starts(event: AgentEvent) -> bool:
    """Whether the event is an authority on the parent."""
    return event.HasField("run_started") or event.HasField("sub_agent_started")


@given(told_logs())
def test_no_agent_is_lost_and_none_is_twice(log: list[AgentEvent]) -> None:
    record = fold(log, EVERYTHING)
    ids = [agent.invocation_id for agent in record.agents]
    assert sorted(ids) == sorted(first_appearances(log))
    assert record.agents_total == len(ids)
    assert record.as_of_sequence == len(log)


@given(told_logs())
def test_agents_are_in_preorder_below_the_parent_they_name(log: list[AgentEvent]) -> None:
    record = fold(log, EVERYTHING)
    chain: list[str] = []
    children = dict.fromkeys(links(record), 0)
    for agent in record.agents:
        assert agent.depth <= len(chain)
        del chain[agent.depth :]
        if chain:
            assert agent.parent_invocation_id == chain[-1]
            children[chain[-1]] += 1
        chain.append(agent.invocation_id)
    assert {agent.invocation_id: agent.child_count for agent in record.agents} == children


@given(told_logs())
def test_the_usage_of_the_tree_is_the_sum_of_what_each_used(log: list[AgentEvent]) -> None:
    record = fold(log, EVERYTHING)
    assert record.tree_usage == summed(agent.usage for agent in record.agents)
    for place, agent in enumerate(record.agents):
        below = [agent.usage]
        for later in record.agents[place + 1 :]:
            if later.depth <= agent.depth:
                break
            below.append(later.usage)
        assert agent.tree_usage == summed(below)


@given(told_logs(), st.integers(0, 4), st.integers(0, 4))
def test_bounds_of_counts_keep_the_first_ones(log: list[AgentEvent], max_agents: int, max_tools: int) -> None:
    whole = fold(log, EVERYTHING)
    options = invocation_pb2.InvocationOptions(max_agents=max_agents, max_tools=max_tools)
    record = fold(log, options)
    assert list(record.agents) == list(whole.agents)[:max_agents]
    assert list(record.tools) == list(whole.tools)[:max_tools]
    assert (record.agents_total, record.tools_total) == (whole.agents_total, whole.tools_total)


LONG = st.integers(0, 3_000).flatmap(lambda size: st.sampled_from(("x" * size, "é" * size, "😀" * size)))


@st.composite
def heavy_events(draw: st.DrawFn) -> AgentEvent:
    """An event with long texts wherever a foreign stream may have them."""
    event = draw(TOLD)
    text = draw(LONG)
    envelope = AgentEvent(invocation_id=draw(st.sampled_from(IDS)) + draw(st.sampled_from(("", "i" * 900))))
    if event.HasField("run_started"):
        event.run_started.labels["k" * len(text)] = text
        event.run_started.input.parts.add(text=text, metadata_json=json.dumps({"note": text}))
        event.run_started.input.metadata_json = json.dumps({"note": text})
    if event.HasField("llm_completed"):
        event.llm_completed.response.usage.cost_nanos = len(text)
        event.llm_completed.response.usage.currency_code = text
        event.llm_completed.response.message.parts.add(text=text)
        event.llm_completed.response.message.parts.add().tool_call.arguments_json = text
    if event.HasField("llm_started"):
        event.llm_started.settings.extra_json = json.dumps({"note": text})
    if event.HasField("sub_agent_started"):
        event.sub_agent_started.from_invocation_id = event.sub_agent_started.revision = text
    if event.HasField("run_failed"):
        event.run_failed.error.message, event.run_failed.error.details_json = text, text
    if event.HasField("run_forked"):
        event.run_forked.origin.run_id = text
        event.run_forked.changes.input.parts.add(text=text)
    if event.HasField("input_requested"):
        event.input_requested.request.call.arguments_json = text
        event.input_requested.request.prompt = text
    if event.HasField("sub_agent_completed"):
        event.sub_agent_completed.output.parts.add(blob=message_pb2.Blob(data=text.encode()))
    if event.HasField("step_completed"):
        event.step_completed.step.tool_results.add().parts.add(reasoning=message_pb2.Reasoning(text=text))
    event.MergeFrom(envelope)
    event.agent, event.run_id = draw(st.sampled_from(("", text))), draw(st.sampled_from(("", text)))
    return event


@settings(deadline=None)
@given(st.lists(heavy_events(), max_size=12), st.integers(1_024, 20_000), st.booleans())
def test_a_record_is_never_larger_than_its_bound(log: list[AgentEvent], max_bytes: int, include_steps: bool) -> None:
    options = invocation_pb2.InvocationOptions(max_bytes=max_bytes, include_steps=include_steps)
    record = fold(log, options)
    assert record.ByteSize() <= max_bytes
    assert record.agents_total == len(first_appearances(log))
    assert len(record.agents) <= record.agents_total


@given(told_logs())
def test_a_record_survives_bytes_and_json(log: list[AgentEvent]) -> None:
    record = fold(log, EVERYTHING)
    assert invocation_pb2.Invocation.FromString(record.SerializeToString()) == record
    assert json_format.Parse(json_format.MessageToJson(record), invocation_pb2.Invocation()) == record


@given(st.data())
def test_deltas_change_nothing_but_the_sequence_that_is_covered(data: st.DataObject) -> None:
    log = [event for event in desk() if not event.HasField("llm_output_text_delta")]
    with_deltas = list(log)
    for _ in range(data.draw(st.integers(0, 20))):
        place = data.draw(st.integers(1, len(with_deltas) - 1))
        delta = AgentEvent(invocation_id=data.draw(st.sampled_from("LC")), agent="?", branch="?")
        delta.llm_output_text_delta.text = "..."
        with_deltas.insert(place, delta)
    record, expected = (fold_log(stored(one), run_id="r", session_id="s") for one in (renumbered(with_deltas), log))
    assert record.as_of_sequence == len(with_deltas)
    for one in (record, expected):
        one.ClearField("as_of_sequence")
        for tool in one.tools:
            tool.ClearField("sequence")
    assert record == expected


def renumbered(log: Sequence[AgentEvent]) -> list[AgentEvent]:
    """The events with sequences from 1; their times stay."""
    copies = []
    for sequence, event in enumerate(log, start=1):
        copy = AgentEvent()
        copy.CopyFrom(event)
        copy.sequence = sequence
        copies.append(copy)
    return copies
