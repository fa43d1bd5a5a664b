"""Model, tool and control events as lines."""

from collections.abc import Sequence
from typing import Final

from bough import text_of
from bough.v1 import event_pb2, execution_pb2, message_pb2
from bough_server.cli.render.blocks import STARTING, AgentBlocks, AgentLane, Handlers, Running, TextWrapper
from bough_server.cli.render.format import clip, counted, duration_text, error_text, one_line
from bough_server.cli.render.notes import (
    cancelling_text,
    changes_text,
    compacted_text,
    expiry_text,
    finish_text,
    forked_text,
    interrupted_text,
    iteration_text,
    queued_text,
    received_text,
    request_text,
    result_text,
    resumed_text,
    retry_text,
)
from bough_server.tools.builtin import TRANSFER

AgentEvent = event_pb2.AgentEvent
_KEPT_OF_PLANS: Final = ("plan", "executed_steps")
_MOST_STEPS: Final = 8


def _requested(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    request = event.input_requested.request
    blocks.flush(speaker)
    blocks.say(speaker, f"? {request_text(request)}", "magenta")
    if expiry := expiry_text(request):
        blocks.say(speaker, f"  {expiry}", "dim")
    speaker.wait_for("waiting for an answer", now)


def _received(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, f"! {one_line(received_text(event.input_received.answer))}", "magenta")
    speaker.activity = ""


def _queued(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, f"… {queued_text(event.run_queued)}", "dim")
    speaker.wait_for("waiting for its session", now)


def _dequeued(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, "… its session is free", "dim")
    speaker.wait_for(STARTING, now)


def _forked(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, f"⑂ {one_line(forked_text(event.run_forked))}", "yellow")
    speaker.forked_ns = event.record_time.ToNanoseconds()


def _resumed(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    # What was in flight begins again and says so; of what it said before, only whole lines were shown.
    for known in blocks.speakers:
        known.speech.finish()
        known.tools.clear()
        known.activity = ""
    blocks.say(speaker, f"↻ {resumed_text(event.run_resumed)}", "yellow")


def _interrupted(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, f"‖ {interrupted_text(event.run_interrupted)}", "magenta")
    for known in blocks.speakers:
        known.activity = ""


def _cancelling(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, f"■ stopping: {cancelling_text(event.cancel_requested)}", "yellow")


def _transferred(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    transfer = event.agent_transferred
    # A swarm says it, of one of its members.
    who = "" if transfer.from_agent in ("", event.agent) else f"{transfer.from_agent} "
    blocks.flush(speaker)
    blocks.say(speaker, f"⇢ {who}transfers to {transfer.to_agent}", "cyan")


def _iteration(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, f"○ {iteration_text(event.loop_iteration_started)}", "dim")


def _planned(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    _plan(blocks, speaker, event.plan_made.items, "planned")


def _revised(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    _plan(blocks, speaker, event.plan_revised.items, "left to do")


def _plan(blocks: AgentBlocks, speaker: AgentLane, items: Sequence[event_pb2.PlanItem], what: str) -> None:
    blocks.say(speaker, f"≡ {what}: {counted(len(items), 'step')}", "cyan")
    for number, item in enumerate(items[:_MOST_STEPS], start=1):
        blocks.say(speaker, f"  {number}. {one_line(item.text)}")
    if len(items) > _MOST_STEPS:
        blocks.say(speaker, f"  … and {len(items) - _MOST_STEPS} more", "dim")


def _changed(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    # What a planning agent keeps of its plan stands there as the plan.
    hidden = _KEPT_OF_PLANS if speaker.kind == execution_pb2.AGENT_KIND_PLAN_EXECUTE else ()
    if changes := [change for change in event.session_state_changed.state_changes if change.key not in hidden]:
        blocks.say(speaker, f"≔ {changes_text(changes)}", "dim")


def _compacted(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.say(speaker, f"≈ {compacted_text(event.history_compacted)}", "dim")


STEERING: Final[Handlers] = {
    "input_requested": _requested,
    "input_received": _received,
    "run_queued": _queued,
    "run_dequeued": _dequeued,
    "run_forked": _forked,
    "run_resumed": _resumed,
    "run_interrupted": _interrupted,
    "cancel_requested": _cancelling,
    "agent_transferred": _transferred,
    "loop_iteration_started": _iteration,
    "plan_made": _planned,
    "plan_revised": _revised,
    "session_state_changed": _changed,
    "history_compacted": _compacted,
}
"""What shows each of these events."""


def _output(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.speak(event, speaker, "text", event.llm_output_text_delta.text)


def _partial(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.speak(event, speaker, "text", event.sub_agent_partial.text)


def _reasoning(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.speak(event, speaker, "reasoning", event.llm_reasoning_delta.text)


def _calling(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    if event.llm_tool_call_delta.name:
        blocks.flush(speaker)
        speaker.wait_for(f"writing a call of {event.llm_tool_call_delta.name}", now)


def _model_started(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.flush(speaker)
    started = event.llm_started
    speaker.model = started.model
    what = "waiting for" if event.step_id else "summarizing by"
    speaker.wait_for(f"{what} {'/'.join(name for name in (started.provider, started.model) if name)}", now)


def _retrying(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    retrying = event.llm_retrying
    is_another = bool(retrying.next_model and speaker.model and retrying.next_model != speaker.model)
    speaker.model = retrying.next_model or speaker.model
    what = f"going on with {retrying.next_model}" if is_another else "trying again"
    text = f"↻ {what}, attempt {event.attempt}: {retry_text(retrying.reason)}: {one_line(retrying.error.message)}"
    blocks.say(speaker, text.rstrip(": "), "yellow")
    if event.step_id:  # else it is no step that is tried again, and nothing of it was shown
        blocks.begin_again(event, speaker)
    speaker.wait_for(f"waiting for {retrying.next_model}" if is_another else "waiting to try again", now)


def _model_completed(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    text = text_of(event.llm_completed.response.message)
    attempt = (event.step_index, event.attempt)
    # An answer outside of a step is a summary: not what the agent says.
    if text and event.step_id and not (speaker.has_spoken and speaker.attempt == attempt):
        blocks.speak(event, speaker, "text", text)
    blocks.flush(speaker)
    if finished := finish_text(event.llm_completed.response):
        blocks.say(speaker, f"! finish reason {finished}", "yellow")
    speaker.activity = ""


def _model_failed(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.flush(speaker)
    blocks.say(speaker, f"✗ model: {error_text(event.llm_failed.error)}", "red")
    speaker.activity = ""


def _tool_started(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.flush(speaker)
    call = event.tool_started.call
    arguments = one_line(call.arguments_json)
    blocks.say(speaker, f"→ {call.name} {'' if arguments == '{}' else arguments}".rstrip(), "blue")
    speech = TextWrapper(blocks.room(speaker) - 2)
    speaker.tools[call.call_id] = Running(name=call.name, since=now, speech=speech)


def _tool_output(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    running = speaker.tools.get(event.tool_output.call_id)
    for line in running.speech.add(event.tool_output.text) if running else ():
        blocks.say(speaker, f"┊ {line}", "dim")


def _tool_completed(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    result = event.tool_completed.result
    if result.call.name == TRANSFER:
        speaker.tools.pop(result.call.call_id, None)  # the transfer itself comes next
    else:
        _tool_ended(blocks, speaker, result, "←", "blue")


def _tool_failed(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    _tool_ended(blocks, speaker, event.tool_failed.result, "✗", "red")


def _tool_ended(blocks: AgentBlocks, speaker: AgentLane, result: message_pb2.ToolResult, mark: str, style: str) -> None:
    running = speaker.tools.pop(result.call.call_id, None)
    for line in running.speech.finish() if running else ():
        blocks.say(speaker, f"┊ {line}", "dim")
    took = f"  {duration_text(result.duration)}" if result.HasField("duration") else ""
    # What an agent answered stands right above, in its own block.
    shown = "" if result.child_invocation_id and not result.HasField("error") else one_line(result_text(result))
    text = clip(f"{result.call.name}  {shown}".rstrip(), blocks.room(speaker) - len(mark) - len(took) - 1)
    blocks.say(speaker, f"{mark} {text}{took}", style)


CALLS: Final[Handlers] = {
    "llm_started": _model_started,
    "llm_output_text_delta": _output,
    "sub_agent_partial": _partial,
    "llm_reasoning_delta": _reasoning,
    "llm_tool_call_delta": _calling,
    "llm_retrying": _retrying,
    "llm_completed": _model_completed,
    "llm_failed": _model_failed,
    "tool_started": _tool_started,
    "tool_output": _tool_output,
    "tool_completed": _tool_completed,
    "tool_failed": _tool_failed,
}
"""What shows each of these events."""
