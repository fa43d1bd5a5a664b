"""EvalProgress of an evaluation: a bar at a terminal, a line for each trial elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server.cli.eval.files import redact_result
from bough_server.cli.exit_codes import print_stderr
from bough_server.cli.render.format import pluralize
from bough_server.evals.reports.words import verdict_text
from bough_server.plain_text import one_line
from bough_server.settings_sections import RedactSection


class EvalProgress:
    """Shows the events of an evaluation on standard error while it is open."""

    def __init__(self, redact: RedactSection) -> None:
        """`redact` says what is removed from reasons."""
        self._redact = redact
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._runs: dict[str, int] = {}
        self._reruns = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True, markup=False, highlight=False), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: evaluation_pb2.EvaluationEvent) -> None:
        """Show an event."""
        match event.WhichOneof("payload"):
            case "evaluation_planned":
                if self._bar is not None:
                    self._task = self._bar.add_task("evaluating", total=event.evaluation_planned.trial_count)
            case "case_planned":
                self._runs[event.case_planned.eval_case.id] = event.case_planned.trials
            case "suspects_planned":
                self._show_suspects(event.suspects_planned.suspects)
            case "case_trial_retried":
                again = event.case_trial_retried
                print_stderr(f"{self._line(_build_crash(again))}; it runs again")
            case "case_trial_scored":
                self._show_trial(event.case_trial_scored.result)
            case "evaluation_failed":
                print_stderr(f"The evaluation failed: {one_line(event.evaluation_failed.error.message)}")
            case _:
                pass

    def _show_suspects(self, suspects: eval_result_pb2.EvalSuspects) -> None:
        self._reruns = suspects.trials
        sides = 2 if suspects.HasField("baseline_pins") else 1
        if self._bar is not None and self._task is not None:
            reruns = len(suspects.case_ids) * suspects.trials * sides
            self._bar.update(self._task, total=sum(self._runs.values()) + reruns)
        if suspects.case_ids:
            also = ", and as often with what the baseline ran with" if sides == 2 else ""
            print_stderr(f"{pluralize(len(suspects.case_ids), 'suspect')} run {suspects.trials} more times{also}")
        if suspects.baseline_not_rerun_reason:
            print_stderr(f"The baseline does not run again. {one_line(suspects.baseline_not_rerun_reason)}")

    def _show_trial(self, result: eval_result_pb2.CaseTrialResult) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
            if result.verdict != eval_result_pb2.VERDICT_PASSED:
                self._bar.console.print(self._line(result), soft_wrap=True)
            return
        print_stderr(self._line(result))

    def _line(self, found: eval_result_pb2.CaseTrialResult) -> str:
        runs = self._runs.get(found.case_id, 1)
        whole = eval_result_pb2.EvalResult(cases=[eval_result_pb2.CaseResult(trials=[found])])
        result = redact_result(whole, redact=self._redact)[0].cases[0].trials[0]
        number = f" {result.trial + 1}/{runs}" if runs > 1 else ""
        if found.purpose == eval_result_pb2.TRIAL_PURPOSE_RERUN:
            number = f" fresh {result.trial - runs + 1}/{self._reruns}"
        elif found.purpose == eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN:
            number = f" baseline {result.trial - runs - self._reruns + 1}/{self._reruns}"
        reason = f": {one_line(result.reason)}" if result.reason else ""
        return f"{one_line(result.case_id)}{number} {verdict_text(result.verdict)}{reason}"


def _build_crash(retried: evaluation_pb2.CaseTrialRetried) -> eval_result_pb2.CaseTrialResult:
    """Return the attempt at a trial that crashed as a result of it."""
    return eval_result_pb2.CaseTrialResult(
        case_id=retried.case_id,
        trial=retried.trial,
        verdict=eval_result_pb2.VERDICT_FAILED,
        reason=retried.crashed_attempt.reason.rstrip("."),
    )
