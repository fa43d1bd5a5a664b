"""Events as single lines for pipes and logs; each line depends on its event alone."""

from collections.abc import Callable, Mapping
from typing import Final

from bough.v1 import error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server.cli.render.format import clip, duration_text, enum_text, error_text, seconds_text
from bough_server.cli.render.graphs import place_text, targets_text
from bough_server.cli.render.notes import (
    answer_or_expiry_text,
    cancel_request_text,
    changes_text,
    compaction_text,
    content_text,
    ending_text,
    expiry_text,
    finish_text,
    first_member_text,
    fork_text,
    interruption_text,
    iteration_text,
    kind_text,
    queue_text,
    request_text,
    result_text,
    resume_text,
    retry_text,
    steps_text,
)
from bough_server.log.events import name_of
from bough_server.plain_text import one_line

AgentEvent = event_pb2.AgentEvent
_WIDTH: Final = 160
_ERRORS: Final = frozenset(
    {
        *("run_failed", "run_cancelled", "sub_agent_failed", "llm_retrying", "llm_failed", "tool_failed"),
        *("step_failed", "node_failed"),
    }
)
"""Payloads whose gist is an error."""


def plain_line(event: AgentEvent) -> str:
    """Return an event on one line: sequence, UTC time, branch, dotted name and gist."""
    describe = _GISTS.get(event.WhichOneof("payload") or "")
    gist = describe(event) if describe is not None else ""
    attempt = f" (attempt {event.attempt})" if event.attempt > 1 else ""
    name = name_of(event) or "unknown"
    moment = event.record_time.ToDatetime().strftime("%H:%M:%S.%f")[:-3]
    line = f"{event.sequence:>5} {moment} {event.branch or '-'} {name}{attempt}"
    # An error is what a reader looks for in a log: it is never cut.
    text = one_line(gist) if event.WhichOneof("payload") in _ERRORS else clip(one_line(gist), _WIDTH)
    return f"{line} {text}".rstrip()


def _describe_retry(event: AgentEvent) -> str:
    retrying = event.llm_retrying
    whom = f" with {retrying.next_model}" if retrying.next_model else ""
    delay = seconds_text(retrying.delay.ToTimedelta().total_seconds())
    return f"{retry_text(retrying.reason)}: {retrying.error.message} (again{whom} in {delay})"


def _prefix_note(note: str, text: str) -> str:
    return f"({note}) {text}" if note else text


def _describe_start(started: event_pb2.RunStarted) -> str:
    first = first_member_text(started.starts_with) if started.starts_with else ""
    return ", ".join(filter(None, [kind_text(started.kind), first]))


def _describe_cancellation(reason: execution_pb2.CancelReason.ValueType, error: error_pb2.AgentError) -> str:
    known = reason != execution_pb2.CANCEL_REASON_UNSPECIFIED
    return _prefix_note(enum_text(execution_pb2.CancelReason.DESCRIPTOR, reason) if known else "", error_text(error))


def _describe_tool_end(result: message_pb2.ToolResult) -> str:
    return f"{result.call.name} {duration_text(result.duration)} {result_text(result)}"


def _describe_request(event: AgentEvent) -> str:
    request = event.input_requested.request
    return f"{request_text(request)} {expiry_text(request)}".rstrip()


def _describe_node_end(event: AgentEvent) -> str:
    completed = event.node_completed
    return f"{place_text(completed)} {targets_text(completed.targets)} {completed.output_json}"


_GISTS: Final[Mapping[str, Callable[[AgentEvent], str]]] = {
    "run_started": lambda e: _prefix_note(_describe_start(e.run_started), content_text(e.run_started.input)),
    "run_dequeued": lambda e: first_member_text(e.run_dequeued.starts_with) if e.run_dequeued.starts_with else "",
    "run_queued": lambda e: queue_text(e.run_queued),
    "run_resumed": lambda e: resume_text(e.run_resumed),
    "run_forked": lambda e: fork_text(e.run_forked),
    "run_interrupted": lambda e: interruption_text(e.run_interrupted),
    "run_completed": lambda e: _prefix_note(
        ending_text(e.run_completed.end_reason), content_text(e.run_completed.final_answer)
    ),
    "run_failed": lambda e: error_text(e.run_failed.error),
    "run_cancelled": lambda e: _describe_cancellation(e.run_cancelled.cancel_reason, e.run_cancelled.error),
    "sub_agent_started": lambda e: _prefix_note(
        kind_text(e.sub_agent_started.kind), content_text(e.sub_agent_started.input)
    ),
    "sub_agent_partial": lambda e: e.sub_agent_partial.text,
    "sub_agent_completed": lambda e: _prefix_note(
        ending_text(e.sub_agent_completed.end_reason), content_text(e.sub_agent_completed.output)
    ),
    "sub_agent_failed": lambda e: _describe_cancellation(e.sub_agent_failed.cancel_reason, e.sub_agent_failed.error),
    "llm_started": lambda e: f"{e.llm_started.provider}/{e.llm_started.model}",
    "llm_output_text_delta": lambda e: e.llm_output_text_delta.text,
    "llm_reasoning_delta": lambda e: e.llm_reasoning_delta.text,
    "llm_tool_call_delta": lambda e: f"{e.llm_tool_call_delta.name} {e.llm_tool_call_delta.arguments_delta}",
    "llm_retrying": _describe_retry,
    "llm_completed": lambda e: _prefix_note(
        finish_text(e.llm_completed.response), content_text(e.llm_completed.response.message)
    ),
    "llm_failed": lambda e: error_text(e.llm_failed.error),
    "tool_started": lambda e: f"{e.tool_started.call.name} {e.tool_started.call.arguments_json}",
    "tool_output": lambda e: e.tool_output.text,
    "tool_completed": lambda e: _describe_tool_end(e.tool_completed.result),
    "tool_failed": lambda e: _describe_tool_end(e.tool_failed.result),
    "step_failed": lambda e: error_text(e.step_failed.error),
    "input_requested": _describe_request,
    "input_received": lambda e: answer_or_expiry_text(e.input_received.answer),
    "value_recorded": lambda e: e.value_recorded.value_json or error_text(e.value_recorded.error),
    "cancel_requested": lambda e: cancel_request_text(e.cancel_requested),
    "agent_transferred": lambda e: f"{e.agent_transferred.from_agent} to {e.agent_transferred.to_agent}",
    "loop_iteration_started": lambda e: iteration_text(e.loop_iteration_started),
    "plan_made": lambda e: steps_text(e.plan_made.items),
    "plan_revised": lambda e: steps_text(e.plan_revised.items),
    "node_started": lambda e: f"{place_text(e.node_started)} {e.node_started.input_json}",
    "node_completed": _describe_node_end,
    "node_failed": lambda e: f"{place_text(e.node_failed)} {error_text(e.node_failed.error)}",
    "session_state_changed": lambda e: changes_text(e.session_state_changed.state_changes),
    "history_compacted": lambda e: compaction_text(e.history_compacted),
}
