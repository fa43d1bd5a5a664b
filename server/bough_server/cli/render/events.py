"""Lines of model, tool and control events in the live view."""

from collections.abc import Sequence
from typing import Final

from bough import text_of
from bough.v1 import event_pb2, execution_pb2, message_pb2
from bough_server.cli.render.blocks import STARTING, AgentBlocks, AgentLane, Handlers, Running, TextWrapper
from bough_server.cli.render.format import clip, duration_text, pluralize, seconds_text
from bough_server.cli.render.graphs import place_text, targets_text
from bough_server.cli.render.notes import (
    answer_or_expiry_text,
    cancel_request_text,
    changes_text,
    compaction_text,
    expiry_text,
    finish_text,
    first_member_text,
    fork_text,
    interruption_text,
    iteration_text,
    parts_text,
    queue_text,
    request_text,
    result_text,
    resume_text,
    retry_text,
)
from bough_server.plain_text import one_line
from bough_server.tools.builtin import TRANSFER

AgentEvent = event_pb2.AgentEvent
_PLAN_KEYS: Final = ("plan", "executed_steps")
_MAX_STEPS: Final = 8


def _on_input_requested(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    request = event.input_requested.request
    blocks.flush(lane)
    blocks.write_line(lane, f"? {request_text(request)}", "magenta")
    if expiry := expiry_text(request):
        blocks.write_line(lane, f"  {expiry}", "dim")
    lane.wait_for("waiting for an answer", now)


def _on_input_received(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, f"! {one_line(answer_or_expiry_text(event.input_received.answer))}", "magenta")
    lane.activity = ""


def _on_run_queued(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, f"… {queue_text(event.run_queued)}", "dim")
    lane.wait_for("waiting for its session", now)


def _on_run_dequeued(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, "… its session is free", "dim")
    if event.run_dequeued.starts_with:
        blocks.write_line(lane, f"⇢ {first_member_text(event.run_dequeued.starts_with)}", "cyan")
    lane.wait_for(STARTING, now)


def _on_run_forked(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, f"⑂ {one_line(fork_text(event.run_forked))}", "yellow")
    lane.forked_ns = event.record_time.ToNanoseconds()


def _on_run_resumed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    # Effects in flight start again and record new events; only their incomplete lines have to be dropped.
    for known in blocks.lanes:
        known.text.finish()
        known.tools.clear()
        known.activity = ""
    blocks.write_line(lane, f"↻ {resume_text(event.run_resumed)}", "yellow")


def _on_run_interrupted(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, f"‖ {interruption_text(event.run_interrupted)}", "magenta")
    for known in blocks.lanes:
        known.activity = ""


def _on_cancel_requested(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, f"■ stopping: {cancel_request_text(event.cancel_requested)}", "yellow")


def _on_agent_transferred(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    transfer = event.agent_transferred
    # A swarm records the transfers of its members: name the member.
    who = "" if transfer.from_agent in ("", event.agent) else f"{transfer.from_agent} "
    blocks.flush(lane)
    blocks.write_line(lane, f"⇢ {who}transfers to {transfer.to_agent}", "cyan")


def _on_loop_iteration_started(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, f"○ {iteration_text(event.loop_iteration_started)}", "dim")


def _on_plan_made(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    _write_plan(blocks, lane, event.plan_made.items, "planned")


def _on_plan_revised(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    _write_plan(blocks, lane, event.plan_revised.items, "left to do")


def _write_plan(blocks: AgentBlocks, lane: AgentLane, items: Sequence[event_pb2.PlanItem], what: str) -> None:
    blocks.write_line(lane, f"≡ {what}: {pluralize(len(items), 'step')}", "cyan")
    for number, item in enumerate(items[:_MAX_STEPS], start=1):
        blocks.write_line(lane, f"  {number}. {one_line(item.text)}")
    if len(items) > _MAX_STEPS:
        blocks.write_line(lane, f"  … and {len(items) - _MAX_STEPS} more", "dim")


def _on_node_started(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.flush(lane)
    blocks.write_line(lane, f"◇ {place_text(event.node_started)}", "dim")


def _on_node_completed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    completed = event.node_completed
    went, output = targets_text(completed.targets), one_line(completed.output_json)
    text = clip(f"{place_text(completed)} {went}  {output}", blocks.room(lane) - 2)
    blocks.write_line(lane, f"◆ {text}", "cyan")


def _on_node_failed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    failed = event.node_failed
    handled = f" -> {failed.error_target}" if failed.error_target else ""
    blocks.write_error(lane, f"✗ {place_text(failed)}{handled}  {blocks.format_error(failed.error)}")


def _on_session_state_changed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    # A plan_execute agent stores its plan in the session state; it is shown as the plan already.
    hidden = _PLAN_KEYS if lane.kind == execution_pb2.AGENT_KIND_PLAN_EXECUTE else ()
    if changes := [change for change in event.session_state_changed.state_changes if change.key not in hidden]:
        blocks.write_line(lane, f"≔ {changes_text(changes)}", "dim")


def _on_history_compacted(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.write_line(lane, f"≈ {compaction_text(event.history_compacted)}", "dim")


CONTROL_EVENTS: Final[Handlers] = {
    "input_requested": _on_input_requested,
    "input_received": _on_input_received,
    "run_queued": _on_run_queued,
    "run_dequeued": _on_run_dequeued,
    "run_forked": _on_run_forked,
    "run_resumed": _on_run_resumed,
    "run_interrupted": _on_run_interrupted,
    "cancel_requested": _on_cancel_requested,
    "agent_transferred": _on_agent_transferred,
    "loop_iteration_started": _on_loop_iteration_started,
    "plan_made": _on_plan_made,
    "plan_revised": _on_plan_revised,
    "node_started": _on_node_started,
    "node_completed": _on_node_completed,
    "node_failed": _on_node_failed,
    "session_state_changed": _on_session_state_changed,
    "history_compacted": _on_history_compacted,
}
"""Handlers of control events."""


def _on_output_text_delta(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.add_text(event, lane, "text", event.llm_output_text_delta.text)


def _on_sub_agent_partial(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.add_text(event, lane, "text", event.sub_agent_partial.text)


def _on_reasoning_delta(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.add_text(event, lane, "reasoning", event.llm_reasoning_delta.text)


def _on_tool_call_delta(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    if event.llm_tool_call_delta.name:
        blocks.flush(lane)
        lane.wait_for(f"writing a call of {event.llm_tool_call_delta.name}", now)


def _on_llm_started(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.flush(lane)
    started = event.llm_started
    lane.model = started.model
    what = "waiting for" if event.step_id else "summarizing with"
    lane.wait_for(f"{what} {'/'.join(name for name in (started.provider, started.model) if name)}", now)


def _on_llm_retrying(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    retrying = event.llm_retrying
    is_another = bool(retrying.next_model and lane.model and retrying.next_model != lane.model)
    lane.model = retrying.next_model or lane.model
    what = f"continuing with {retrying.next_model}" if is_another else f"retry {event.attempt - 1}"
    seconds = retrying.delay.ToTimedelta().total_seconds()
    wait = f" in {seconds_text(seconds)}" if seconds > 0 else ""
    why = retry_text(retrying.reason).replace("_", " ")
    message = one_line(retrying.error.message)
    shown = "" if message == lane.retried else message
    lane.retried = message
    blocks.write_error(lane, f"↻ {what}{wait}: {why}: {shown}".rstrip(": "), "yellow")
    if event.step_id:  # otherwise it is the call of a summary, whose text is not shown
        blocks.begin_again(event, lane)
    if seconds > 0:
        lane.wait_for(what, now, seconds=seconds, reason=why)
    else:
        lane.wait_for(f"waiting for {retrying.next_model}" if is_another else "waiting to try again", now)


def _on_llm_completed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    text = text_of(event.llm_completed.response.message)
    shown = lane.attempts.get(event.step_id)
    is_shown = shown is not None and shown.has_text and shown.number == event.attempt
    # An answer outside of a step is a summary, not text of the agent. Streamed text is on the screen already.
    if text and event.step_id and not is_shown:
        blocks.add_text(event, lane, "text", text)
    blocks.flush(lane)
    if finished := finish_text(event.llm_completed.response):
        blocks.write_line(lane, f"! finish reason {finished}", "yellow")
    lane.activity = ""


def _on_llm_failed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.flush(lane)
    blocks.write_error(lane, f"✗ model: {blocks.format_error(event.llm_failed.error)}")
    lane.activity = ""


def _on_tool_started(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.flush(lane)
    call = event.tool_started.call
    arguments = one_line(call.arguments_json)
    blocks.write_line(lane, f"→ {call.name} {'' if arguments == '{}' else arguments}".rstrip(), "blue")
    output = TextWrapper(blocks.room(lane) - 2)
    lane.tools[call.call_id] = Running(name=call.name, since=now, output=output)


def _on_tool_output(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    running = lane.tools.get(event.tool_output.call_id)
    for line in running.output.add(event.tool_output.text) if running else ():
        blocks.write_line(lane, f"┊ {line}", "dim")


def _on_tool_completed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    result = event.tool_completed.result
    if result.call.name == TRANSFER:
        lane.tools.pop(result.call.call_id, None)  # the transfer itself comes next
    else:
        _write_tool_result(blocks, lane, result)


def _on_tool_failed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    result = event.tool_failed.result
    _end_output(blocks, lane, result)
    parts = one_line(parts_text(result))
    text = f"✗ {result.call.name}  {blocks.format_error(result.error)}{f'; {parts}' if parts else ''}"
    blocks.write_error(lane, text + _format_duration(result))


def _write_tool_result(blocks: AgentBlocks, lane: AgentLane, result: message_pb2.ToolResult) -> None:
    _end_output(blocks, lane, result)
    took = _format_duration(result)
    # The answer of a sub-agent is right above, in its own block.
    shown = "" if result.child_invocation_id else one_line(result_text(result))
    text = clip(f"{result.call.name}  {shown}".rstrip(), blocks.room(lane) - len(took) - 2)
    blocks.write_line(lane, f"← {text}{took}", "blue")


def _end_output(blocks: AgentBlocks, lane: AgentLane, result: message_pb2.ToolResult) -> None:
    running = lane.tools.pop(result.call.call_id, None)
    for line in running.output.finish() if running else ():
        blocks.write_line(lane, f"┊ {line}", "dim")


def _format_duration(result: message_pb2.ToolResult) -> str:
    return f"  {duration_text(result.duration)}" if result.HasField("duration") else ""


CALL_EVENTS: Final[Handlers] = {
    "llm_started": _on_llm_started,
    "llm_output_text_delta": _on_output_text_delta,
    "sub_agent_partial": _on_sub_agent_partial,
    "llm_reasoning_delta": _on_reasoning_delta,
    "llm_tool_call_delta": _on_tool_call_delta,
    "llm_retrying": _on_llm_retrying,
    "llm_completed": _on_llm_completed,
    "llm_failed": _on_llm_failed,
    "tool_started": _on_tool_started,
    "tool_output": _on_tool_output,
    "tool_completed": _on_tool_completed,
    "tool_failed": _on_tool_failed,
}
"""Handlers of model and tool events."""
