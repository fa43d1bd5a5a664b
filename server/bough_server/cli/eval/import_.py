"""`bough eval import` and `export`: sets and results of other tools."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish, print_stderr

if TYPE_CHECKING:
    from bough.v1 import eval_set_pb2


class ExportFormat(StrEnum):
    """The tools whose readers find their fields in an exported result."""

    TRPC = "trpc"


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="An eval set, test file or result of trpc-agent-go or ADK, and the file of its metrics, if any.",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="SET", help="The file to write: YAML, or JSON if it ends so.")],
    agent: Annotated[str, typer.Option("--agent", metavar="NAME", help="The agent that the cases run.")] = "",
    judge: Annotated[
        str,
        typer.Option(
            "--judge", metavar="MODEL", help="The configured model that metrics ask instead of a judge by its address."
        ),
    ] = "",
    user: Annotated[
        str, typer.Option("--user", metavar="MODEL", help="The configured model that plays the user of scenarios.")
    ] = "",
) -> None:
    """Convert an eval set of another tool, and list everything in its files that was left out. Needs no server.

    A metrics file of the same name, or a test_config.json, beside the set is read too. Metrics without a counterpart
    stay in the set as custom metrics, and cases that have one are not scored. Keys and secrets are left out.
    """
    finish(_import(files, to, agent, judge=judge, user=user))


def export(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="A result that --json wrote.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The file to write.")],
    format: Annotated[ExportFormat, typer.Option("--format", help="The tool that reads it.")] = ExportFormat.TRPC,
) -> None:
    """Write a result in the form of another tool. Needs no server."""
    finish(_export(result, to, format))


async def _import(files: Sequence[Path], to: Path, agent: str, *, judge: str, user: str) -> ExitCode:
    from bough_server.cli.render.format import pluralize
    from bough_server.documents.files import write_whole
    from bough_server.evals.importers.files import import_files
    from bough_server.evals.importers.left_out import list_lines
    from bough_server.evals.sets.eval_set import is_recorded

    imported = import_files(files, judge=judge, user=user)
    eval_set = imported.set
    eval_set.agent = agent
    text = _text_of(eval_set, to)
    write_whole(to, text)
    for line in (*imported.sentences, *list_lines(imported.left_out)):
        print_stderr(line)
    if not agent and not all(is_recorded(case) for case in eval_set.cases):
        print_stderr("The set names no agent: write one into it, or name it by `bough eval run --agent`.")
    print_stderr(f"wrote {to}: {pluralize(len(eval_set.cases), 'case')}")
    return ExitCode.YES


async def _export(result: Path, to: Path, format: ExportFormat) -> ExitCode:
    import json

    from bough_server.cli.eval.files import read_result
    from bough_server.documents.files import write_whole
    from bough_server.evals.importers.trpc_result import trpc_result

    match format:
        case ExportFormat.TRPC:
            written = trpc_result(read_result(result))
    write_whole(to, json.dumps(written, ensure_ascii=False, indent=2) + "\n")
    print_stderr(f"wrote {to}")
    return ExitCode.YES


def _text_of(eval_set: "eval_set_pb2.EvalSet", path: Path) -> str:
    if path.suffix == ".json":
        from bough_server.cli.output import json_text

        return json_text(eval_set) + "\n"
    from bough_server.evals.sets.eval_set import eval_set_yaml

    return eval_set_yaml(eval_set)
