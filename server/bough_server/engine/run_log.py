"""Lines of the server's log about runs: the end of each, its interruptions, and its sub-agents at debug.

They name agents, ids, states and reasons. Messages of errors stay out: they may quote what users and models say.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server.log import events

_log = structlog.get_logger(__name__)

_RUN_ENDS: Final = {
    events.RUN_COMPLETED: "succeeded",
    events.RUN_FAILED: "failed",
    events.RUN_CANCELLED: "cancelled",
}
_SUB_AGENTS: Final = {
    events.SUB_AGENT_STARTED: "sub-agent started",
    events.SUB_AGENT_COMPLETED: "sub-agent ended",
    events.SUB_AGENT_FAILED: "sub-agent failed",
}
_LOGGED: Final = frozenset({*_RUN_ENDS, *_SUB_AGENTS, events.RUN_INTERRUPTED})


def log_events(run_id: str, recorded: Sequence[event_pb2.AgentEvent]) -> None:
    """Log the ends, interruptions and sub-agents among the new events of a run."""
    for event in recorded:
        kind = events.kind_of(event)
        if kind not in _LOGGED:
            continue
        if kind in _RUN_ENDS:
            _log_end(run_id, event, _RUN_ENDS[kind])
        elif kind in _SUB_AGENTS:
            names = {"agent": event.agent, "branch": event.branch, "invocation_id": event.invocation_id}
            _log.debug(_SUB_AGENTS[kind], run_id=run_id, **names, **_error(event.sub_agent_failed.error))
        else:
            requests = len(event.run_interrupted.requests)
            _log.info("run waits for input", run_id=run_id, agent=event.agent, requests=requests)


def log_start(run_id: str, session_id: str, log: Sequence[event_pb2.AgentEvent]) -> None:
    """Log that a worker begins to execute a run: a new one, a fork, or one that another worker left at this log."""
    what = "run started"
    facts: dict[str, str] = {}
    for event in log:
        if event.HasField("run_forked"):
            what, facts = "run forked", {"origin": event.run_forked.origin.run_id}
        elif event.HasField("run_resumed"):
            cause = event_pb2.ResumeCause.Name(event.run_resumed.cause).removeprefix("RESUME_CAUSE_").lower()
            what, facts = "run continued", {"cause": cause}
    _log.info(what, run_id=run_id, session_id=session_id, agent=log[0].run_started.agent, **facts)


def _log_end(run_id: str, event: event_pb2.AgentEvent, state: str) -> None:
    end = getattr(event, event.WhichOneof("payload") or "")
    facts = _error(end.error) if state != "succeeded" else {}
    if state == "cancelled" and end.cancel_reason:
        facts = {"reason": execution_pb2.CancelReason.Name(end.cancel_reason).removeprefix("CANCEL_REASON_").lower()}
    seconds = round(end.duration.ToTimedelta().total_seconds(), 3)
    _log.info("run ended", run_id=run_id, agent=event.agent, state=state, seconds=seconds, **facts)


def _error(error: error_pb2.AgentError) -> dict[str, str]:
    reason = error.reason
    known = reason in error_pb2.ErrorReason.values()
    return {"error": error_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")} if reason and known else {}
