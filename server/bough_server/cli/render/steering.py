"""What steers a run in the live view: questions and answers, waiting, forks, transfers, rounds and plans."""

from collections.abc import Sequence
from typing import Final

from bough.v1 import event_pb2
from bough_server.cli.render.amounts import counted, one_line
from bough_server.cli.render.blocks import Blocks, Handlers
from bough_server.cli.render.kinds import changes_text, compacted_text, round_text
from bough_server.cli.render.notes import (
    expiry_text,
    forked_text,
    interrupted_text,
    queued_text,
    received_text,
    request_text,
    resumed_text,
)
from bough_server.cli.render.speaker import STARTING, Speaker

AgentEvent = event_pb2.AgentEvent
_KEPT_OF_PLANS: Final = ("plan", "executed_steps")
_MOST_STEPS: Final = 8


def _requested(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    request = event.input_requested.request
    blocks.flush(speaker)
    blocks.say(speaker, f"? {request_text(request)}", "magenta")
    if expiry := expiry_text(request):
        blocks.say(speaker, f"  {expiry}", "dim")
    speaker.wait_for("waiting for an answer", now)


def _received(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.say(speaker, f"! {one_line(received_text(event.input_received.answer))}", "magenta")
    speaker.activity = ""


def _queued(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.say(speaker, f"… {queued_text(event.run_queued)}", "dim")
    speaker.wait_for("waiting for its session", now)


def _dequeued(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.say(speaker, "… its session is free", "dim")
    speaker.wait_for(STARTING, now)


def _forked(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.say(speaker, f"⑂ {one_line(forked_text(event.run_forked))}", "yellow")
    speaker.forked_ns = event.time.ToNanoseconds()


def _resumed(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    # What was in flight begins again and says so; of what it said before, only whole lines were shown.
    for known in blocks.speakers:
        known.speech.finish()
        known.tools.clear()
        known.activity = ""
    blocks.say(speaker, f"↻ {resumed_text(event.run_resumed)}", "yellow")


def _interrupted(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.say(speaker, f"‖ {interrupted_text(event.run_interrupted)}", "magenta")
    for known in blocks.speakers:
        known.activity = ""


def _cancelling(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    reason = event_pb2.CancelReason.Name(event.cancel_requested.reason).removeprefix("CANCEL_REASON_").lower()
    blocks.say(speaker, f"■ stopping: {reason.replace('_', ' ')}", "yellow")


def _transferred(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    transfer = event.agent_transferred
    # A swarm says it, of one of its members.
    who = "" if transfer.from_agent in ("", event.agent) else f"{transfer.from_agent} "
    blocks.flush(speaker)
    blocks.say(speaker, f"⇢ {who}hands over to {transfer.to_agent}", "cyan")


def _round(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    blocks.say(speaker, f"○ {round_text(event.loop_round_started)}", "dim")


def _planned(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    _plan(blocks, speaker, event.plan_made.items, "planned")


def _revised(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    _plan(blocks, speaker, event.plan_revised.items, "left to do")


def _plan(blocks: Blocks, speaker: Speaker, items: Sequence[event_pb2.PlanItem], what: str) -> None:
    blocks.say(speaker, f"≡ {what}: {counted(len(items), 'step')}", "cyan")
    for number, item in enumerate(items[:_MOST_STEPS], start=1):
        blocks.say(speaker, f"  {number}. {one_line(item.text)}")
    if len(items) > _MOST_STEPS:
        blocks.say(speaker, f"  … and {len(items) - _MOST_STEPS} more", "dim")


def _changed(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
    # What a planning agent keeps of its plan stands there as the plan.
    hidden = _KEPT_OF_PLANS if speaker.kind == event_pb2.AGENT_KIND_PLAN_EXECUTE else ()
    if changes := [change for change in event.state_changed.changes if change.key not in hidden]:
        blocks.say(speaker, f"≔ {changes_text(changes)}", "dim")


def _compacted(blocks: Blocks, event: AgentEvent, speaker: Speaker, now: float) -> None:
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
    "loop_round_started": _round,
    "plan_made": _planned,
    "plan_revised": _revised,
    "state_changed": _changed,
    "history_compacted": _compacted,
}
"""What shows each of these events."""
