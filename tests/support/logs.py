"""Logs for tests of pure readers: events in few words, and one whole turn of two agents; it runs nothing."""

from collections.abc import Iterable, Sequence

from google.protobuf import duration_pb2, timestamp_pb2

from bough.v1 import error_pb2, event_pb2, execution_pb2, invocation_pb2, message_pb2, step_pb2, usage_pb2
from bough_server.log import events
from bough_server.store.ports.log import StoredEvent

AgentEvent = event_pb2.AgentEvent

RUN_ID = "run-1"
SESSION_ID = "session-1"


def at(second: int) -> timestamp_pb2.Timestamp:
    """A point in time that many seconds after the epoch."""
    return timestamp_pb2.Timestamp(seconds=second)


def says(text: str, *calls: message_pb2.ToolCall) -> message_pb2.Message:
    """An assistant's message: a text and the calls beside it."""
    parts = [message_pb2.Part(text=text)] if text else []
    parts.extend(message_pb2.Part(tool_call=call) for call in calls)
    return message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=parts)


def tokens(input_tokens: int, output_tokens: int, **counts: int) -> usage_pb2.Usage:
    """A usage as a provider reports it, or with the counts that an end carries."""
    usage = usage_pb2.Usage(input_tokens=input_tokens, output_tokens=output_tokens)
    for name, value in counts.items():
        setattr(usage, name, value)
    return usage


def failure(reason: error_pb2.ErrorReason.ValueType, message: str = "It went wrong.") -> error_pb2.AgentError:
    """An error."""
    return error_pb2.AgentError(reason=reason, message=message)


def result_of(
    call: message_pb2.ToolCall, *parts: message_pb2.Part, error: error_pb2.AgentError | None = None, child: str = ""
) -> message_pb2.ToolResult:
    """What a call gave."""
    return message_pb2.ToolResult(call=call, parts=parts, error=error, child_invocation_id=child)


def numbered(told: Iterable[AgentEvent]) -> list[AgentEvent]:
    """Copies of the events with sequences from 1, a second apart."""
    log = []
    for sequence, event in enumerate(told, start=1):
        copy = AgentEvent()
        copy.CopyFrom(event)
        copy.sequence = sequence
        copy.record_time.CopyFrom(at(sequence))
        log.append(copy)
    return log


def stored(log: Iterable[AgentEvent]) -> list[StoredEvent]:
    """Events as a log keeps them: without the ids of run and session."""
    rows = []
    for event in log:
        bare = AgentEvent()
        bare.CopyFrom(event)
        bare.ClearField("run_id")
        bare.ClearField("session_id")
        rows.append(StoredEvent(event.sequence, events.kind_of(event), bare.SerializeToString()))
    return rows


def stamped(log: Iterable[AgentEvent]) -> list[AgentEvent]:
    """The events with the ids of run and session."""
    copies = []
    for event in log:
        copy = AgentEvent(run_id=RUN_ID, session_id=SESSION_ID)
        copy.MergeFrom(event)
        copies.append(copy)
    return copies


def shape(record: invocation_pb2.Invocation) -> list[tuple[int, str, str]]:
    """The tree in preorder: depth, invocation id and name."""
    return [(agent.depth, agent.invocation_id, agent.name) for agent in record.agents]


ASK = message_pb2.ToolCall(call_id="ask", name="call_researcher", arguments_json='{"message": "Find it."}')
LOOK = message_pb2.ToolCall(call_id="look", name="search", arguments_json='{"q": "it"}')
QUESTION = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="What is it?")])


def desk() -> list[AgentEvent]:
    """A whole turn: the lead asks the researcher, who searches; then both answer."""
    return numbered((*_lead_asks(), *_researcher_works(), *_lead_answers()))


def _lead(**rest: object) -> AgentEvent:
    return AgentEvent(invocation_id="L", agent="lead", branch="lead", trace_id="a" * 32, span_id="b" * 16, **rest)  # type: ignore[arg-type]


def _researcher(**rest: object) -> AgentEvent:
    envelope = AgentEvent(
        invocation_id="C", parent_invocation_id="L", agent="researcher", branch="lead/researcher", depth=1
    )
    envelope.MergeFrom(AgentEvent(trace_id="a" * 32, span_id="c" * 16, **rest))  # type: ignore[arg-type]
    return envelope


def _step(lead: bool, index: int, **rest: object) -> AgentEvent:
    make = _lead if lead else _researcher
    key = f"s{index}.m" if lead else f"s0.t0/s{index}.m"
    return make(step_id=f"{'L' if lead else 'C'}-{index}", step_index=index, attempt=1, effect_key=key, **rest)


def _answer(text: str, usage: usage_pb2.Usage, *calls: message_pb2.ToolCall) -> event_pb2.LlmCompleted:
    response = step_pb2.LlmResponse(
        provider="scripted", model="m", message=says(text, *calls), usage=usage, raw_json='{"whole": true}'
    )
    return event_pb2.LlmCompleted(response=response)


def _recorded(step_id: str, index: int, text: str, *results: message_pb2.ToolResult) -> event_pb2.StepCompleted:
    response = step_pb2.LlmResponse(provider="scripted", model="m", message=says(text, *(one.call for one in results)))
    return event_pb2.StepCompleted(
        step=step_pb2.AgentStep(
            step_id=step_id,
            invocation_id=step_id[0],
            step_index=index,
            attempt=1,
            llm_response=response,
            tool_results=results,
        )
    )


def _lead_asks() -> Sequence[AgentEvent]:
    started = event_pb2.RunStarted(
        invocation_id="L",
        key_root="L",
        agent="lead",
        kind=execution_pb2.AGENT_KIND_LLM,
        run_path=["lead"],
        input=QUESTION,
        labels={"team": "desk"},
        definition_refs=[
            event_pb2.DefinitionRef(name="lead", revision="r1"),
            event_pb2.DefinitionRef(name="researcher", revision="r2"),
        ],
    )
    return (
        _lead(run_started=started),
        _step(True, 0, llm_started=event_pb2.LlmStarted(model="m", provider="scripted")),
        _step(True, 0, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="Let me ask.")),
        _step(True, 0, llm_completed=_answer("Let me ask.", tokens(10, 2), ASK)),
        _lead(step_id="L-0", effect_key="s0.t0", tool_started=event_pb2.ToolStarted(call=ASK)),
    )


def _researcher_works() -> Sequence[AgentEvent]:
    started = event_pb2.SubAgentStarted(
        kind=execution_pb2.AGENT_KIND_LLM,
        trigger=execution_pb2.INVOCATION_TRIGGER_TOOL,
        call_id="ask",
        run_path=["lead", "researcher"],
        input=says("Find it."),
    )
    found = result_of(LOOK, message_pb2.Part(data_json='{"it": 1}'))
    ended = event_pb2.SubAgentCompleted(
        output=says("It is one."),
        usage=tokens(30, 5, model_calls=2, tool_calls=1),
        tree_usage=tokens(30, 5, model_calls=2, tool_calls=1),
        duration=duration_pb2.Duration(seconds=9),
        step_id="C-1",
        end_reason=execution_pb2.END_REASON_ANSWERED,
    )
    return (
        _researcher(effect_key="s0.t0", sub_agent_started=started),
        _step(False, 0, llm_started=event_pb2.LlmStarted(model="m", provider="scripted")),
        _step(False, 0, llm_completed=_answer("", tokens(10, 1), LOOK)),
        _researcher(step_id="C-0", effect_key="s0.t0/s0.t0", tool_started=event_pb2.ToolStarted(call=LOOK)),
        _researcher(step_id="C-0", effect_key="s0.t0/s0.t0", tool_completed=event_pb2.ToolCompleted(result=found)),
        _step(False, 0, step_completed=_recorded("C-0", 0, "", found)),
        _step(False, 1, llm_started=event_pb2.LlmStarted(model="m", provider="scripted")),
        _step(False, 1, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="It is ")),
        _step(False, 1, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="one.")),
        _step(False, 1, llm_completed=_answer("It is one.", tokens(20, 4))),
        _step(False, 1, step_completed=_recorded("C-1", 1, "It is one.")),
        _researcher(effect_key="s0.t0", sub_agent_completed=ended),
    )


def _lead_answers() -> Sequence[AgentEvent]:
    told = result_of(ASK, message_pb2.Part(text="It is one."), child="C")
    ended = event_pb2.RunCompleted(
        final_answer=says("One."),
        usage=tokens(25, 3, model_calls=2, tool_calls=1),
        tree_usage=tokens(55, 8, model_calls=4, tool_calls=2),
        duration=duration_pb2.Duration(seconds=23),
        step_id="L-1",
        end_reason=execution_pb2.END_REASON_ANSWERED,
    )
    return (
        _lead(step_id="L-0", effect_key="s0.t0", tool_completed=event_pb2.ToolCompleted(result=told)),
        _step(True, 0, step_completed=_recorded("L-0", 0, "Let me ask.", told)),
        _step(True, 1, llm_started=event_pb2.LlmStarted(model="m", provider="scripted")),
        _step(True, 1, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="One.")),
        _step(True, 1, llm_completed=_answer("One.", tokens(15, 1))),
        _step(True, 1, step_completed=_recorded("L-1", 1, "One.")),
        _lead(run_completed=ended),
    )
