"""`bough eval run`: evaluate a set, follow it, and write what it found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bough_server.cli.eval_files import Content, Files
from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import DefaultModelOption, RequestIdOption, Target, target_of

SetArgument = Annotated[Path, typer.Argument(metavar="SET", help="A file with an eval set, YAML or JSON.")]
AgentOption = Annotated[
    str, typer.Option("--agent", metavar="NAME", help="The agent to evaluate instead of the set's.")
]
RunsOption = Annotated[
    int | None,
    typer.Option(
        "--runs", metavar="N", min=1, max=1000, help="How often each case is run, instead of what the set says."
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", min=1, max=64, help="How many runs may be in progress at once.  [default: 4]"),
]
AgentsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--agents",
        metavar="PATH",
        help="A file with agents, or a folder of *.yaml files, that are used before the server's.",
    ),
]
BaselineOption = Annotated[
    str,
    typer.Option(
        "--baseline", metavar="RESULT", help="What to compare with: a file of --json, an evaluation, or `last`."
    ),
]
GateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="EXPR",
        help='What has to hold instead of "every case passes", such as "pass_rate >= 0.9"; may be repeated.',
    ),
]
AllowRemovedOption = Annotated[bool, typer.Option("--allow-removed", help="Cases of the baseline may be gone.")]
BudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        metavar="NAME=N",
        help="What all runs and judges together may use: cost, tokens, model_calls, tool_calls or time, as cost=2.",
    ),
]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of the evaluation; may be repeated.")
]
JUnitOption = Annotated[Path | None, typer.Option("--junit", metavar="PATH", help="Write a JUnit file.")]
MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", metavar="PATH", help="Write Markdown, for a comment on a pull request.")
]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write one self-contained HTML page.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write the result, which can be a later --baseline.")
]
ContentOption = Annotated[
    Content,
    typer.Option(
        "--content", help="How much of texts, arguments and results is written to files: cut is 2,000 characters."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalArguments:
    """The arguments of `bough eval run`."""

    set_path: Path
    agent: str
    runs: int | None
    jobs: int | None
    agents: Sequence[Path] = ()
    baseline: str = ""
    gates: Sequence[str] = ()
    allow_removed: bool = False
    budget: Sequence[str] = ()
    labels: Sequence[str] = ()
    request_id: str = ""
    files: Files = field(default_factory=Files)


def run(
    context: typer.Context,
    set_path: SetArgument,
    agent: AgentOption = "",
    runs: RunsOption = None,
    jobs: JobsOption = None,
    agents: AgentsOption = None,
    baseline: BaselineOption = "",
    gate: GateOption = None,
    allow_removed: AllowRemovedOption = False,
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
    0 it passed, 1 it failed, 2 it could not be judged or not be run, 4 it was cancelled, 130 Ctrl-C.
    """
    arguments = EvalArguments(
        set_path=set_path,
        agent=agent,
        runs=runs,
        jobs=jobs,
        agents=agents or (),
        baseline=baseline,
        gates=gate or (),
        allow_removed=allow_removed,
        budget=budget or (),
        labels=label or (),
        request_id=request_id,
        files=Files(junit=junit, markdown=markdown, html=html, json=json, content=content),
    )
    finish(_run(target_of(context), arguments, default_model=default_model))


async def _run(target: Target, arguments: EvalArguments, *, default_model: str | None) -> ExitCode:
    from bough import InvalidRequest, NotFound
    from bough_server.cli.connection import connected
    from bough_server.cli.eval_files import baseline_of
    from bough_server.cli.eval_follow import Following, result_of
    from bough_server.cli.eval_report import report
    from bough_server.cli.eval_request import EvalRequest
    from bough_server.evals.compare import compare
    from bough_server.settings import Settings

    request = EvalRequest.of(arguments)
    baseline = baseline_of(arguments.baseline) if arguments.baseline else None
    redact = Settings.load(target.config).evaluation.redact
    arguments.files.check(redact)
    async with connected(target, default_model=default_model, subject="evaluation") as connection:
        client, following = connection.client, Following(connection)
        before = await result_of(client, baseline) if baseline is not None else None
        try:
            await following.start(request.events(client, before))
        except (InvalidRequest, NotFound) as error:
            raise request.located(error) from None
        result = await client.evaluations.result(following.evaluation_id)
    comparison = compare(before, result) if before is not None else None
    code = report(result, comparison, files=arguments.files, redact=redact)
    return ExitCode.INTERRUPTED if following.is_interrupted else code
