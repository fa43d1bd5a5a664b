"""What the views and masks show of a log."""

import pytest

from bough.v1 import event_pb2, follow_pb2
from bough_server.log import events
from bough_server.log.views import Selection
from tests.support.logs import AgentEvent, desk, stamped
from tests.support.waiting_run_log import asking_desk

FULL = Selection(follow_pb2.EVENT_VIEW_FULL)
SUMMARY = Selection(follow_pb2.EVENT_VIEW_SUMMARY)
ALL = list(events.NAME_OF_KIND)


def shown(selection: Selection, log: list[AgentEvent]) -> list[AgentEvent]:
    return [event for one in log if (event := selection.apply(one)) is not None]


def names(selection: Selection, log: list[AgentEvent]) -> list[str]:
    return [f"{event.agent} {events.name_of(event)}" for event in shown(selection, log)]


def masked(*event_names: str, view: follow_pb2.EventView.ValueType = follow_pb2.EVENT_VIEW_FULL) -> Selection:
    return Selection(view, event_names)


@pytest.mark.parametrize("selection", [FULL, Selection(), Selection(follow_pb2.EVENT_VIEW_FULL, [])])
def test_full_shows_every_event_as_it_is(selection: Selection) -> None:
    assert selection.takes_all
    assert shown(selection, desk()) == desk()
    assert all(selection.takes_kind(kind) for kind in [0, *ALL])


def test_summary_shows_the_root_s_events_and_of_each_sub_agent_its_start_text_and_end() -> None:
    assert not SUMMARY.takes_all
    assert names(SUMMARY, desk()) == [
        "lead agent.run.started",
        "lead agent.llm.started",
        "lead agent.llm.output_text.delta",
        "lead agent.llm.completed",
        "lead agent.tool.started",
        "researcher agent.sub_agent.started",
        "researcher agent.sub_agent.partial",
        "researcher agent.sub_agent.partial",
        "researcher agent.sub_agent.completed",
        "lead agent.tool.completed",
        "lead agent.step.completed",
        "lead agent.llm.started",
        "lead agent.llm.output_text.delta",
        "lead agent.llm.completed",
        "lead agent.step.completed",
        "lead agent.run.completed",
    ]


def test_summary_shows_what_every_agent_asks_and_all_that_becomes_of_the_run() -> None:
    shown_in_summary = [name for name in names(SUMMARY, asking_desk()) if not name.startswith("lead agent.llm")]
    assert shown_in_summary == [
        "lead agent.run.started",
        "lead agent.run.queued",
        "lead agent.run.dequeued",
        "lead agent.tool.started",
        "clerk agent.sub_agent.started",
        "lead agent.control.input_requested",
        "lead agent.control.input_requested",
        "clerk agent.control.input_requested",
        "lead agent.run.interrupted",
        "lead agent.run.resumed",
        "lead agent.control.input_received",
        "lead agent.tool.started",
        "lead agent.run.resumed",
        "lead agent.tool.started",
        "lead agent.tool.completed",
        "lead agent.run.interrupted",
        "lead agent.run.resumed",
        "clerk agent.control.input_received",
        "clerk agent.sub_agent.completed",
        "lead agent.tool.completed",
        "lead agent.control.input_received",
        "lead agent.tool.completed",
        "lead agent.step.completed",
        "lead agent.run.resumed",
        "lead agent.step.completed",
        "lead agent.run.completed",
    ]


RUN_NAMES = [name for name in events.NAME_OF_KIND.values() if name.startswith("agent.run.")]


@pytest.mark.parametrize("name", RUN_NAMES)
@pytest.mark.parametrize("view", [follow_pb2.EVENT_VIEW_FULL, follow_pb2.EVENT_VIEW_SUMMARY])
def test_run_events_come_in_every_view_through_every_mask(name: str, view: follow_pb2.EventView.ValueType) -> None:
    event = AgentEvent(invocation_id="G", parent_invocation_id="C")
    getattr(event, "run_" + name.rpartition(".")[2]).SetInParent()
    assert events.name_of(event) == name
    for mask in ((), ("agent.llm.started",)):
        assert Selection(view, mask).apply(event) == event


def test_questions_may_be_masked_by_name() -> None:
    asked = masked("agent.control.input_requested", view=follow_pb2.EVENT_VIEW_SUMMARY)
    assert [name for name in names(asked, asking_desk()) if ".run." not in name] == [
        "lead agent.control.input_requested",
        "lead agent.control.input_requested",
        "clerk agent.control.input_requested",
    ]


def test_a_partial_has_the_delta_s_envelope_and_its_text() -> None:
    (delta,) = stamped([desk()[12]])
    before = delta.SerializeToString()
    expected = AgentEvent()
    expected.CopyFrom(delta)
    expected.ClearField("payload")
    expected.sub_agent_partial.text = "It is "
    assert SUMMARY.apply(delta) == expected
    assert (expected.sequence, expected.step_id, expected.attempt, expected.run_id) == (13, "C-1", 1, "run-1")
    assert delta.SerializeToString() == before


def test_an_empty_delta_of_a_sub_agent_is_an_empty_partial() -> None:
    delta = AgentEvent(
        invocation_id="C", parent_invocation_id="L", llm_output_text_delta=event_pb2.LlmOutputTextDelta()
    )
    partial = SUMMARY.apply(delta)
    assert partial is not None
    assert partial.WhichOneof("payload") == "sub_agent_partial"


def test_summary_shows_sub_agents_at_any_depth() -> None:
    deep = AgentEvent(invocation_id="G", parent_invocation_id="C", depth=7)
    deep.sub_agent_failed.step_id = "last"
    assert SUMMARY.apply(deep) == deep


def test_a_summary_of_a_summary_is_the_summary() -> None:
    once = shown(SUMMARY, desk())
    assert shown(SUMMARY, once) == once


def test_summary_shows_an_unknown_payload_of_the_root_alone() -> None:
    assert SUMMARY.takes_kind(999)
    assert SUMMARY.apply(AgentEvent(invocation_id="L")) is not None
    assert SUMMARY.apply(AgentEvent(invocation_id="C", parent_invocation_id="L")) is None


def test_a_mask_shows_the_events_it_names_and_run_events_always() -> None:
    mask = masked("agent.tool.started", "agent.step.*")
    assert names(mask, desk()) == names(masked("tool_started", "step_completed", "step_failed"), desk())
    assert not mask.takes_all
    assert names(mask, desk()) == [
        "lead agent.run.started",
        "lead agent.tool.started",
        "researcher agent.tool.started",
        "researcher agent.step.completed",
        "researcher agent.step.completed",
        "lead agent.step.completed",
        "lead agent.step.completed",
        "lead agent.run.completed",
    ]


def test_a_mask_is_of_the_names_that_the_view_shows() -> None:
    partials = masked("agent.sub_agent.partial", view=follow_pb2.EVENT_VIEW_SUMMARY)
    assert names(partials, desk())[1:-1] == ["researcher agent.sub_agent.partial"] * 2
    deltas = masked("agent.llm.output_text.delta", view=follow_pb2.EVENT_VIEW_SUMMARY)
    assert names(deltas, desk())[1:-1] == ["lead agent.llm.output_text.delta"] * 2
    everywhere = masked("agent.llm.output_text.delta")
    assert len(names(everywhere, desk())[1:-1]) == 4


def test_a_star_behind_the_root_of_all_names_shows_every_known_event() -> None:
    assert shown(masked("agent.*"), desk()) == desk()
    assert masked("agent.*").apply(AgentEvent(invocation_id="L")) is None


@pytest.mark.parametrize("name", ["agent.tool", "agent", "agent.to.*", "agent.nothing.*", "agent.tool.start"])
def test_an_unknown_agent_name_shows_only_run_events(name: str) -> None:
    assert names(masked(name), desk()) == ["lead agent.run.started", "lead agent.run.completed"]


@pytest.mark.parametrize("view", [follow_pb2.EVENT_VIEW_FULL, follow_pb2.EVENT_VIEW_SUMMARY])
@pytest.mark.parametrize("mask", [(), ("agent.llm.*",), ("agent.sub_agent.partial",), ("agent.step.failed",)])
def test_a_kind_that_is_not_taken_is_never_shown(view: follow_pb2.EventView.ValueType, mask: tuple[str, ...]) -> None:
    selection = Selection(view, mask)
    taken = {events.kind_of(event) for event in desk() if selection.apply(event) is not None}
    assert taken <= {kind for kind in ALL if selection.takes_kind(kind)}
    refused = [event for event in desk() if not selection.takes_kind(events.kind_of(event))]
    assert shown(selection, refused) == []


def test_selections_of_one_view_and_mask_are_equal() -> None:
    assert masked("agent.llm.*") == Selection(follow_pb2.EVENT_VIEW_FULL, ["agent.llm.*"])
    assert hash(masked("agent.llm.*")) == hash(Selection(follow_pb2.EVENT_VIEW_FULL, ["agent.llm.*"]))
