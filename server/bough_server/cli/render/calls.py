"""Model calls and tool calls in the live view, as they begin, stream and end; where lines go is the blocks' to say."""

from typing import Final

from bough import text_of
from bough.v1 import event_pb2, message_pb2
from bough_server.cli.render.amounts import clip, duration_text, error_text, one_line
from bough_server.cli.render.blocks import Blocks, Handlers
from bough_server.cli.render.kinds import retry_text
from bough_server.cli.render.notes import result_text
from bough_server.cli.render.speaker import Running, Speaker
from bough_server.cli.render.speech import Speech
from bough_server.tools.builtin import TRANSFER

AgentEvent = event_pb2.AgentEvent


def _output(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.speak(event, speaker, "text", event.llm_output_delta.text)


def _partial(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.speak(event, speaker, "text", event.sub_agent_partial.text)


def _reasoning(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.speak(event, speaker, "reasoning", event.llm_reasoning_delta.text)


def _calling(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    if event.llm_tool_call_delta.name:
        blocks.flush(speaker)
        speaker.wait_for(f"writing a call of {event.llm_tool_call_delta.name}", now)


def _model_started(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.flush(speaker)
    started = event.llm_started
    speaker.model = started.model
    what = "waiting for" if event.step_id else "summarizing by"
    speaker.wait_for(f"{what} {'/'.join(name for name in (started.provider, started.model) if name)}", now)


def _retrying(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    retrying = event.llm_retrying
    is_another = bool(retrying.next_model and speaker.model and retrying.next_model != speaker.model)
    speaker.model = retrying.next_model or speaker.model
    what = f"going on with {retrying.next_model}" if is_another else "trying again"
    text = f"↻ {what}, attempt {event.attempt}: {retry_text(retrying.reason)}: {one_line(retrying.error.message)}"
    blocks.say(speaker, text.rstrip(": "), "yellow")
    if event.step_id:  # else it is no step that is tried again, and nothing of it was shown
        blocks.begin_again(event, speaker)
    speaker.wait_for(f"waiting for {retrying.next_model}" if is_another else "waiting to try again", now)


def _model_completed(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    text = text_of(event.llm_completed.response.message)
    attempt = (event.step_index, event.attempt)
    # An answer outside of a step is a summary: not what the agent says.
    if text and event.step_id and not (speaker.has_spoken and speaker.attempt == attempt):
        blocks.speak(event, speaker, "text", text)
    blocks.flush(speaker)
    speaker.activity = ""


def _model_failed(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.flush(speaker)
    blocks.say(speaker, f"✗ model: {error_text(event.llm_failed.error)}", "red")
    speaker.activity = ""


def _tool_started(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.flush(speaker)
    call = event.tool_started.call
    arguments = one_line(call.arguments_json)
    blocks.say(speaker, f"→ {call.name} {'' if arguments == '{}' else arguments}".rstrip(), "blue")
    speech = Speech(blocks.room(speaker) - 2)
    speaker.tools[call.call_id] = Running(name=call.name, since=now, speech=speech)


def _tool_output(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    running = speaker.tools.get(event.tool_output.call_id)
    for line in running.speech.add(event.tool_output.text) if running else ():
        blocks.say(speaker, f"┊ {line}", "dim")


def _tool_completed(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    result = event.tool_completed.result
    if result.call.name == TRANSFER:
        speaker.tools.pop(result.call.call_id, None)  # the transfer itself comes next
    else:
        _tool_ended(blocks, speaker, result, "←", "blue")


def _tool_failed(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    _tool_ended(blocks, speaker, event.tool_failed.result, "✗", "red")


def _tool_ended(blocks: Blocks, speaker: Speaker, result: message_pb2.ToolResult, mark: str, style: str) -> None:
    running = speaker.tools.pop(result.call.call_id, None)
    for line in running.speech.finish() if running else ():
        blocks.say(speaker, f"┊ {line}", "dim")
    took = f"  {duration_text(result.latency)}" if result.HasField("latency") else ""
    # What an agent answered stands right above, in its own block.
    shown = "" if result.child_invocation_id and not result.HasField("error") else one_line(result_text(result))
    text = clip(f"{result.call.name}  {shown}".rstrip(), blocks.room(speaker) - len(mark) - len(took) - 1)
    blocks.say(speaker, f"{mark} {text}{took}", style)


CALLS: Final[Handlers] = {
    "llm_started": _model_started,
    "llm_output_delta": _output,
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
