"""Records of forks: what they share with their origin, what they say of themselves, and what they have used."""

from google.protobuf.message import Message

from bough.v1 import event_pb2, execution_pb2, fork_pb2, invocation_pb2, message_pb2
from bough_server.tree.fold import fold, fold_log
from tests.support.logs import (
    RUN_ID,
    SESSION_ID,
    AgentEvent,
    at,
    desk,
    numbered,
    says,
    shape,
    stamped,
    stored,
    tokens,
)
from tests.support.waiting_run_log import (
    APPROVAL,
    CLIENT_TOOL,
    PAY,
    WHICH,
    asking_desk,
    interrupted,
    lead,
    told,
)


def forked(origin: str = "origin", through: int = 0, **rest: object) -> AgentEvent:
    payload = event_pb2.RunForked(origin=fork_pb2.ForkOrigin(run_id=origin, sequence=through))
    payload.MergeFrom(event_pb2.RunForked(**rest))  # type: ignore[arg-type]
    return lead(run_forked=payload)


def fork_of(log: list[AgentEvent], through: int, *rest: AgentEvent, **said: object) -> invocation_pb2.Invocation:
    """The record of a fork after a sequence, with what it does by itself."""
    return fold(numbered([*log[:through], forked("origin", through, **said), *rest]))


def without(record: invocation_pb2.Invocation, *names: str) -> invocation_pb2.Invocation:
    """A copy without some fields."""
    copy = invocation_pb2.Invocation()
    copy.CopyFrom(record)
    fields: Message = copy
    for name in names:
        fields.ClearField(name)
    return copy


def test_a_fork_names_its_origin_and_what_was_used_before_it() -> None:
    for through in range(1, len(desk())):
        record = fork_of(desk(), through)
        assert record.forked_from == fork_pb2.ForkOrigin(run_id="origin", sequence=through)
        assert record.inherited_usage == fold(desk()[:through]).tree_usage == record.tree_usage


def test_a_run_that_is_no_fork_inherits_nothing() -> None:
    record = fold(desk())
    assert not record.HasField("forked_from")
    assert not record.HasField("inherited_usage")


def test_a_fork_that_goes_on_as_its_origin_did_has_its_tree() -> None:
    own = ("forked_from", "inherited_usage", "as_of_sequence")
    for through in range(1, len(desk())):
        log = [*desk()[:through], forked("origin", through), *desk()[through:]]
        record, origin = fold(renumbered(log)), fold(desk())
        assert without(record, *own) == without(later(origin, through), *own)


def renumbered(log: list[AgentEvent]) -> list[AgentEvent]:
    """The events with sequences from 1; their times stay, so that only what the fork adds differs."""
    copies = []
    for sequence, event in enumerate(log, start=1):
        copy = AgentEvent()
        copy.CopyFrom(event)
        copy.sequence = sequence
        copies.append(copy)
    return copies


def later(origin: invocation_pb2.Invocation, through: int) -> invocation_pb2.Invocation:
    """The origin's record with the sequences of calls that began after the fork moved by the one event it adds."""
    moved = without(origin)
    for tool in moved.tools:
        tool.sequence += tool.sequence > through
    return moved


def test_a_fork_of_a_fork_names_the_run_that_it_was_made_of() -> None:
    log = [*desk()[:8], forked("first", 8), *desk()[8:14], forked("second", 15)]
    record = fold(numbered(log))
    assert record.forked_from == fork_pb2.ForkOrigin(run_id="second", sequence=15)
    assert record.inherited_usage == fold(desk()[:14]).tree_usage


def test_what_a_fork_uses_itself_is_in_the_tree_and_not_inherited() -> None:
    call = event_pb2.LlmStarted()
    answer = desk()[21].llm_completed
    record = fork_of(
        desk(), 19, lead(effect_key="s1.m", llm_started=call), lead(effect_key="s1.m", llm_completed=answer)
    )
    assert record.inherited_usage == tokens(40, 7, model_calls=3, tool_calls=2)
    assert record.tree_usage == tokens(55, 8, model_calls=4, tool_calls=2)


def test_a_tool_that_was_running_at_the_fork_is_one_call_that_the_origin_was_charged_for() -> None:
    again = lead(attempt=2, tool_started=event_pb2.ToolStarted(call=PAY, idempotency_key="of the fork"))
    record = fork_of(asking_desk(), 14, again, lead(tool_completed=told(PAY, "paid again")))
    assert (record.inherited_usage.tool_calls, record.tree_usage.tool_calls) == (2, 2)
    pay = record.tools[1]
    assert (pay.start_time, pay.result_json, record.tools_total) == (at(14), '"paid again"', 3)


def test_an_edited_result_is_the_call_s_result() -> None:
    edited = told(PAY, "edited")
    edits = fork_pb2.ForkChanges(
        tool_results=[
            fork_pb2.EditedResult(
                call_id="pay", invocation_id="L", outcome=message_pb2.ToolOutcome(parts=edited.result.parts)
            )
        ]
    )
    record = fork_of(asking_desk(), 16, lead(tool_completed=edited), changes=edits)
    assert [tool.result_json for tool in record.tools] == ["", '"edited"', ""]
    assert list(record.anomalies) == list(record.agents[0].anomalies) == []


def test_a_fork_has_labels_of_its_own_or_its_origin_s() -> None:
    assert dict(fork_of(desk(), 5).labels) == {"team": "desk"}
    assert dict(fork_of(desk(), 5, labels={"try": "2"}).labels) == {"try": "2"}


def test_a_fork_with_another_input_was_told_that() -> None:
    other = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="And now?")])
    record = fork_of(desk(), 1, changes=fork_pb2.ForkChanges(input=other))
    assert (record.user_content, record.agents[0].input) == (other, other)
    assert fork_of(desk(), 1).user_content == fold(desk()).user_content


def test_agents_that_go_on_after_the_fork_have_the_definitions_it_made() -> None:
    changed = [event_pb2.DefinitionRef(name=name, revision=f"{name}-2") for name in ("lead", "researcher")]
    ended_before = fork_of(desk(), 17, definition_refs=changed)
    goes_on = fork_of(desk(), 8, definition_refs=changed)
    assert [agent.revision for agent in ended_before.agents] == ["lead-2", "r2"]
    assert [agent.revision for agent in goes_on.agents] == ["lead-2", "researcher-2"]
    goes_on = fork_of(desk(), 8, definition_refs=changed[1:])
    assert [agent.revision for agent in goes_on.agents] == ["r1", "researcher-2"]


def test_a_start_names_the_revision_it_ran_unless_a_fork_changed_it_while_it_was_open() -> None:
    log = desk()
    starts = next(event.sub_agent_started for event in log if event.HasField("sub_agent_started"))
    starts.revision = "r9"
    changed = [event_pb2.DefinitionRef(name="researcher", revision="researcher-2")]
    assert [agent.revision for agent in fold(log).agents] == ["r1", "r9"]
    assert [agent.revision for agent in fork_of(log, 17, definition_refs=changed).agents] == ["r1", "r9"]
    assert [agent.revision for agent in fork_of(log, 8, definition_refs=changed).agents] == ["r1", "researcher-2"]
    assert [agent.revision for agent in fork_of(log, 8).agents] == ["r1", "r9"]


def test_a_fork_of_a_run_that_waits_goes_on_and_waits_again() -> None:
    waiting, going = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, execution_pb2.EXECUTION_STATE_RUNNING
    record = fork_of(asking_desk(), 11)
    assert (record.state, [agent.state for agent in record.agents]) == (going, [going, going])
    assert [tool.state for tool in record.tools] == [going, waiting, waiting]
    again = fork_of(asking_desk(), 11, interrupted(APPROVAL, CLIENT_TOOL, WHICH))
    assert (again.state, [agent.state for agent in again.agents]) == (waiting, [waiting, waiting])


def test_a_fork_begins_when_it_is_forked_with_all_that_was_open_then() -> None:
    assert fork_of(asking_desk(), 2).start_time == at(3)
    assert fork_of(asking_desk(), 7).start_time == at(8)
    fork = fork_of(desk(), 7)
    assert fork.start_time == at(8)
    assert [agent.start_time for agent in fork.agents if not agent.HasField("end_time")] == [at(8)] * 2


def test_a_fork_has_the_ids_that_its_events_are_read_with() -> None:
    log = numbered([*desk()[:9], forked("origin", 9)])
    record = fold_log(stored(log), run_id=RUN_ID, session_id=SESSION_ID)
    assert record == fold(stamped(log))
    assert (record.run_id, record.session_id, record.invocation_id) == (RUN_ID, SESSION_ID, "L")
    assert shape(record) == [(0, "L", "lead"), (1, "C", "researcher")]


def test_a_fork_s_origin_goes_last_where_little_fits() -> None:
    log = [forked("o" * 2_000), lead(run_failed=event_pb2.RunFailed())]
    record = fold(log, invocation_pb2.InvocationOptions(max_bytes=1_024))
    assert record.ByteSize() <= 1_024
    assert (record.agent, record.HasField("forked_from")) == ("", False)


def test_what_a_fork_was_told_is_cut_with_the_rest() -> None:
    other = says("long " * 1_000)
    record = fold(
        [forked(changes=fork_pb2.ForkChanges(input=other))], invocation_pb2.InvocationOptions(max_bytes=2_048)
    )
    assert record.user_content.parts[0].truncated
    assert record.ByteSize() <= 2_048
