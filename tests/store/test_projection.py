"""The fold of a log into messages, usage entries and the run's row."""

import hashlib

import pytest

from bough.v1 import error_pb2, event_pb2, execution_pb2, message_pb2, usage_pb2
from bough_server import ids
from bough_server.ids import agent_chain
from bough_server.log.charges import Charge
from bough_server.store.ports.sessions import StoredMessage
from bough_server.store.ports.usage import LineKind, UsageLine
from bough_server.store.projected import NOTHING, LogAddress, Projected, RunEnd, RunStart
from bough_server.store.projection import RunFold, excerpt_of
from bough_server.tree.fold import fold as tree_of
from tests.store.logs import SECOND, START_NS, Made, completed, definition, delta, of_invocation, record, text

CHILD = "s0.t0"


def _fold(run: Made, *batch: event_pb2.AgentEvent) -> Projected:
    fold = RunFold(LogAddress(run_id=run.run_id, tenant_id="acme", user_id="anne", session_id=run.session_id))
    return fold.project([run.new().first, *run.next(*batch)])


def _said(projected: Projected) -> list[tuple[int, str, str, str]]:
    kinds = message_pb2.MessageKind
    return [
        (one.message.position, kinds.Name(one.message.kind).removeprefix("MESSAGE_KIND_"), one.agent, one.chain)
        for one in projected.messages
    ]


def _calling(*call_ids: str, kind: str) -> message_pb2.Message:
    message = text("Let me see.", kind)
    message.parts.extend(message_pb2.Part(tool_call=message_pb2.ToolCall(call_id=call_id)) for call_id in call_ids)
    return message


def _answered(message: message_pb2.Message) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(llm_completed=event_pb2.LlmCompleted())
    event.llm_completed.response.message.CopyFrom(message)
    return event


def _result(call_id: str, *, child: str = "") -> message_pb2.ToolResult:
    return message_pb2.ToolResult(
        call=message_pb2.ToolCall(call_id=call_id, name="look"), agent="lead", child_invocation_id=child
    )


def test_a_turn_with_a_sub_agent_is_stored_in_order_with_whose_it_is() -> None:
    run = Made(question=text("Why?", "USER"), session_cut=4)
    told = event_pb2.AgentEvent(
        agent="writer", sub_agent_started=event_pb2.SubAgentStarted(input=text("Write.", "SUB_AGENT_USER"))
    )
    told.parent_invocation_id = run.run_id
    wrote = event_pb2.AgentEvent(
        agent="writer",
        sub_agent_completed=event_pb2.SubAgentCompleted(output=text("Done.", "SUB_AGENT_ASSISTANT")),
    )
    projected = _fold(
        run,
        _answered(_calling("c1", kind="UNSPECIFIED")),
        of_invocation(told, run, effect=CHILD, scope=CHILD),
        of_invocation(wrote, run, effect=CHILD, scope=CHILD),
        completed(text("Because.", "ASSISTANT")),
    )
    lead = hashlib.sha256(b"lead").hexdigest()
    writer = hashlib.sha256(f"{lead}/writer".encode()).hexdigest()
    assert _said(projected) == [
        (5, "USER", "lead", lead),
        (6, "SUB_AGENT_USER", "writer", writer),
        (7, "SUB_AGENT_ASSISTANT", "writer", writer),
        (8, "ASSISTANT", "lead", lead),
    ]
    assert (agent_chain("", "lead"), agent_chain(lead, "writer")) == (lead, writer)


def test_a_stored_message_is_the_events_own_at_its_position() -> None:
    question = text("Why?", "USER")
    question.author, question.message_id, question.role = "user", "m1", message_pb2.ROLE_USER
    question.create_time.FromNanoseconds(5)
    run = Made(question=question)
    expected = message_pb2.Message()
    expected.CopyFrom(question)
    expected.position = 1
    stored = StoredMessage(message=expected, run_id=run.run_id, agent="lead", chain=agent_chain("", "lead"))
    assert _fold(run).messages == [stored]


def test_a_result_is_stored_where_the_message_that_called_for_it_is() -> None:
    run = Made()
    done = event_pb2.AgentEvent(tool_completed=event_pb2.ToolCompleted(result=_result("c1")))
    failed = event_pb2.AgentEvent(tool_failed=event_pb2.ToolFailed(result=_result("c2")))
    unasked = event_pb2.AgentEvent(tool_completed=event_pb2.ToolCompleted(result=_result("c9")))
    projected = _fold(
        run,
        _answered(_calling("c1", "c2", kind="ASSISTANT")),
        of_invocation(failed, run, effect="s0.t1"),
        of_invocation(done, run, effect="s0.t0"),
        of_invocation(unasked, run, effect="s0.t2"),
    )
    assert [kind for _, kind, _, _ in _said(projected)] == ["ASSISTANT", "TOOL", "TOOL"]
    expected = message_pb2.Message(
        message_id=ids.message_id(run.run_id, "s0.t1", "TOOL"),
        role=message_pb2.ROLE_TOOL,
        kind=message_pb2.MESSAGE_KIND_TOOL,
        author="lead",
        parts=[message_pb2.Part(tool_result=_result("c2"))],
        invocation_id=run.run_id,
        position=2,
    )
    expected.create_time.FromNanoseconds(START_NS + 3 * SECOND)
    assert projected.messages[1].message == expected


def test_a_linked_agents_result_and_one_of_an_unstored_call_are_not_stored() -> None:
    run = Made()
    projected = _fold(
        run,
        _answered(_calling("c1", kind="ASSISTANT")),
        event_pb2.AgentEvent(
            effect_key="s0.t0", tool_completed=event_pb2.ToolCompleted(result=_result("c1", child="the child"))
        ),
        _answered(_calling("c2", kind="UNSPECIFIED")),
        event_pb2.AgentEvent(effect_key="s1.t0", tool_completed=event_pb2.ToolCompleted(result=_result("c2"))),
    )
    assert [kind for _, kind, _, _ in _said(projected)] == ["ASSISTANT"]


def _started(name: str, parent: str, trigger: execution_pb2.InvocationTrigger.ValueType) -> event_pb2.AgentEvent:
    started = event_pb2.SubAgentStarted(trigger=trigger)
    return event_pb2.AgentEvent(
        agent="writer", invocation_id=name, parent_invocation_id=parent, sub_agent_started=started
    )


def _ended(name: str) -> event_pb2.AgentEvent:
    return event_pb2.AgentEvent(
        effect_key="s0.t0", tool_completed=event_pb2.ToolCompleted(result=_result(name, child=name))
    )


def test_a_call_holds_what_started_below_it_also_below_calls_that_had_ended() -> None:
    run = Made()
    tool, transfer = execution_pb2.INVOCATION_TRIGGER_TOOL, execution_pb2.INVOCATION_TRIGGER_TRANSFER
    projected = _fold(
        run,
        _started("outer", run.run_id, tool),
        _started("inner", "outer", tool),
        _ended("inner"),
        _started("late", "inner", transfer),
        _started("open", "late", tool),
        _ended("outer"),
        _started("later", "late", transfer),
        _ended("open"),
        _started("latest", "open", transfer),
    )
    assert [each.inside for each in projected.calls] == [("inner",), ("outer", "inner", "late"), ("open",)]


def test_every_attempt_that_was_sent_is_charged_to_its_own_model() -> None:
    run = Made()
    used = usage_pb2.Usage(input_tokens=7, output_tokens=0)
    none = usage_pb2.Usage(model_calls_without_usage=1)
    counted = usage_pb2.Usage(input_tokens=7, output_tokens=0, model_calls=1)
    started = event_pb2.AgentEvent(effect_key="s0.m", llm_started=event_pb2.LlmStarted(model="first"))
    retrying = event_pb2.LlmRetrying(next_model="second", lost_usage=used)
    retrying_alike = event_pb2.LlmRetrying(lost_usage=used)
    answered = event_pb2.AgentEvent(effect_key="s0.m", llm_completed=event_pb2.LlmCompleted())
    answered.llm_completed.response.usage.CopyFrom(used)
    again = event_pb2.AgentEvent(effect_key="s1.m", llm_started=event_pb2.LlmStarted(model="third"))
    failed = event_pb2.AgentEvent(effect_key="s1.m", llm_failed=event_pb2.LlmFailed(lost_usage=used))
    silent = event_pb2.AgentEvent(effect_key="s2.m", llm_failed=event_pb2.LlmFailed(lost_usage=none))
    projected = _fold(
        run,
        started,
        event_pb2.AgentEvent(effect_key="s0.m", llm_retrying=retrying),
        event_pb2.AgentEvent(effect_key="s0.m", llm_retrying=retrying_alike),
        answered,
        again,
        failed,
        silent,
    )
    unknown = usage_pb2.Usage(model_calls=1, model_calls_without_usage=1)
    charged = [(3, "first", counted), (4, "second", counted), (5, "second", counted), (7, "third", counted)]
    assert projected.usage == [
        _start_entry(run),
        *(
            UsageLine(
                run_id=run.run_id,
                sequence=sequence,
                tenant_id="acme",
                user_id="anne",
                session_id=run.session_id,
                agent="lead",
                invocation_id=run.run_id,
                model=model,
                time_ns=START_NS + sequence * SECOND,
                usage=usage,
            )
            for sequence, model, usage in [*charged, (8, "", unknown)]
        ),
    ]


_RESERVED = event_pb2.LlmStarted(model="m", reserved_cost_nanos=50, reserved_currency_code="EUR")
_NO_ANSWER = event_pb2.LlmFailed(error=error_pb2.AgentError(message="No."))


def _attempt(
    event: event_pb2.LlmRetrying | event_pb2.LlmFailed | usage_pb2.Usage, key: str = "s0.m"
) -> event_pb2.AgentEvent:
    if isinstance(event, event_pb2.LlmRetrying):
        return event_pb2.AgentEvent(effect_key=key, llm_retrying=event)
    if isinstance(event, event_pb2.LlmFailed):
        return event_pb2.AgentEvent(effect_key=key, llm_failed=event)
    answered = event_pb2.AgentEvent(effect_key=key, llm_completed=event_pb2.LlmCompleted())
    answered.llm_completed.response.usage.CopyFrom(event)
    return answered


@pytest.mark.parametrize(
    ("end", "charge"),
    [
        (usage_pb2.Usage(input_tokens=1, output_tokens=1, cost_nanos=7, currency_code="EUR"), (7, "EUR", False)),
        (usage_pb2.Usage(), (50, "EUR", True)),
        (usage_pb2.Usage(input_tokens=1), (50, "EUR", True)),
        (usage_pb2.Usage(input_tokens=1, output_tokens=1), (0, "", False)),
        (event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_RECOVERED), (50, "EUR", True)),
        (event_pb2.LlmRetrying(unanswered=True), (0, "", False)),
        (_NO_ANSWER, (50, "EUR", True)),
        (event_pb2.LlmFailed(unanswered=True), (0, "", False)),
        (
            event_pb2.LlmFailed(lost_usage=usage_pb2.Usage(input_tokens=1, cost_nanos=9, currency_code="EUR")),
            (9, "EUR", False),
        ),
    ],
)
def test_an_attempt_is_charged_its_reported_cost_or_what_its_call_had_reserved(
    end: event_pb2.LlmRetrying | event_pb2.LlmFailed | usage_pb2.Usage, charge: tuple[int, str, bool]
) -> None:
    projected = _fold(Made(), event_pb2.AgentEvent(effect_key="s0.m", llm_started=_RESERVED), _attempt(end))
    (_, entry) = projected.usage
    assert (entry.charge.nanos, entry.charge.currency_code, entry.is_estimated) == charge


def test_every_attempt_of_a_call_is_charged_and_only_the_ends_of_sent_ones() -> None:
    lost = event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_RECOVERED)
    ends = lost, event_pb2.LlmRetrying(not_sent=True), lost, _NO_ANSWER
    started = event_pb2.AgentEvent(effect_key="s0.m", llm_started=_RESERVED)
    _, *entries = _fold(Made(), started, *map(_attempt, ends)).usage
    assert [(entry.sequence, entry.charge.nanos) for entry in entries] == [(3, 50), (5, 50), (6, 50)]


def test_a_call_of_a_server_that_recorded_no_currency_is_charged_what_was_reported_only() -> None:
    old = event_pb2.AgentEvent(effect_key="s0.m", llm_started=event_pb2.LlmStarted(reserved_cost_nanos=50))
    assert [entry.charge for entry in _fold(Made(), old, _attempt(_NO_ANSWER)).usage] == [Charge()] * 2


def _start_entry(run: Made) -> UsageLine:
    return UsageLine(
        run_id=run.run_id,
        sequence=1,
        tenant_id="acme",
        user_id="anne",
        session_id=run.session_id,
        agent="lead",
        invocation_id=run.run_id,
        model="",
        time_ns=START_NS + SECOND,
        usage=usage_pb2.Usage(),
        kind=LineKind.START,
    )


def test_the_first_event_makes_the_row() -> None:
    run = Made(labels={"a": "b"}, request_id="ask", request_digest="d")
    run.definitions = [definition("lead", "r1"), definition("writer", "r2"), definition("copy", "r1")]
    assert _fold(run) == Projected(
        start=RunStart(
            agent="lead",
            labels={"a": "b"},
            input_excerpt="",
            start_time_ns=START_NS + SECOND,
            deadline_time_ns=None,
            request_id="ask",
            request_digest="d",
            revisions=("r1", "r2"),
        ),
        messages=[],
        usage=[_start_entry(run)],
        end=None,
        shared=[],
    )


_ERROR = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_INTERNAL, message="No.")


@pytest.mark.parametrize(
    ("last", "end"),
    [
        (event_pb2.AgentEvent(run_completed=event_pb2.RunCompleted()), (execution_pb2.EXECUTION_STATE_SUCCEEDED, None)),
        (
            event_pb2.AgentEvent(run_failed=event_pb2.RunFailed(error=_ERROR)),
            (execution_pb2.EXECUTION_STATE_FAILED, _ERROR),
        ),
        (
            event_pb2.AgentEvent(run_cancelled=event_pb2.RunCancelled(error=_ERROR)),
            (execution_pb2.EXECUTION_STATE_CANCELLED, _ERROR),
        ),
    ],
)
def test_the_last_event_ends_the_row(last: event_pb2.AgentEvent, end: tuple[int, error_pb2.AgentError | None]) -> None:
    state, error = end
    assert _fold(Made(), last).end == RunEnd(
        state=state,
        end_time_ns=START_NS + 2 * SECOND,
        error=None if error is None else error.SerializeToString(),
        tree_usage=b"",
    )


def test_deltas_add_nothing() -> None:
    fold = RunFold(LogAddress(run_id="r", tenant_id="t", user_id="u", session_id="s"))
    assert fold.project([record(delta(), 1)]) is NOTHING


def test_folding_event_by_event_is_folding_at_once() -> None:
    batch = [
        _answered(_calling("c1", kind="ASSISTANT")),
        event_pb2.AgentEvent(effect_key="s0.t0", tool_completed=event_pb2.ToolCompleted(result=_result("c1"))),
        completed(text("So.", "ASSISTANT")),
    ]
    run = Made(question=text("?", "USER"))
    records = [run.new().first, *run.next(*batch)]
    address = LogAddress(run_id=run.run_id, tenant_id="t", user_id="u", session_id=run.session_id)
    at_once = RunFold(address).project(records)
    fold = RunFold(address)
    steps = [fold.project([one]) for one in records]
    assert [said for step in steps for said in step.messages] == at_once.messages
    assert (steps[0].start, steps[-1].end) == (at_once.start, at_once.end)


@pytest.mark.parametrize(
    ("parts", "excerpt"),
    [
        ([], ""),
        (["  Why\n\tis it\u00a0 so? "], "Why is it so?"),
        (["one", "", " two "], "one two"),
        (["x" * 500], "x" * 200),
        (["x" * 199 + " yz"], "x" * 199),
        (["a " * 500], ("a " * 100).rstrip()),
        (["nul\0s and\x07 \0 bells", "\x1b[2Jcleared\x9b"], "nuls and bells [2Jcleared"),
        (["\0" * 300 + "x" * 300], "x" * 200),
        (["ä" * 150, "ö" * 150], "ä" * 150 + " " + "ö" * 49),
    ],
)
def test_an_excerpt_is_the_beginning_of_the_text_with_its_white_space_collapsed(parts: list[str], excerpt: str) -> None:
    said = message_pb2.Message(parts=[message_pb2.Part(text=part) for part in parts])
    said.parts.add().blob.uri = "https://example.com/a.png"
    assert excerpt_of(said) == excerpt


_USED = usage_pb2.Usage(input_tokens=7, cost_nanos=3, currency_code="EUR")


def _spending() -> list[event_pb2.AgentEvent]:
    """Model calls and tools in every way in which they end, of the root and of a sub-agent."""
    tool = message_pb2.ToolResult(call=message_pb2.ToolCall(call_id="c1"), agent="lead")
    started = event_pb2.AgentEvent(effect_key="s0.t0", tool_started=event_pb2.ToolStarted(call=tool.call))
    completed_call = event_pb2.AgentEvent(effect_key="s1.m", llm_completed=event_pb2.LlmCompleted())
    completed_call.llm_completed.response.usage.CopyFrom(_USED)
    batch = [
        event_pb2.AgentEvent(effect_key="s0.m", llm_started=event_pb2.LlmStarted(model="m")),
        event_pb2.AgentEvent(effect_key="s0.m", llm_retrying=event_pb2.LlmRetrying(lost_usage=_USED)),
        event_pb2.AgentEvent(effect_key="s0.m", llm_retrying=event_pb2.LlmRetrying(not_sent=True)),
        _answered(_calling("c1", kind="ASSISTANT")),
        started,
        event_pb2.AgentEvent(effect_key="s0.t0", tool_started=event_pb2.ToolStarted(call=tool.call)),
        event_pb2.AgentEvent(effect_key="s0.t0", tool_failed=event_pb2.ToolFailed(result=tool)),
        event_pb2.AgentEvent(effect_key="s1.m", llm_started=event_pb2.LlmStarted(model="m")),
        event_pb2.AgentEvent(effect_key="s1.m", llm_failed=event_pb2.LlmFailed(lost_usage=_USED)),
        event_pb2.AgentEvent(effect_key="s2.m", llm_failed=event_pb2.LlmFailed()),
        event_pb2.AgentEvent(effect_key="s3.m", llm_started=event_pb2.LlmStarted(model="m")),
        event_pb2.AgentEvent(effect_key="s3.m", llm_failed=event_pb2.LlmFailed(not_sent=True)),
        completed_call,
    ]
    child = event_pb2.AgentEvent(agent="writer", sub_agent_started=event_pb2.SubAgentStarted())
    child.invocation_id = "child"
    wrote = event_pb2.AgentEvent(agent="writer", effect_key="c.m", llm_completed=event_pb2.LlmCompleted())
    wrote.invocation_id = "child"
    return [*batch, child, wrote, event_pb2.AgentEvent(tool_output=event_pb2.ToolOutput(call_id="c9", text="a"))]


def test_what_was_used_so_far_is_after_every_event_what_the_tree_counts() -> None:
    run = Made()
    fold = RunFold(LogAddress(run_id=run.run_id, tenant_id="t", user_id="u", session_id=run.session_id))
    records = [run.new().first, *run.next(*_spending())]
    seen, stored = [], b""
    for number, one in enumerate(records, 1):
        used = fold.project([one]).tree_usage
        stored = stored if used is None else used
        so_far = usage_pb2.Usage.FromString(stored)
        assert so_far == tree_of(each.event for each in records[:number]).tree_usage, one.event
        seen.append(so_far)
    assert seen[-1] == usage_pb2.Usage(
        input_tokens=21,
        cost_nanos=9,
        currency_code="EUR",
        model_calls=5,
        model_calls_without_usage=2,
        model_calls_without_cost=2,
        tool_calls=1,
    )


def test_an_end_without_a_usage_leaves_what_was_used_so_far() -> None:
    ended = _fold(Made(), *_spending(), completed(), event_pb2.AgentEvent()).end
    silent = _fold(Made(), *_spending(), event_pb2.AgentEvent(run_failed=event_pb2.RunFailed(error=_ERROR)))
    assert ended is not None
    assert silent.end is not None
    assert usage_pb2.Usage.FromString(ended.tree_usage) == usage_pb2.Usage(input_tokens=3, model_calls=1)
    assert silent.end.tree_usage == silent.tree_usage


def test_the_row_begins_with_the_deadline_of_the_call() -> None:
    run = Made()
    first = run.new().first
    first.event.run_started.deadline_time.FromNanoseconds(START_NS + 9 * SECOND)
    fold = RunFold(LogAddress(run_id=run.run_id, tenant_id="t", user_id="u", session_id=run.session_id))
    start = fold.project([first]).start
    assert start is not None
    assert start.deadline_time_ns == START_NS + 9 * SECOND
