"""A run as its agents speak, in whole lines that parallel agents cannot garble; it prints nothing itself."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from google.protobuf import duration_pb2
from rich.text import Text

from bough import text_of
from bough.v1 import event_pb2, message_pb2
from bough_server.cli.render.amounts import (
    clip,
    depth_style,
    duration_text,
    error_text,
    one_line,
    tokens,
    tokens_text,
)
from bough_server.cli.render.notes import (
    expiry_text,
    forked_text,
    interrupted_text,
    queued_text,
    received_text,
    request_text,
    result_text,
    resumed_text,
)
from bough_server.cli.render.speaker import Mode, Running, Speaker, bars, room, speaker_of
from bough_server.cli.render.speech import Speech
from bough_server.cli.render.status import STYLES, fitted, status_lines

AgentEvent = event_pb2.AgentEvent


class LiveView:
    """Turns events into lines for a terminal of that many cells; `status` says what is going on between the lines."""

    def __init__(self, width: int = 80) -> None:
        self._width = width
        self._speakers: dict[str, Speaker] = {}
        self._branches: Counter[str] = Counter()
        self._current = ""
        self._lines: list[Text] = []

    def feed(self, event: AgentEvent, now: float = 0.0) -> list[Text]:
        """The lines that this event finishes; `now` is any clock in seconds, the one that `status` is asked with."""
        self._lines = []
        handler = _HANDLERS.get(event.WhichOneof("payload") or "")
        if handler is not None:
            handler(self, event, self._speaker(event), now)
        return self._lines

    def status(self, now: float = 0.0) -> list[Text]:
        """What each agent is in the middle of: an unfinished line, a model it waits for, tools at work."""
        return status_lines(self._speakers.values(), now, width=self._width)

    def _speaker(self, event: AgentEvent) -> Speaker:
        speaker = self._speakers.get(event.invocation_id)
        if speaker is None:
            branch = event.branch or event.agent
            self._branches[branch] += 1
            speaker = speaker_of(event, width=self._width, number=self._branches[branch])
            self._speakers[event.invocation_id] = speaker
        return speaker

    def _say(self, speaker: Speaker, text: str, style: str = "") -> None:
        """Writes a line into a speaker's block; says whose it is where another one spoke last."""
        if self._current != speaker.invocation_id:
            label = bars(speaker.depth).append(f"▸ {speaker.branch}", style=f"dim {depth_style(speaker.depth)}")
            self._lines.append(fitted(label, self._width))
            self._current = speaker.invocation_id
        line = bars(speaker.depth + 1)
        line.append(clip(text, room(speaker.depth, self._width)), style=style)
        line.rstrip()
        self._lines.append(line)

    def _flush(self, speaker: Speaker) -> None:
        self._print(speaker, speaker.speech.finish())

    def _print(self, speaker: Speaker, lines: list[str]) -> None:
        for line in lines:
            self._say(speaker, line, STYLES[speaker.mode])
        speaker.has_shown = speaker.has_shown or (bool(lines) and speaker.mode == "text")

    def _speak(self, event: AgentEvent, speaker: Speaker, mode: Mode, text: str) -> None:
        attempt = (event.step_index, event.attempt)
        if attempt < speaker.attempt:
            return
        if attempt > speaker.attempt:
            if event.step_index == speaker.attempt[0]:
                self._void(speaker)
            else:
                self._flush(speaker)
            speaker.attempt, speaker.has_spoken, speaker.has_shown = attempt, False, False
        if mode != speaker.mode:
            self._flush(speaker)
            speaker.mode = mode
        speaker.activity = ""
        speaker.has_spoken = speaker.has_spoken or mode == "text"
        self._print(speaker, speaker.speech.add(text))

    def _void(self, speaker: Speaker) -> None:
        """Takes back what an attempt said that is lost, as far as it is not on the screen yet."""
        speaker.speech.finish()
        if speaker.has_shown:
            self._say(speaker, "  what it said in this step does not count", "dim yellow")

    def _open(self, speaker: Speaker, now: float) -> None:
        header = bars(speaker.depth)
        style = depth_style(speaker.depth)
        header.append("● ", style=style).append(speaker.name, style=f"bold {style}")
        self._lines.append(fitted(header, self._width))
        self._current = speaker.invocation_id
        speaker.wait_for("starting", now)

    def _close(self, speaker: Speaker, mark: str, style: str, words: str) -> None:
        self._flush(speaker)
        line = bars(speaker.depth).append(f"{mark} ", style=style)
        line.append(speaker.name, style=f"bold {depth_style(speaker.depth)}")
        line.append(f"  {words}" if words else "", style="dim" if mark == "✓" else style)
        self._lines.append(fitted(line, self._width))
        # Only after its own block is it plain that the caller goes on.
        self._current = speaker.parent if self._current == speaker.invocation_id else ""
        speaker.has_ended = True

    def _started(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._open(speaker, now)

    def _output(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._speak(event, speaker, "text", event.llm_output_delta.text)

    def _partial(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._speak(event, speaker, "text", event.sub_agent_partial.text)

    def _reasoning(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._speak(event, speaker, "reasoning", event.llm_reasoning_delta.text)

    def _calling(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        if event.llm_tool_call_delta.name:
            self._flush(speaker)
            speaker.wait_for(f"writing a call of {event.llm_tool_call_delta.name}", now)

    def _model_started(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._flush(speaker)
        started = event.llm_started
        speaker.wait_for(f"waiting for {'/'.join(name for name in (started.provider, started.model) if name)}", now)

    def _retrying(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        retrying = event.llm_retrying
        why = event_pb2.RetryReason.Name(retrying.reason).removeprefix("RETRY_REASON_").lower().replace("_", " ")
        text = f"↻ trying again, attempt {event.attempt}: {why}: {one_line(retrying.error.message)}"
        self._say(speaker, text.rstrip(": "), "yellow")
        self._void(speaker)
        speaker.attempt = (event.step_index, event.attempt)
        speaker.has_spoken = speaker.has_shown = False
        speaker.wait_for("waiting to try again", now)

    def _model_completed(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        text = text_of(event.llm_completed.response.message)
        attempt = (event.step_index, event.attempt)
        if text and not (speaker.has_spoken and speaker.attempt == attempt):
            self._speak(event, speaker, "text", text)
        self._flush(speaker)
        speaker.activity = ""

    def _model_failed(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._flush(speaker)
        self._say(speaker, f"✗ model: {error_text(event.llm_failed.error)}", "red")
        speaker.activity = ""

    def _tool_started(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._flush(speaker)
        call = event.tool_started.call
        arguments = one_line(call.arguments_json)
        self._say(speaker, f"→ {call.name} {'' if arguments == '{}' else arguments}".rstrip(), "blue")
        speech = Speech(room(speaker.depth, self._width) - 2)
        speaker.tools[call.call_id] = Running(name=call.name, since=now, speech=speech)

    def _tool_output(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        running = speaker.tools.get(event.tool_output.call_id)
        for line in running.speech.add(event.tool_output.text) if running else ():
            self._say(speaker, f"┊ {line}", "dim")

    def _tool_completed(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._tool_ended(speaker, event.tool_completed.result, "←", "blue")

    def _tool_failed(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._tool_ended(speaker, event.tool_failed.result, "✗", "red")

    def _tool_ended(self, speaker: Speaker, result: message_pb2.ToolResult, mark: str, style: str) -> None:
        running = speaker.tools.pop(result.call.call_id, None)
        for line in running.speech.finish() if running else ():
            self._say(speaker, f"┊ {line}", "dim")
        took = f"  {duration_text(result.latency)}" if result.HasField("latency") else ""
        # What an agent answered stands right above, in its own block.
        shown = "" if result.child_invocation_id and not result.HasField("error") else one_line(result_text(result))
        left = room(speaker.depth, self._width) - len(mark) - len(took) - 1
        text = clip(f"{result.call.name}  {shown}".rstrip(), left)
        self._say(speaker, f"{mark} {text}{took}", style)

    def _requested(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        request = event.input_requested.request
        self._flush(speaker)
        self._say(speaker, f"? {request_text(request)}", "magenta")
        if expiry := expiry_text(request):
            self._say(speaker, f"  {expiry}", "dim")
        speaker.wait_for("waiting for an answer", now)

    def _received(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._say(speaker, f"! {one_line(received_text(event.input_received.answer))}", "magenta")
        speaker.activity = ""

    def _queued(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._say(speaker, f"… {queued_text(event.run_queued)}", "dim")
        speaker.wait_for("waiting for its session", now)

    def _dequeued(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._say(speaker, "… its session is free", "dim")
        speaker.wait_for("starting", now)

    def _forked(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._say(speaker, f"⑂ {one_line(forked_text(event.run_forked))}", "yellow")

    def _resumed(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        # What was in flight begins again and says so; of what it said before, only whole lines were shown.
        for known in self._speakers.values():
            known.speech.finish()
            known.tools.clear()
            known.activity = ""
        self._say(speaker, f"↻ {resumed_text(event.run_resumed)}", "yellow")

    def _interrupted(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._say(speaker, f"‖ {interrupted_text(event.run_interrupted)}", "magenta")
        for known in self._speakers.values():
            known.activity = ""

    def _cancelling(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        reason = event_pb2.CancelReason.Name(event.cancel_requested.reason).removeprefix("CANCEL_REASON_").lower()
        self._say(speaker, f"■ stopping: {reason.replace('_', ' ')}", "yellow")

    def _ended_well(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        end = event.run_completed if event.HasField("run_completed") else event.sub_agent_completed
        self._close(speaker, "✓", "green", _used(end.duration, end.tree_usage))

    def _failed(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        end = event.run_failed if event.HasField("run_failed") else event.sub_agent_failed
        if end.end_reason == event_pb2.END_REASON_CANCELLED:
            self._close(speaker, "■", "yellow", "cancelled")
        else:
            self._close(speaker, "✗", "red", error_text(end.error))

    def _cancelled(self, event: AgentEvent, speaker: Speaker, now: float) -> None:
        self._close(speaker, "■", "yellow", "cancelled")


_Handler = Callable[[LiveView, AgentEvent, Speaker, float], None]
_HANDLERS: Final[Mapping[str, _Handler]] = {
    "run_started": LiveView._started,
    "sub_agent_started": LiveView._started,
    "llm_started": LiveView._model_started,
    "llm_output_delta": LiveView._output,
    "sub_agent_partial": LiveView._partial,
    "llm_reasoning_delta": LiveView._reasoning,
    "llm_tool_call_delta": LiveView._calling,
    "llm_retrying": LiveView._retrying,
    "llm_completed": LiveView._model_completed,
    "llm_failed": LiveView._model_failed,
    "tool_started": LiveView._tool_started,
    "tool_output": LiveView._tool_output,
    "tool_completed": LiveView._tool_completed,
    "tool_failed": LiveView._tool_failed,
    "input_requested": LiveView._requested,
    "input_received": LiveView._received,
    "run_queued": LiveView._queued,
    "run_dequeued": LiveView._dequeued,
    "run_forked": LiveView._forked,
    "run_resumed": LiveView._resumed,
    "run_interrupted": LiveView._interrupted,
    "cancel_requested": LiveView._cancelling,
    "run_completed": LiveView._ended_well,
    "sub_agent_completed": LiveView._ended_well,
    "run_failed": LiveView._failed,
    "sub_agent_failed": LiveView._failed,
    "run_cancelled": LiveView._cancelled,
}


def _used(duration: duration_pb2.Duration, usage: message_pb2.Usage) -> str:
    known = "" if tokens(usage) is None else f", {tokens_text(usage)} tokens"
    return f"{duration_text(duration)}{known}"
