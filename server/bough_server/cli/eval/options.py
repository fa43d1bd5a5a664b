"""Options of the commands of evaluations.

Imports nothing of the schema: `bough --help` and a shell's completion load this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bough_server.cli.eval.files import Content, Files

SetArgument = Annotated[Path, typer.Argument(metavar="SET", help="A file with an eval set, YAML or JSON.")]
AgentOption = Annotated[
    str, typer.Option("--agent", metavar="NAME", help="The agent to evaluate instead of the set's.")
]
TrialsOption = Annotated[
    int | None,
    typer.Option(
        "--trials", metavar="N", min=1, max=1000, help="How many trials each case has, instead of what the set says."
    ),
]
MaxConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--max-concurrency",
        metavar="N",
        min=1,
        max=64,
        help="The most trials in progress at once.  [default: 4]",
    ),
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
UpdateBaselineOption = Annotated[
    bool,
    typer.Option(
        "--update-baseline",
        help="Write the result to the file of --baseline if the evaluation passed; a file that is not there is made.",
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
RerunSuspectsOption = Annotated[
    int | None,
    typer.Option(
        "--rerun-suspects",
        metavar="N",
        min=1,
        max=1000,
        help="Run each case that has a failed trial N more times, and as often with what the baseline ran with.",
    ),
]
RetryCrashedOption = Annotated[
    int | None,
    typer.Option(
        "--retry-crashed",
        metavar="N",
        min=0,
        max=10,
        help="How often a trial that crashed runs again, instead of what the set says; the report counts them.",
    ),
]
MatrixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--matrix",
        metavar="AXIS=VALUES",
        help="Try every case with model=A,B, temperature=0,1 or instruction=@FILE; may be repeated: all combinations.",
    ),
]
AllowRemovedOption = Annotated[
    bool, typer.Option("--allow-removed", help="Cases of the baseline may be missing in the set.")
]
AllowIncompleteOption = Annotated[
    bool,
    typer.Option(
        "--allow-incomplete-baseline", help="The baseline may be of an evaluation that failed or was cancelled."
    ),
]
BudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        metavar="NAME=N",
        help="What all runs, judges and simulated users together may use: cost, tokens, model_calls, tool_calls or "
        "time, as cost=2.",
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
    trials: int | None
    max_concurrency: int | None
    agents: Sequence[Path] = ()
    baseline: str = ""
    update_baseline: bool = False
    allow_incomplete_baseline: bool = False
    gates: Sequence[str] = ()
    allow_removed: bool = False
    rerun_suspects: int | None = None
    retry_crashed: int | None = None
    matrix: Sequence[str] = ()
    budget: Sequence[str] = ()
    labels: Sequence[str] = ()
    request_id: str = ""
    files: Files = field(default_factory=Files)
