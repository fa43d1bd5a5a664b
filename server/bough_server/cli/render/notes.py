"""Short phrases for events and agent kinds."""

import json
from collections.abc import Sequence
from typing import Final

from bough import text_of
from bough.v1 import event_pb2, execution_pb2, fork_pb2, input_pb2, message_pb2, session_pb2, step_pb2
from bough_server.cli.render.format import enum_text, error_text, pluralize, time_text
from bough_server.log.blobs import file_text
from bough_server.plain_text import one_line

_RESUMED: Final = {
    event_pb2.RESUME_CAUSE_RECOVERY: "continued after its server was lost",
    event_pb2.RESUME_CAUSE_ANSWER: "continued with an answer",
    event_pb2.RESUME_CAUSE_TAKEOVER: "continued by another server",
}

_ENDINGS: Final = {
    execution_pb2.END_REASON_EXITED: "exited",
    execution_pb2.END_REASON_TRANSFERRED: "transferred",
    execution_pb2.END_REASON_BROKE_LOOP: "broke the loop",
    execution_pb2.END_REASON_ITERATIONS_EXHAUSTED: "iterations used up",
}
_UNNAMED_KINDS: Final = (execution_pb2.AGENT_KIND_UNSPECIFIED, execution_pb2.AGENT_KIND_LLM)
_FINISHED: Final = (
    step_pb2.FINISH_REASON_UNSPECIFIED,
    step_pb2.FINISH_REASON_STOP,
    step_pb2.FINISH_REASON_TOOL_CALLS,
)
"""Finish reasons of answers that the model completed."""


def first_member_text(member: str) -> str:
    """Say which member a run starts with instead of its usual start."""
    return f"starts with {member}, who spoke last"


def queue_text(queued: event_pb2.RunQueued) -> str:
    """Describe what a queued run waits for."""
    return f"waits for its session, behind run {queued.behind_run_id}"


def resume_text(resumed: event_pb2.RunResumed) -> str:
    """Describe why a run continues."""
    return _RESUMED.get(resumed.cause, "continued")


def fork_text(forked: event_pb2.RunForked) -> str:
    """Describe a fork's origin and its changes."""
    changes = "; ".join([*_changes(forked.changes), *(["another policy"] if forked.HasField("policy") else [])])
    return f"fork of run {forked.origin.run_id} after {forked.origin.sequence}" + (f": {changes}" if changes else "")


def interruption_text(interrupted: event_pb2.RunInterrupted) -> str:
    """Describe how many answers a run waits for."""
    return f"waits for {pluralize(len(interrupted.requests), 'answer')}"


def asker_text(request: input_pb2.InputRequest) -> str:
    """Return the names of the agents from the root to the one that asks."""
    return "/".join(request.agent_path) or "?"


def request_text(request: input_pb2.InputRequest) -> str:
    """Describe a request on one line."""
    call = call_text(request.call)
    match request.kind:
        case input_pb2.INPUT_KIND_APPROVAL:
            return f"asks for approval of {call}"
        case input_pb2.INPUT_KIND_CLIENT_TOOL:
            return f"asks the client to run {call}"
        case input_pb2.INPUT_KIND_RECOVERY:
            return f"asks whether {call} may run again: its server was lost while it ran"
        case _:
            return f"asks: {one_line(request.prompt)}"


def expiry_text(request: input_pb2.InputRequest) -> str:
    """Describe when a request expires and what happens then; empty if it does not expire."""
    if not request.HasField("expire_time"):
        return ""
    then = answer_text(request.default_answer) if request.HasField("default_answer") else "it counts as not answered"
    return f"until {time_text(request.expire_time)} UTC; then {then}"


def answer_or_expiry_text(answer: input_pb2.InputAnswer) -> str:
    """Describe the answer to a request, or that it expired."""
    if answer.source != input_pb2.ANSWER_SOURCE_EXPIRY:
        return answer_text(answer)
    default = answer_text(answer) if answer.WhichOneof("answer") else ""
    return f"no answer in time{': ' if default else ''}{default}"


def answer_text(answer: input_pb2.InputAnswer) -> str:
    """Describe an answer on one line."""
    match answer.WhichOneof("answer"):
        case "approval":
            return _approval(answer.approval)
        case "tool_outcome":
            return f"result: {one_line(outcome_text(answer.tool_outcome))}"
        case "value_json":
            return f"answered: {one_line(_plain(answer.value_json))}"
        case _:
            return "not answered"


def call_text(call: message_pb2.ToolCall) -> str:
    """Return a call's name and its arguments, if it has any, on one line."""
    arguments = one_line(call.arguments_json)
    return f"{call.name} {'' if arguments == '{}' else arguments}".rstrip()


def result_text(result: message_pb2.ToolResult) -> str:
    """Return a tool's result as text: its error, its parts, or both."""
    error = error_text(result.error) if result.HasField("error") else ""
    return _with_parts(error, result.parts)


def outcome_text(outcome: message_pb2.ToolOutcome) -> str:
    """Return a tool outcome reported by a caller as text: its failure, its parts, or both."""
    failure = (one_line(outcome.failure.message) or "failed") if outcome.HasField("failure") else ""
    return _with_parts(failure, outcome.parts)


def parts_text(result: message_pb2.ToolResult) -> str:
    """Return what a tool returned as text, without its error."""
    return content_text(message_pb2.Message(parts=result.parts))


def content_text(message: message_pb2.Message) -> str:
    """Return the text of a message, then a description of each of its files, such as "[image/png, 300 KB]"."""
    return " ".join(filter(None, (text_of(message), *file_texts(message))))


def file_texts(message: message_pb2.Message) -> list[str]:
    """Describe each file of a message."""
    return [file_text(part.blob) for part in message.parts if part.HasField("blob")]


def _with_parts(failure: str, parts: Sequence[message_pb2.Part]) -> str:
    text = content_text(message_pb2.Message(parts=parts))
    return f"{failure}; {text}" if failure and text else failure or text


def _approval(approval: input_pb2.ApprovalDecision) -> str:
    words = "approved" if approval.approved else "refused"
    if approval.arguments_json:
        words += f" with {one_line(approval.arguments_json)}"
    return f"{words}: {one_line(approval.note)}" if approval.note else words


def _changes(changes: fork_pb2.ForkChanges) -> list[str]:
    agents = sorted(changes.agents.items())
    changed = [f"model of {name} is {agent.model}" for name, agent in agents if agent.HasField("model")]
    changed += [f"another instruction of {name}" for name, agent in agents if agent.HasField("instruction")]
    if changes.HasField("input"):
        changed.append(f"input {one_line(content_text(changes.input))}")
    return changed + [
        f"result of {edit.call_id}: {one_line(outcome_text(edit.outcome))}" for edit in changes.tool_results
    ]


def _plain(value_json: str) -> str:
    """Return the content of a JSON string, and any other JSON unchanged."""
    try:
        value = json.loads(value_json)
    except (ValueError, RecursionError):
        return value_json
    return value if isinstance(value, str) else value_json


def kind_text(kind: execution_pb2.AgentKind.ValueType) -> str:
    """Return an agent's kind as definitions name it; empty for `llm` and for an unset kind."""
    return "" if kind in _UNNAMED_KINDS else enum_text(execution_pb2.AgentKind.DESCRIPTOR, kind)


def ending_text(
    reason: execution_pb2.EndReason.ValueType,
    kind: execution_pb2.AgentKind.ValueType = execution_pb2.AGENT_KIND_UNSPECIFIED,
) -> str:
    """Describe how an agent of a kind ended; empty if it answered, or if its state and error already say it."""
    if kind == execution_pb2.AGENT_KIND_LOOP and reason == execution_pb2.END_REASON_BROKE_LOOP:
        return "ended by a break"
    return _ENDINGS.get(reason, "")


def iteration_text(started: event_pb2.LoopIterationStarted) -> str:
    """Describe which iteration of a loop begins, counted from 1 for users."""
    return f"iteration {started.iteration + 1}"


def steps_text(items: Sequence[event_pb2.PlanItem]) -> str:
    """Return a plan on one line."""
    steps = "; ".join(one_line(item.text) for item in items)
    return f"{pluralize(len(items), 'step')}: {steps}" if steps else "nothing"


def changes_text(changes: Sequence[session_pb2.SessionStateChange]) -> str:
    """Describe changes of the session state on one line."""
    return ", ".join(
        f"{change.key} = {one_line(change.value_json)}" if change.HasField("value_json") else f"{change.key} deleted"
        for change in changes
    )


def compaction_text(compacted: event_pb2.HistoryCompacted) -> str:
    """Describe which messages a summary replaces, followed by the summary, on one line."""
    covered, replaced = [], compacted.summary.summary_range
    if replaced.to_position:
        covered.append(f"messages {replaced.from_position} to {replaced.to_position} of the session")
    if compacted.run_message_count:
        covered.append(f"{pluralize(compacted.run_message_count, 'message')} of this run")
    summary = one_line(text_of(compacted.summary))
    return f"summarized {' and '.join(covered) or 'nothing'}" + (f": {summary}" if summary else "")


def retry_text(reason: event_pb2.RetryReason.ValueType) -> str:
    """Return why a model call is retried, such as "rate_limited"."""
    return enum_text(event_pb2.RetryReason.DESCRIPTOR, reason)


def cancellation_text(reason: execution_pb2.CancelReason.ValueType) -> str:
    """Describe a cancellation and its reason, such as "cancelled: fail_fast"."""
    if reason == execution_pb2.CANCEL_REASON_UNSPECIFIED:
        return "cancelled"
    return f"cancelled: {enum_text(execution_pb2.CancelReason.DESCRIPTOR, reason)}"


def cancel_request_text(requested: event_pb2.CancelRequested) -> str:
    """Describe a requested cancellation: its reason, who requested it and with which note, as far as recorded."""
    words = enum_text(execution_pb2.CancelReason.DESCRIPTOR, requested.reason)
    words += f" by {one_line(requested.requested_by)}" if requested.requested_by else ""
    words += f" by run {requested.by_run_id}" if requested.by_run_id else ""
    return f"{words}: {one_line(requested.note)}" if requested.note else words


def finish_text(response: step_pb2.LlmResponse) -> str:
    """Return why a model stopped early, such as "length"; empty if it completed its answer or gave no reason."""
    if response.finish_reason in _FINISHED:
        return ""
    if response.finish_reason == step_pb2.FINISH_REASON_OTHER and response.provider_finish_reason:
        return f"other: {one_line(response.provider_finish_reason)}"
    return enum_text(step_pb2.FinishReason.DESCRIPTOR, response.finish_reason)
