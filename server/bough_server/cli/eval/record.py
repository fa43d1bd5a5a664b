"""`bough eval record`: make cases of a set from runs."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import Target, target_of

if TYPE_CHECKING:
    from bough import AsyncClient
    from bough.v1 import eval_set_pb2
    from bough_server.settings_sections import RedactSection


class Expect(StrEnum):
    """What a recorded case expects of later runs."""

    AGENTS = "agents"
    TOOLS = "tools"
    ANSWER = "answer"


_LARGEST: Final = 2**31 - 1
_CONTROL_EVENTS: Final = "agent.control.*"
_ALL: Final = (Expect.AGENTS, Expect.TOOLS, Expect.ANSWER)


def record(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, as for `bough tree`.")],
    set_path: Annotated[
        Path, typer.Option("--set", metavar="SET", help="The file of the set; it is made if it does not exist.")
    ],
    case: Annotated[
        str, typer.Option("--case", metavar="ID", help="The id of the case, for one run.  [default: the run's]")
    ] = "",
    expect: Annotated[
        list[Expect] | None,
        typer.Option("--expect", help="What the case expects: repeat it.  [default: agents, tools and answer]"),
    ] = None,
    mocks: Annotated[
        bool,
        typer.Option("--mocks/--no-mocks", help="Write the results of tools into the case, so that no tool runs."),
    ] = True,
) -> None:
    """Write runs into a set as cases: what the user said, what people answered, the agents, tool calls and answer.

    A case of the same id is replaced. The file is written anew: comments in it are lost.
    """
    finish(_record(target_of(context), runs, set_path, case, expect=expect or _ALL, mocks=mocks))


async def _record(
    target: Target, runs: Sequence[str], set_path: Path, case_id: str, *, expect: Sequence[Expect], mocks: bool
) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.eval.files import why_unwritable
    from bough_server.errors import ConfigurationError
    from bough_server.settings import Settings

    if case_id and len(runs) > 1:
        raise ConfigurationError("--case names one case, and there are several runs: omit it.")
    if why := why_unwritable(set_path):
        raise ConfigurationError(f"{set_path}: {why}")
    redact = Settings.load(target.config).evaluation.redact
    eval_set = _read_or_new(set_path)
    async with connect(target, is_silent=True, is_reading=True) as connection:
        for run in runs:
            run_id = await resolve_run(connection.client, run)
            made, agent = await _case(connection.client, run_id, case_id or run_id, expect, mocks=mocks)
            eval_set.agent = eval_set.agent or agent
            _put(eval_set, _redact_case(made, redact))
    _write(set_path, eval_set)
    return ExitCode.YES


async def _case(
    client: "AsyncClient", run_id: str, case_id: str, expect: Sequence[Expect], *, mocks: bool
) -> "tuple[eval_set_pb2.EvalCase, str]":
    """Return a case that a run passes, and the run's agent. Say on standard error what the case leaves out."""
    from bough.v1 import execution_pb2, follow_pb2, invocation_pb2
    from bough_server.cli.render.format import state_text
    from bough_server.evals.sets.cases_from_runs import case_of, extract_answers

    options = invocation_pb2.InvocationOptions(
        max_agents=_LARGEST, max_tools=_LARGEST, max_tool_args_bytes=_LARGEST, max_tool_result_bytes=_LARGEST
    )
    invocation = await client.get_invocation(run_id, options=options)
    made, dropped = case_of(invocation, case_id, parts=[each.value for each in expect], with_mocks=mocks)
    async with client.watch(run_id, until=follow_pb2.WATCH_UNTIL_CURRENT, event_names=[_CONTROL_EVENTS]) as stream:
        answers, unanswered = extract_answers([event async for event in stream], with_mocks=mocks)
    made.answers.extend(answers)
    if invocation.state != execution_pb2.EXECUTION_STATE_SUCCEEDED:
        print_stderr(f"The run {run_id} is {state_text(invocation.state)}: state the expected result in the case.")
    for sentence in (*dropped, *unanswered):
        print_stderr(sentence)
    return made, invocation.agent


def _redact_case(case: "eval_set_pb2.EvalCase", redact: "RedactSection") -> "eval_set_pb2.EvalCase":
    """Return a case without secrets; say on standard error that it differs from the run."""
    from bough_server.evals.results.content import remove_secrets
    from bough_server.matching.secrets import REDACTED

    if not redact.fields and not redact.patterns:
        return case
    shown = remove_secrets(case, fields=redact.fields, patterns=redact.patterns)
    if REDACTED in str(shown):
        print_stderr(
            f"{case.id}: Values that evaluation.redact names are {REDACTED!r} in the case, and match what it removes "
            "then. What the user said is sent without them."
        )
    return shown


def _read_or_new(path: Path) -> "eval_set_pb2.EvalSet":
    from bough.v1 import eval_set_pb2
    from bough_server.errors import ConfigurationError
    from bough_server.evals.sets.eval_set import parse_eval_set

    if not path.exists():
        return eval_set_pb2.EvalSet(name=_name_of(path))
    source = parse_eval_set(path)
    if source.rows is not None:
        raise ConfigurationError(f"{path}: Its cases come from {source.rows.path}: record into another set.")
    return source.set


def _name_of(path: Path) -> str:
    """Return the file's name as the name of a set."""
    import re

    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)
    return name if name[:1].isalpha() else f"set-{name}"


def _put(eval_set: "eval_set_pb2.EvalSet", case: "eval_set_pb2.EvalCase") -> None:
    """Add a case, in the place of one of the same id."""
    for one in eval_set.cases:
        if one.id == case.id:
            one.CopyFrom(case)
            return
    eval_set.cases.append(case)


def _write(path: Path, eval_set: "eval_set_pb2.EvalSet") -> None:
    from bough_server.cli.output import json_text
    from bough_server.cli.render.format import pluralize
    from bough_server.documents.files import write_whole
    from bough_server.evals.sets.eval_set import eval_set_yaml

    text = json_text(eval_set) + "\n" if path.suffix == ".json" else eval_set_yaml(eval_set)
    write_whole(path, text)
    print_stderr(f"wrote {path}: {pluralize(len(eval_set.cases), 'case')}")
