"""`bough eval run`: evaluate a set, follow it, and write what it found."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from bough_server.cli.eval.files import Content, Files
from bough_server.cli.eval.options import (
    AgentOption,
    AgentsOption,
    AllowIncompleteOption,
    AllowRemovedOption,
    BaselineOption,
    BudgetOption,
    ContentOption,
    EvalArguments,
    GateOption,
    HtmlOption,
    JsonOption,
    JUnitOption,
    LabelOption,
    MarkdownOption,
    MatrixOption,
    MaxConcurrencyOption,
    RerunSuspectsOption,
    RetryCrashedOption,
    SetArgument,
    TrialsOption,
    UpdateBaselineOption,
)
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import DefaultModelOption, RequestIdOption, Target, target_of

if TYPE_CHECKING:
    from bough.v1 import eval_result_pb2


def run(
    context: typer.Context,
    set_path: SetArgument,
    agent: AgentOption = "",
    trials: TrialsOption = None,
    max_concurrency: MaxConcurrencyOption = None,
    agents: AgentsOption = None,
    baseline: BaselineOption = "",
    update_baseline: UpdateBaselineOption = False,
    gate: GateOption = None,
    rerun_suspects: RerunSuspectsOption = None,
    retry_crashed: RetryCrashedOption = None,
    matrix: MatrixOption = None,
    allow_removed: AllowRemovedOption = False,
    allow_incomplete_baseline: AllowIncompleteOption = False,
    budget: BudgetOption = None,
    label: LabelOption = None,
    junit: JUnitOption = None,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
    json: JsonOption = None,
    content: ContentOption = Content.CUT,
    request_id: RequestIdOption = "",
    default_model: DefaultModelOption = None,
) -> None:
    """Evaluate a set, follow the evaluation, and write what it found.

    The first line on standard error is "evaluation ID". Ctrl-C cancels the evaluation, twice leaves at once. Exit code:
    0 it passed, 1 it failed, 2 it could not be scored or not be run, 4 it was cancelled, 130 Ctrl-C.
    """
    arguments = EvalArguments(
        set_path=set_path,
        agent=agent,
        trials=trials,
        max_concurrency=max_concurrency,
        agents=agents or (),
        baseline=baseline,
        update_baseline=update_baseline,
        gates=gate or (),
        allow_removed=allow_removed,
        rerun_suspects=rerun_suspects,
        retry_crashed=retry_crashed,
        matrix=matrix or (),
        allow_incomplete_baseline=allow_incomplete_baseline,
        budget=budget or (),
        labels=label or (),
        request_id=request_id,
        files=Files(junit=junit, markdown=markdown, html=html, json=json, content=content),
    )
    finish(_run(target_of(context), arguments, default_model=default_model))


async def _run(target: Target, arguments: EvalArguments, *, default_model: str | None) -> ExitCode:
    from bough import InvalidRequest, NotFound
    from bough_server.cli.connection import connect
    from bough_server.cli.eval.files import find_baseline_file, read_baseline
    from bough_server.cli.eval.follow import Following, result_of
    from bough_server.cli.eval.report import report
    from bough_server.cli.eval.request import EvalRequest
    from bough_server.evals.results.compare import compare
    from bough_server.settings import Settings

    request = EvalRequest.of(arguments)
    updated = find_baseline_file(arguments.baseline) if arguments.update_baseline else None
    is_new = updated is not None and not updated.exists()
    baseline = read_baseline(arguments.baseline) if arguments.baseline and not is_new else None
    redact = Settings.load(target.config).evaluation.redact
    files = replace(arguments.files, baseline=updated)
    files.check(redact)
    async with connect(target, default_model=default_model, subject="evaluation") as connection:
        client, following = connection.client, Following(connection, redact=redact)
        before = await result_of(client, baseline) if baseline is not None else None
        try:
            await following.start(request.events(client, before))
        except (InvalidRequest, NotFound) as error:
            raise request.locate_error(error) from None
        result = await client.evaluations.result(following.evaluation_id)
    comparison = compare(before, result) if before is not None else None
    code = report(result, comparison, files=files, redact=redact)
    if updated is not None and code != ExitCode.YES:
        print_stderr(_explain_kept_baseline(result, files, connection.command))
    return ExitCode.INTERRUPTED if following.is_interrupted else code


def _explain_kept_baseline(result: "eval_result_pb2.EvalResult", files: Files, command: str) -> str:
    """Return why the baseline was not written, and how to write it although the evaluation did not pass."""
    from bough_server.evals.results.compare import find_baseline_problem

    if why := find_baseline_problem(result):
        return f"{files.baseline} was not written: the result {why}."
    accept = shlex.join(["--json", str(files.baseline), "--content", files.content.value])
    return (
        f"{files.baseline} was not written, because the evaluation did not pass. To accept its result as the baseline: "
        f"{command} eval show {result.evaluation_id} {accept}"
    )
