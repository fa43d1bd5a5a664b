"""`bough eval list`, `show`, `watch`, `cancel`, `compare`, `score` and `diff`: evaluations and runs that are stored."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.eval.files import Content, Files, redact_result
from bough_server.cli.eval.options import (
    AllowIncompleteOption,
    ContentOption,
    HtmlOption,
    JsonOption,
    JUnitOption,
    MarkdownOption,
)
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import JsonOption as JsonFlag
from bough_server.cli.options import LimitOption, Target, target_of

if TYPE_CHECKING:
    from bough.v1 import eval_result_pb2, eval_set_pb2
    from bough_server.settings_sections import RedactSection


EvaluationArgument = Annotated[
    str,
    typer.Argument(
        metavar="EVALUATION", help="An evaluation: its id, `last`, or a unique suffix of 6 or more characters."
    ),
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="RESULT", help="A file of --json, an evaluation's id, or `last`.")
]

_PAGE_SIZE: Final = 1000


def list_evaluations(context: typer.Context, limit: LimitOption = 20, json: JsonFlag = False) -> None:
    """List evaluations, newest first."""
    finish(_list(target_of(context), limit=limit, json=json))


async def _list(target: Target, *, limit: int, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import json_line, print_line, print_lines, whole_width
    from bough_server.cli.render.evaluations import evaluations_table

    async with connect(target, is_silent=True, is_reading=True) as connection:
        found = []
        async for one in connection.client.evaluations.list(page_size=min(limit, _PAGE_SIZE)):
            found.append(one)
            if len(found) == limit:
                break
    if not found and not json:
        print_stderr("There are no evaluations yet: start one with `bough eval run`.")
        return ExitCode.YES
    if json:
        for one in found:
            print_line(json_line(one))
    else:
        print_lines(evaluations_table(found, whole_width()))
    return ExitCode.YES


def show(
    context: typer.Context,
    evaluation: EvaluationArgument,
    junit: JUnitOption = None,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
    json: JsonOption = None,
    content: ContentOption = Content.CUT,
) -> None:
    """Show what an evaluation found, and write it to files. The exit code is that of `bough eval run`."""
    files = Files(junit=junit, markdown=markdown, html=html, json=json, content=content)
    finish(_show(target_of(context), evaluation, files))


async def _show(target: Target, evaluation: str, files: Files) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.eval.follow import result_of
    from bough_server.cli.eval.report import report
    from bough_server.settings import Settings

    redact = Settings.load(target.config).evaluation.redact
    files.check(redact)
    async with connect(target, is_silent=True, is_reading=True) as connection:
        result = await result_of(connection.client, evaluation)
    return report(result, files=files, redact=redact)


def watch(context: typer.Context, evaluation: EvaluationArgument) -> None:
    """Follow an evaluation to its end. Ctrl-C only ends the command. The exit code is that of `bough eval run`."""
    finish(_watch(target_of(context), evaluation))


async def _watch(target: Target, evaluation: str) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.eval.follow import Following, resolve_evaluation
    from bough_server.cli.eval.report import report
    from bough_server.settings import Settings

    redact = Settings.load(target.config).evaluation.redact
    # The patterns are checked before the evaluation is followed.
    Files().check(redact)
    async with connect(target, needs_runs=True, subject="evaluation") as connection:
        evaluation_id = await resolve_evaluation(connection.client, evaluation)
        following = Following(connection, evaluation_id=evaluation_id, redact=redact)
        await following.watch(connection.client.evaluations.watch(evaluation_id, without_trees=True))
        result = await connection.client.evaluations.result(evaluation_id)
    return report(result, files=Files(), redact=redact)


def cancel(
    context: typer.Context,
    evaluation: EvaluationArgument,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A note for the record.")] = "",
) -> None:
    """Cancel an evaluation and its runs."""
    finish(_cancel(target_of(context), evaluation, note))


async def _cancel(target: Target, evaluation: str, note: str) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.eval.follow import resolve_evaluation
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import state_text

    async with connect(target, needs_runs=True) as connection:
        evaluation_id = await resolve_evaluation(connection.client, evaluation)
        found = await connection.client.evaluations.cancel(evaluation_id, note=note)
    ended = found.HasField("end_time")
    print_line(f"evaluation {evaluation_id} {state_text(found.state) if ended else 'is being cancelled'}")
    return ExitCode.YES


def compare(
    context: typer.Context,
    baseline: SourceArgument,
    candidate: SourceArgument,
    json: JsonFlag = False,
    allow_incomplete_baseline: AllowIncompleteOption = False,
) -> None:
    """Compare two results: what they depended on, and the cases that changed. Exits with 1 if a case is worse."""
    comparing = _compare(target_of(context), baseline, candidate, json=json, allow_incomplete=allow_incomplete_baseline)
    finish(comparing)


async def _compare(target: Target, baseline: str, candidate: str, *, json: bool, allow_incomplete: bool) -> ExitCode:
    from bough_server.cli.output import json_text, print_line, print_lines, whole_width
    from bough_server.cli.render.evaluations import comparison_lines
    from bough_server.errors import ConfigurationError
    from bough_server.evals.results.compare import compare, find_baseline_problem
    from bough_server.settings import Settings

    # Not by the server: files need none, and two results with all of their trees may be larger than a request.
    before, after = await _fetch_results(target, baseline, candidate)
    if (why := find_baseline_problem(before)) and not allow_incomplete:
        raise ConfigurationError(f"{baseline}: The baseline {why}: add --allow-incomplete-baseline to compare with it.")
    found = _redact_comparison(
        compare(before, after), before, after, redact=Settings.load(target.config).evaluation.redact
    )
    if json:
        print_line(json_text(found))
    else:
        print_lines(comparison_lines(found, after.suspects, width=whole_width()))
    return ExitCode.FAILED if found.regressions or found.removed else ExitCode.YES


def _redact_comparison(
    comparison: "eval_result_pb2.EvalComparison",
    before: "eval_result_pb2.EvalResult",
    after: "eval_result_pb2.EvalResult",
    *,
    redact: "RedactSection",
) -> "eval_result_pb2.EvalComparison":
    """Return a comparison without the secrets that either result has."""
    from bough.v1 import eval_result_pb2

    both = eval_result_pb2.EvalResult(cases=[*before.cases, *after.cases])
    return redact_result(both, comparison, redact=redact)[1] or comparison


async def _fetch_results(target: Target, *texts: str) -> "list[eval_result_pb2.EvalResult]":
    from bough_server.cli.connection import connect
    from bough_server.cli.eval.files import read_baseline
    from bough_server.cli.eval.follow import result_of

    sources = [read_baseline(text) for text in texts]
    results = [source for source in sources if not isinstance(source, str)]
    if len(results) == len(sources):
        return results
    async with connect(target, is_silent=True, is_reading=True) as connection:
        return [await result_of(connection.client, source) for source in sources]


def score(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, as for `bough tree`.")],
    set_path: Annotated[
        Path | None,
        typer.Option("--set", metavar="SET", help="The set with the case that says what is expected of each run."),
    ] = None,
    case: Annotated[str, typer.Option("--case", metavar="ID", help="The case, if the set has several.")] = "",
    junit: JUnitOption = None,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
    json: JsonOption = None,
    content: ContentOption = Content.CUT,
) -> None:
    """Score stored runs by a case of a set, or by their success alone. Nothing runs, but judges of llm_judge metrics.

    The exit code is that of `bough eval run`.
    """
    files = Files(junit=junit, markdown=markdown, html=html, json=json, content=content)
    finish(_score(target_of(context), runs, set_path, case, files=files))


async def _score(target: Target, runs: Sequence[str], set_path: Path | None, case_id: str, *, files: Files) -> ExitCode:
    from bough import run_source
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.eval.report import report
    from bough_server.settings import Settings

    case = _case(set_path, case_id) if set_path is not None else None
    redact = Settings.load(target.config).evaluation.redact
    files.check(redact)
    async with connect(target, needs_runs=True) as connection:
        client = connection.client
        sources = [run_source(await resolve_run(client, run)) for run in runs]
        if case is None:
            result = await client.evaluations.score(sources)
        else:
            expect = case.turns[0].expect if case.turns else case.user.expect
            result = await client.evaluations.score(sources, expect=expect, metrics=case.metrics)
    return report(result, files=files, redact=redact)


def _case(set_path: Path, case_id: str) -> "eval_set_pb2.EvalCase":
    """Return a case of a set, with the metrics of the set's defaults. Raises ConfigurationError."""
    from bough_server.documents.yaml import suggestion
    from bough_server.errors import ConfigurationError
    from bough_server.evals.sets.eval_set import parse_eval_set, plan_cases

    cases = {one.eval_case.id: one.eval_case for one in plan_cases(parse_eval_set(set_path).set, trials=None)}
    if not case_id and len(cases) == 1:
        return next(iter(cases.values()))
    if case_id not in cases:
        what = f"There is no case {case_id!r}." if case_id else "The set has several cases: choose one with --case."
        raise ConfigurationError(f"{set_path}: {what}{suggestion(case_id, cases)}")
    return cases[case_id]


def diff(
    context: typer.Context,
    left: Annotated[str, typer.Argument(metavar="RUN", help="The run before, as for `bough tree`.")],
    right: Annotated[str, typer.Argument(metavar="RUN", help="The run after.")],
    json: JsonFlag = False,
) -> None:
    """Compare the trees of two runs: agents, tool calls, usage. Exits with 1 if they differ."""
    finish(_diff(target_of(context), left, right, json=json))


async def _diff(target: Target, left: str, right: str, *, json: bool) -> ExitCode:
    from bough import run_source
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.output import json_text, print_line, print_lines, whole_width
    from bough_server.cli.render.evaluations import diff_lines
    from bough_server.evals.results.content import remove_secrets
    from bough_server.settings import Settings

    async with connect(target, is_silent=True, is_reading=True) as connection:
        client = connection.client
        sides = [run_source(await resolve_run(client, each)) for each in (left, right)]
        found = await client.evaluations.diff(*sides)
    redact = Settings.load(target.config).evaluation.redact
    found = remove_secrets(found, fields=redact.fields, patterns=redact.patterns)
    if json:
        print_line(json_text(found))
    else:
        print_lines(diff_lines(found, width=whole_width()))
    return ExitCode.YES if found.same else ExitCode.FAILED
