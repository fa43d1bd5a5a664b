"""One whole turn that waits, asks, is answered and is recovered, for tests of pure readers; it runs nothing."""

from collections.abc import Sequence

from bough.v1 import event_pb2, execution_pb2, input_pb2, message_pb2, step_pb2, usage_pb2
from tests.support.logs import QUESTION, AgentEvent, numbered, result_of, says, tokens

DELEGATE = message_pb2.ToolCall(call_id="delegate", name="call_clerk", arguments_json='{"message": "Look."}')
PAY = message_pb2.ToolCall(call_id="pay", name="pay", arguments_json='{"amount": 7}')
SCAN = message_pb2.ToolCall(call_id="scan", name="scan", arguments_json="{}")

APPROVAL = input_pb2.InputRequest(
    input_id="may-pay", invocation_id="L", call_id="pay", kind=input_pb2.INPUT_KIND_APPROVAL, call=PAY
)
CLIENT_TOOL = input_pb2.InputRequest(
    input_id="do-scan", invocation_id="L", call_id="scan", kind=input_pb2.INPUT_KIND_CLIENT_TOOL, call=SCAN
)
WHICH = input_pb2.InputRequest(
    input_id="which", invocation_id="C", kind=input_pb2.INPUT_KIND_QUESTION, prompt="Which one?"
)


def lead(**rest: object) -> AgentEvent:
    """An event of the root's."""
    return AgentEvent(invocation_id="L", agent="lead", branch="lead", **rest)  # type: ignore[arg-type]


def clerk(**rest: object) -> AgentEvent:
    """An event of the sub-agent's."""
    envelope = AgentEvent(invocation_id="C", parent_invocation_id="L", agent="clerk", branch="lead/clerk", depth=1)
    envelope.MergeFrom(AgentEvent(**rest))  # type: ignore[arg-type]
    return envelope


def requested(request: input_pb2.InputRequest) -> event_pb2.InputRequested:
    """The payload that records a request."""
    return event_pb2.InputRequested(request=request)


def received(request: input_pb2.InputRequest) -> event_pb2.InputReceived:
    """The payload that records some answer to a request."""
    return event_pb2.InputReceived(answer=input_pb2.InputAnswer(input_id=request.input_id))


def interrupted(*requests: input_pb2.InputRequest) -> AgentEvent:
    """The run waits for these."""
    return lead(run_interrupted=event_pb2.RunInterrupted(requests=requests))


def resumed(cause: event_pb2.ResumeCause.ValueType) -> AgentEvent:
    """The run is continued."""
    return lead(run_resumed=event_pb2.RunResumed(cause=cause))


def answered(text: str, usage: usage_pb2.Usage, *calls: message_pb2.ToolCall) -> event_pb2.LlmCompleted:
    """The payload of a model's answer."""
    return event_pb2.LlmCompleted(response=step_pb2.LlmResponse(message=says(text, *calls), usage=usage))


def told(call: message_pb2.ToolCall, text: str, child: str = "") -> event_pb2.ToolCompleted:
    """The payload of a call's good end."""
    return event_pb2.ToolCompleted(result=result_of(call, message_pb2.Part(text=text), child=child))


def asking_desk() -> list[AgentEvent]:
    """A whole turn: it is queued; the lead calls the clerk, who asks a question, a tool that needs an approval and is
    running when the server dies, and a tool of the client's; the last model call is lost to another crash."""
    return numbered((*_asks(), *_is_answered(), *_answers()))


def _asks() -> Sequence[AgentEvent]:
    started = event_pb2.RunStarted(
        invocation_id="L",
        key_root="L",
        agent="lead",
        kind=execution_pb2.AGENT_KIND_LLM,
        input=QUESTION,
        labels={"team": "desk"},
        definition_refs=[
            event_pb2.DefinitionRef(name="lead", revision="l1"),
            event_pb2.DefinitionRef(name="clerk", revision="c1"),
        ],
    )
    return (
        lead(run_started=started),
        lead(run_queued=event_pb2.RunQueued(behind_run_id="other")),
        lead(run_dequeued=event_pb2.RunDequeued(session_cut=4)),
        lead(step_id="L-0", effect_key="s0.m", attempt=1, llm_started=event_pb2.LlmStarted()),
        lead(
            step_id="L-0", effect_key="s0.m", attempt=1, llm_completed=answered("", tokens(9, 3), DELEGATE, PAY, SCAN)
        ),
        lead(step_id="L-0", effect_key="s0.t0", attempt=1, tool_started=event_pb2.ToolStarted(call=DELEGATE)),
        clerk(effect_key="s0.t0", sub_agent_started=event_pb2.SubAgentStarted(call_id="delegate")),
        lead(step_id="L-0", effect_key="s0.t1.ok", input_requested=requested(APPROVAL)),
        lead(step_id="L-0", effect_key="s0.t2", input_requested=requested(CLIENT_TOOL)),
        clerk(effect_key="s0.t0/e0", input_requested=requested(WHICH)),
        interrupted(APPROVAL, CLIENT_TOOL, WHICH),
    )


def _is_answered() -> Sequence[AgentEvent]:
    pays = event_pb2.ToolStarted(call=PAY, idempotency_key="once")
    return (
        resumed(event_pb2.RESUME_CAUSE_ANSWER),
        lead(step_id="L-0", effect_key="s0.t1.ok", input_received=received(APPROVAL)),
        lead(step_id="L-0", effect_key="s0.t1", attempt=1, tool_started=pays),
        resumed(event_pb2.RESUME_CAUSE_RECOVERY),
        lead(step_id="L-0", effect_key="s0.t1", attempt=2, tool_started=pays),
        lead(step_id="L-0", effect_key="s0.t1", attempt=2, tool_completed=told(PAY, "paid")),
        interrupted(CLIENT_TOOL, WHICH),
        resumed(event_pb2.RESUME_CAUSE_ANSWER),
        clerk(effect_key="s0.t0/e0", input_received=received(WHICH)),
        clerk(effect_key="s0.t0", sub_agent_completed=event_pb2.SubAgentCompleted(output=says("That one."))),
        lead(step_id="L-0", effect_key="s0.t0", attempt=1, tool_completed=told(DELEGATE, "That one.", "C")),
        lead(step_id="L-0", effect_key="s0.t2", input_received=received(CLIENT_TOOL)),
        lead(step_id="L-0", effect_key="s0.t2", tool_completed=told(SCAN, "scanned")),
        lead(step_id="L-0", effect_key="s0.m", attempt=1, step_completed=event_pb2.StepCompleted()),
    )


def _answers() -> Sequence[AgentEvent]:
    ended = event_pb2.RunCompleted(
        final_answer=says("Done."),
        usage=tokens(20, 5, model_calls=3, model_calls_without_usage=1, tool_calls=2),
        end_reason=execution_pb2.END_REASON_ANSWERED,
    )
    place = {"step_id": "L-1", "step_index": 1, "effect_key": "s1.m"}
    recovered = event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_RECOVERED)
    return (
        lead(**place, attempt=1, llm_started=event_pb2.LlmStarted()),
        lead(step_id="L-1", step_index=1, attempt=1, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="Do")),
        resumed(event_pb2.RESUME_CAUSE_RECOVERY),
        lead(**place, attempt=2, llm_retrying=recovered),
        lead(step_id="L-1", step_index=1, attempt=2, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="Done.")),
        lead(**place, attempt=2, llm_completed=answered("Done.", tokens(11, 2))),
        lead(**place, attempt=2, step_completed=event_pb2.StepCompleted()),
        lead(run_completed=ended),
    )
