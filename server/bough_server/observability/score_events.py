"""Scores of evaluated runs as events of OpenTelemetry's GenAI conventions: log records of the runs' spans."""

from collections.abc import Sequence
from typing import Final

from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

from bough.v1 import error_pb2, eval_result_pb2, invocation_pb2
from bough_server.observability.tracing import Parent, resource

_NAME: Final = "gen_ai.evaluation.result"

VERDICT: Final = "verdict"
"""The name of the evaluation in the event of a trial that has no scores."""


class ScoreEvents:
    """Emits an event for each score, which `provider` exports; without one it does nothing."""

    def __init__(self, provider: LoggerProvider | None, *, capture_content: bool = False) -> None:
        self._provider, self._capture = provider, capture_content
        self._logger = provider.get_logger("bough") if provider is not None else None

    def emit(
        self,
        result: eval_result_pb2.CaseTrialResult,
        invocations: Sequence[invocation_pb2.Invocation],
        *,
        evaluation_id: str,
    ) -> None:
        """Emit the scores of a trial, in the order of the metrics, as events of the root span of its last turn.

        A trial without scores, whose run failed or which was not run, has one event: rates that are counted from events
        would else be too high.
        """
        if self._logger is None:
            return
        evaluated = _find_root_span(invocations).context
        named: dict[str, str | int | float] = {
            "bough.evaluation": evaluation_id,
            "bough.case": result.case_id,
            "bough.trial": result.trial,
        }
        if result.turns:
            named["bough.run"] = result.turns[-1].run_id
        if result.purpose:
            purpose = eval_result_pb2.TrialPurpose.Name(result.purpose)
            named["bough.trial_purpose"] = purpose.removeprefix("TRIAL_PURPOSE_").lower()
        for score in result.scores or [_build_verdict(result)]:
            attributes = {**self._describe(score), **named}
            self._logger.emit(context=evaluated, event_name=_NAME, attributes=attributes)

    def close(self) -> None:
        """Export the remaining events for at most 5 seconds; blocks, so do not call it on the event loop."""
        if self._provider is not None:
            self._provider.force_flush(5_000)
            self._provider.shutdown()

    def _describe(self, score: eval_result_pb2.MetricScore) -> dict[str, str | int | float]:
        label = eval_result_pb2.Verdict.Name(score.verdict).removeprefix("VERDICT_").lower()
        attributes: dict[str, str | int | float] = {
            "gen_ai.evaluation.name": score.name,
            "gen_ai.evaluation.score.label": label,
        }
        if score.HasField("score"):
            attributes["gen_ai.evaluation.score.value"] = score.score
        if score.error_reason:
            reason = error_pb2.ErrorReason.Name(score.error_reason)
            attributes["error.type"] = reason.removeprefix("ERROR_REASON_")
        # It quotes answers, arguments and results, as an error's message may.
        if self._capture and score.reason:
            attributes["gen_ai.evaluation.explanation"] = score.reason
        return attributes


def _find_root_span(invocations: Sequence[invocation_pb2.Invocation]) -> Parent:
    """Return the span of the last turn's root agent, as its events name it; an empty parent if they name none."""
    agents = invocations[-1].agents if invocations else ()
    return Parent.from_ids(agents[0].trace_id, agents[0].span_id) if agents else Parent.from_ids("", "")


def _build_verdict(result: eval_result_pb2.CaseTrialResult) -> eval_result_pb2.MetricScore:
    """Return the verdict of a trial that has no scores, in the form of one."""
    score = eval_result_pb2.MetricScore(name=VERDICT, verdict=result.verdict, reason=result.reason)
    if result.turns:
        score.error_reason = result.turns[-1].error.reason
    return score


def make_logger_provider(*, export: bool, processor: LogRecordProcessor | None = None) -> LoggerProvider | None:
    """Return a provider that exports by OTLP/gRPC in batches, as OTEL_EXPORTER_OTLP_* configures; None without export.

    `processor` replaces the exporter.
    """
    if not export and processor is None:
        return None
    provider = LoggerProvider(resource=resource(), shutdown_on_exit=False)
    provider.add_log_record_processor(processor or _make_exporter())
    return provider


def _make_exporter() -> LogRecordProcessor:
    # Imported here, so that only a server that exports pays for loading the exporter.
    from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter

    return BatchLogRecordProcessor(OTLPLogExporter())
