"""Metrics of a run, from the events that this server records, each counted once."""

from collections.abc import Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server.engine.journal import Journal
from bough_server.engine.open_invocations import Invocations, OpenInvocation
from bough_server.log import events
from bough_server.log.charges import MODEL_END_KINDS, charge_of, reserve_of
from bough_server.observability.metrics import Metrics, ModelCallEnd

_KINDS: Final[Mapping[int, str]] = {
    number: name.removeprefix("AGENT_KIND_").lower() for name, number in execution_pb2.AgentKind.items()
}
_END_REASONS: Final[Mapping[int, str]] = {
    number: name.removeprefix("END_REASON_").lower() for name, number in execution_pb2.EndReason.items()
}
_REASONS: Final[Mapping[int, str]] = {
    number: name.removeprefix("ERROR_REASON_") for name, number in error_pb2.ErrorReason.items()
}


class RunMetrics:
    """Reports the new events of one run, each before it is applied to the open invocations, which it looks up."""

    def __init__(self, metrics: Metrics, invocations: Invocations, journal: Journal) -> None:
        self._metrics, self._invocations, self._journal = metrics, invocations, journal

    def report(self, event: event_pb2.AgentEvent) -> None:
        """Report an event if it is the end of an agent, a model attempt or a tool."""
        kind = events.kind_of(event)
        if kind in events.AGENT_END_KINDS:
            self._report_agent_end(event)
        elif kind in MODEL_END_KINDS or kind in events.TOOL_END_KINDS:
            opened = self._invocations.get(event.invocation_id)
            begun = opened.effects.get(event.effect_key) if opened is not None else None
            if opened is None or begun is None:
                return  # refused before it started
            if kind in MODEL_END_KINDS:
                self._report_model_attempt(event, begun, kind)
            else:
                self._report_tool_end(event, begun, opened)

    def _report_agent_end(self, event: event_pb2.AgentEvent) -> None:
        end = getattr(event, event.WhichOneof("payload") or "")
        kind = events.kind_of(event)
        state = "failed"
        if kind in (events.SUB_AGENT_COMPLETED, events.RUN_COMPLETED):
            state = "succeeded"
        elif end.error.reason == error_pb2.ERROR_REASON_CANCELLED:
            state = "cancelled"
        seconds = _seconds(end.duration)
        agent_kind = _KINDS.get(self._invocations.kinds.get(event.invocation_id, 0), "")
        reason = _END_REASONS.get(end.end_reason, "")
        self._metrics.on_agent_end(event.agent, kind=agent_kind, state=state, end_reason=reason, seconds=seconds)
        if kind in events.TERMINAL_KINDS:
            self._metrics.on_run_end(event.agent, state=state, seconds=seconds)

    def _report_model_attempt(self, event: event_pb2.AgentEvent, begun: event_pb2.AgentEvent, kind: int) -> None:
        answered_by, error = "", ""
        seconds: float | None = None
        if kind == events.LLM_COMPLETED:
            response = event.llm_completed.response
            answered_by, used, seconds = response.model, response.usage, self._measure_seconds(begun, event)
        elif kind == events.LLM_RETRYING:
            used = event.llm_retrying.lost_usage
        else:
            failed = event.llm_failed
            used = failed.lost_usage
            if not failed.not_sent:
                error, seconds = _REASONS.get(failed.error.reason, ""), self._measure_seconds(begun, event)
        if (charge := charge_of(event, kind, reserve_of(begun.llm_started))).nanos:
            self._metrics.on_charge(charge.nanos, charge.currency_code)
        is_reported = used.HasField("input_tokens") or used.HasField("output_tokens")
        reported = used if is_reported else None
        if seconds is not None or reported is not None:
            started = begun.llm_started
            self._metrics.on_model_call(
                ModelCallEnd(event.agent, started.provider, started.model, answered_by, seconds, error, reported)
            )

    def _report_tool_end(
        self, event: event_pb2.AgentEvent, begun: event_pb2.AgentEvent, opened: OpenInvocation
    ) -> None:
        if not begun.HasField("tool_started") or event.effect_key in opened.called:
            return  # a client ran it, or an agent did
        is_failed = event.HasField("tool_failed")
        result = events.tool_result_of(event)
        self._metrics.on_tool_end(
            begun.tool_started.call.name,
            outcome="failed" if is_failed else "succeeded",
            error=_REASONS.get(result.error.reason, "") if is_failed else "",
            seconds=_seconds(result.duration),
        )

    def _measure_seconds(self, begun: event_pb2.AgentEvent, event: event_pb2.AgentEvent) -> float:
        """Return for how many seconds a worker executed the run between two events."""
        if self._journal.gaps:
            return self._journal.running_ns(begun.record_time.ToNanoseconds(), event.record_time.ToNanoseconds()) / 1e9
        begin, end = begun.record_time, event.record_time
        return max(0.0, end.seconds - begin.seconds + (end.nanos - begin.nanos) / 1e9)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
