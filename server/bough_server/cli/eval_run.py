"""`bough eval run`: evaluate a set, follow it, and write what it found."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.eval_files import Content, Files
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import DefaultModelOption, RequestIdOption, Target, target_of

if TYPE_CHECKING:
    from bough import AsyncClient, InvalidRequest
    from bough.v1 import agent_pb2, eval_result_pb2, evaluation_pb2, policy_pb2
    from bough_server.agents.definition import Source
    from bough_server.cli.connection import Connection
    from bough_server.cli.eval_progress import EvalProgress
    from bough_server.errors import ConfigurationError
    from bough_server.evals.eval_set import SetSource
    from bough_server.settings_sections import RedactSection

MAX_SET_BYTES: Final = 8 * 1024 * 1024
_FRAME_BYTES: Final = 64 * 1024

_BUDGETS: Final = {
    "cost": "cost_nanos",
    "tokens": "tokens",
    "model_calls": "model_calls",
    "tool_calls": "tool_calls",
    "time": "wall_duration",
}

SetArgument = Annotated[Path, typer.Argument(metavar="SET", help="A file with an eval set, YAML or JSON.")]
AgentOption = Annotated[
    str, typer.Option("--agent", metavar="NAME", help="The agent to evaluate instead of the set's.")
]
RunsOption = Annotated[
    int | None, typer.Option("--runs", metavar="N", help="How often each case is run, instead of what the set says.")
]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", metavar="N", help="How many runs may be in progress at once.  [default: 4]")
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
    typer.Option("--baseline", metavar="RESULT", help="What to compare with: a file of --json, or an evaluation's id."),
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
    from bough import InvalidRequest
    from bough_server.cli.connection import connected
    from bough_server.cli.definitions import definitions_in
    from bough_server.cli.eval_files import baseline_of
    from bough_server.evals.eval_set import parse_eval_set
    from bough_server.settings import Settings

    source = parse_eval_set(arguments.set_path)
    _check_size(source)
    sources = definitions_in(arguments.agents) if arguments.agents else ()
    baseline = baseline_of(arguments.baseline) if arguments.baseline else None
    arguments.files.check()
    redact = Settings.load(target.config).evaluation.redact
    async with connected(target, default_model=default_model) as connection:
        try:
            result = await _evaluate(connection, arguments, source, sources, baseline)
        except InvalidRequest as error:
            raise _located(error, source, sources) from None
        return await _report(connection, arguments, result, redact)


def _check_size(source: "SetSource") -> None:
    from bough_server.errors import ConfigurationError

    if (size := source.set.ByteSize()) > MAX_SET_BYTES - _FRAME_BYTES:
        raise ConfigurationError(
            f"{source.path}: The set is {size:,} bytes and may be {MAX_SET_BYTES >> 20} MiB: split it."
        )


async def _evaluate(
    connection: "Connection",
    arguments: EvalArguments,
    source: "SetSource",
    sources: "Sequence[Source]",
    baseline: "str | eval_result_pb2.EvalResult | None",
) -> "eval_result_pb2.EvalResult":
    """Run the evaluation to its end and return its result; Ctrl-C cancels it."""
    from bough_server.cli.eval_progress import EvalProgress

    definitions: list[agent_pb2.AgentDefinition] = [one.definition for one in sources]
    events = connection.client.evaluations.run(
        source.set,
        agent=arguments.agent,
        definitions=definitions,
        runs=arguments.runs,
        jobs=arguments.jobs,
        gates=arguments.gates,
        budget=budget_of(arguments.budget),
        baseline=baseline,
        allow_removed=arguments.allow_removed,
        labels=pairs_of(arguments.labels, "--label"),
        request_id=arguments.request_id,
    )
    with EvalProgress() as progress:
        evaluation_id = await _follow(connection.client, events, progress)
    return await connection.client.evaluations.result(evaluation_id)


async def _follow(
    client: "AsyncClient", events: "AsyncIterator[evaluation_pb2.EvaluationEvent]", progress: "EvalProgress"
) -> str:
    import asyncio

    from bough_server.cli.loop import on_interrupt

    evaluation_id = ""
    cancelling: list[asyncio.Task[evaluation_pb2.Evaluation]] = []
    following = asyncio.current_task()

    def interrupt() -> None:
        if cancelling or not evaluation_id:
            assert following is not None, "a coroutine runs in a task"
            following.cancel()
            return
        print_stderr("Cancelling the evaluation. Press Ctrl-C again to leave at once.")
        cancelling.append(asyncio.ensure_future(client.evaluations.cancel(evaluation_id)))

    with on_interrupt(interrupt):
        async for event in events:
            if not evaluation_id:
                evaluation_id = event.evaluation_id
                print_stderr(f"evaluation {evaluation_id}")
            progress.show(event)
    if cancelling:
        await asyncio.wait(cancelling)
        raise KeyboardInterrupt
    return evaluation_id


async def _report(
    connection: "Connection",
    arguments: EvalArguments,
    result: "eval_result_pb2.EvalResult",
    redact: "RedactSection",
) -> ExitCode:
    from bough_server.cli.output import print_lines, whole_width
    from bough_server.cli.render.evaluations import result_lines

    comparison = None
    if arguments.baseline:
        from bough_server.cli.eval_files import baseline_of

        comparison = await connection.client.evaluations.compare(baseline_of(arguments.baseline), result.evaluation_id)
    print_lines(result_lines(result, comparison, width=whole_width()))
    arguments.files.write(result, comparison, redact=redact)
    return exit_code(result)


def exit_code(result: "eval_result_pb2.EvalResult") -> ExitCode:
    """Return the exit code of a result."""
    from bough.v1 import eval_result_pb2

    if result.cancelled:
        return ExitCode.CANCELLED
    if result.status == eval_result_pb2.METRIC_STATUS_PASSED:
        return ExitCode.YES
    return ExitCode.FAILED if result.status == eval_result_pb2.METRIC_STATUS_FAILED else ExitCode.IMPOSSIBLE


def budget_of(texts: Sequence[str]) -> "policy_pb2.Limits | None":
    """Return the limits that options such as cost=2 and time=10m name. Raises ConfigurationError."""
    from bough.v1 import policy_pb2
    from bough_server.documents import parse_duration, suggestion
    from bough_server.errors import ConfigurationError

    if not texts:
        return None
    limits = policy_pb2.Limits()
    for name, value in pairs_of(texts, "--budget").items():
        if name not in _BUDGETS:
            raise ConfigurationError(f"--budget {name}: There is no such budget.{suggestion(name, _BUDGETS)}")
        try:
            if name == "time":
                limits.wall_duration.FromNanoseconds(parse_duration(value))
            elif name == "cost":
                limits.cost_nanos = round(float(value) * 1e9)
            else:
                setattr(limits, _BUDGETS[name], int(value))
        except (ValueError, OverflowError):
            raise ConfigurationError(f"--budget {name}={value}: must be a number, or a duration for time.") from None
    return limits


def pairs_of(texts: Sequence[str], option: str) -> dict[str, str]:
    """Return the pairs that options such as key=value name. Raises ConfigurationError."""
    from bough_server.errors import ConfigurationError

    pairs: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigurationError(f"{option} {text}: must be NAME=VALUE.")
        pairs[name] = value
    return pairs


def _located(
    error: "InvalidRequest", source: "SetSource", sources: "Sequence[Source]"
) -> "ConfigurationError | InvalidRequest":
    """Rewrite the violations of a request as "file:line: field: message" where they are about a file."""
    from bough_server.cli.definitions import in_files
    from bough_server.errors import ConfigurationError

    if not any(violation.field.startswith("set.") for violation in error.violations):
        return in_files(error, sources)
    lines = [
        str(source.problem(violation.field.removeprefix("set."), violation.description))
        if violation.field.startswith("set.")
        else f"{violation.field}: {violation.description}"
        for violation in error.violations
    ]
    return ConfigurationError("\n".join(lines))
