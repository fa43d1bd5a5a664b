"""`bough eval list`, `show`, `watch`, `cancel`, `compare`, `score` and `diff`: evaluations and runs that are stored."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.eval_files import Content, Files
from bough_server.cli.eval_run import ContentOption, HtmlOption, JsonOption, JUnitOption, MarkdownOption
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import Target, target_of

if TYPE_CHECKING:
    from bough import AsyncClient
    from bough.v1 import eval_result_pb2, eval_set_pb2


EvaluationArgument = Annotated[
    str,
    typer.Argument(
        metavar="EVALUATION", help="An evaluation: its id, `last`, or a unique suffix of 6 or more characters."
    ),
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="RESULT", help="A file of --json, an evaluation's id, or `last`.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MostOption = Annotated[int, typer.Option("--most", metavar="N", min=1, help="How many to list at most.")]

_PAGE_SIZE: Final = 1000
_MIN_SUFFIX: Final = 6
_ID_LENGTH: Final = 36


def list_evaluations(context: typer.Context, most: MostOption = 20, json: JsonFlag = False) -> None:
    """List evaluations, newest first."""
    finish(_list(target_of(context), most=most, json=json))


async def _list(target: Target, *, most: int, json: bool) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.output import print_table
    from bough_server.cli.render.evaluations import evaluations_table

    async with connected(target, is_silent=True, is_reading=True) as connection:
        found = []
        async for one in connection.client.evaluations.list(page_size=min(most, _PAGE_SIZE)):
            found.append(one)
            if len(found) == most:
                break
    if not found and not json:
        print_stderr("There are no evaluations yet: start one with `bough eval run`.")
        return ExitCode.YES
    print_table(found, evaluations_table, json=json)
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
    from bough_server.cli.connection import connected
    from bough_server.cli.eval_run import exit_code
    from bough_server.cli.output import print_lines, whole_width
    from bough_server.cli.render.evaluations import result_lines
    from bough_server.settings import Settings

    files.check()
    redact = Settings.load(target.config).evaluation.redact
    async with connected(target, is_silent=True, is_reading=True) as connection:
        result = await connection.client.evaluations.result(await resolve_evaluation(connection.client, evaluation))
    print_lines(result_lines(result, width=whole_width()))
    files.write(result, redact=redact)
    return exit_code(result)


def watch(context: typer.Context, evaluation: EvaluationArgument) -> None:
    """Follow an evaluation to its end. Ctrl-C only ends the command. The exit code is that of `bough eval run`."""
    finish(_watch(target_of(context), evaluation))


async def _watch(target: Target, evaluation: str) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.eval_progress import EvalProgress
    from bough_server.cli.eval_run import exit_code
    from bough_server.cli.output import print_lines, whole_width
    from bough_server.cli.render.evaluations import result_lines

    async with connected(target, needs_runs=True) as connection:
        evaluation_id = await resolve_evaluation(connection.client, evaluation)
        with EvalProgress() as progress:
            async for event in connection.client.evaluations.watch(evaluation_id):
                progress.show(event)
        result = await connection.client.evaluations.result(evaluation_id)
    print_lines(result_lines(result, width=whole_width()))
    return exit_code(result)


def cancel(
    context: typer.Context,
    evaluation: EvaluationArgument,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A note for the record.")] = "",
) -> None:
    """Cancel an evaluation and its runs."""
    finish(_cancel(target_of(context), evaluation, note))


async def _cancel(target: Target, evaluation: str, note: str) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import state_text

    async with connected(target, needs_runs=True) as connection:
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
) -> None:
    """Compare two results: what they depended on, and the cases that changed. Exits with 1 if a case is worse."""
    finish(_compare(target_of(context), baseline, candidate, json=json))


async def _compare(target: Target, baseline: str, candidate: str, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.output import json_text, print_line, print_lines, whole_width
    from bough_server.cli.render.evaluations import comparison_lines

    async with connected(target, is_silent=True, is_reading=True) as connection:
        client = connection.client
        found = await client.evaluations.compare(await _source(client, baseline), await _source(client, candidate))
    if json:
        print_line(json_text(found))
    else:
        print_lines(comparison_lines(found, width=whole_width()))
    return ExitCode.FAILED if found.worse or found.removed else ExitCode.YES


async def _source(client: "AsyncClient", text: str) -> "str | eval_result_pb2.EvalResult":
    from bough_server.cli.eval_files import baseline_of

    found = baseline_of(text)
    return await resolve_evaluation(client, found) if isinstance(found, str) else found


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
    """Judge stored runs by a case of a set, or by their success alone. Nothing runs, but judges of llm_judge metrics.

    The exit code is that of `bough eval run`.
    """
    files = Files(junit=junit, markdown=markdown, html=html, json=json, content=content)
    finish(_score(target_of(context), runs, set_path, case, files=files))


async def _score(target: Target, runs: Sequence[str], set_path: Path | None, case_id: str, *, files: Files) -> ExitCode:
    from bough import run_source
    from bough_server.cli.connection import connected, resolve_run
    from bough_server.cli.eval_run import exit_code
    from bough_server.cli.output import print_lines, whole_width
    from bough_server.cli.render.evaluations import result_lines
    from bough_server.settings import Settings

    case = _case(set_path, case_id) if set_path is not None else None
    files.check()
    redact = Settings.load(target.config).evaluation.redact
    async with connected(target, needs_runs=True) as connection:
        client = connection.client
        sources = [run_source(await resolve_run(client, run)) for run in runs]
        if case is None:
            result = await client.evaluations.score(sources)
        else:
            result = await client.evaluations.score(sources, expect=case.turns[0].expect, metrics=case.metrics)
    print_lines(result_lines(result, width=whole_width()))
    files.write(result, redact=redact)
    return exit_code(result)


def _case(set_path: Path, case_id: str) -> "eval_set_pb2.EvalCase":
    """Return a case of a set, with the metrics of the set's defaults. Raises ConfigurationError."""
    from bough_server.documents import suggestion
    from bough_server.errors import ConfigurationError
    from bough_server.evals.eval_set import parse_eval_set, planned_cases

    cases = {one.case.id: one.case for one in planned_cases(parse_eval_set(set_path).set, runs=None)}
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
    from bough_server.cli.connection import connected, resolve_run
    from bough_server.cli.output import json_text, print_line, print_lines, whole_width
    from bough_server.cli.render.evaluations import diff_lines

    async with connected(target, is_silent=True, is_reading=True) as connection:
        client = connection.client
        sides = [run_source(await resolve_run(client, each)) for each in (left, right)]
        found = await client.evaluations.diff(*sides)
    if json:
        print_line(json_text(found))
    else:
        print_lines(diff_lines(found, width=whole_width()))
    return ExitCode.YES if found.same else ExitCode.FAILED


async def resolve_evaluation(client: "AsyncClient", text: str) -> str:
    """Return the id of the evaluation that a full id, `last` or a unique suffix of an id names.

    Raises ConfigurationError if there is no such evaluation, or more than one.
    """
    from bough_server.errors import ConfigurationError

    if len(text) == _ID_LENGTH:
        return text.lower()
    if text == "last":
        async for one in client.evaluations.list(page_size=1):
            return one.evaluation_id
        raise ConfigurationError("There is no evaluation yet: start one with `bough eval run`.")
    if len(text) < _MIN_SUFFIX:
        raise ConfigurationError(
            f"{text!r} is too short to name an evaluation: use its id, `last`, or at least the last 6 characters of "
            "its id."
        )
    ids = [one.evaluation_id async for one in client.evaluations.list(page_size=_PAGE_SIZE)]
    found = [each for each in ids if each.endswith(text.lower())]
    if not found:
        raise ConfigurationError(
            f"There is no evaluation whose id ends in {text!r}: `bough eval list` lists evaluations."
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} evaluation ids end in {text!r}, such as {found[0]} and {found[1]}: use more characters."
        )
    return found[0]
