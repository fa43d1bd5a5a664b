"""`bough eval validate`: check eval sets without a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import Target, target_of

if TYPE_CHECKING:
    from bough_server.errors import Problem
    from bough_server.evals.sets.expectation_validation import KnownNames


def validate(
    context: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="SET...", help="Files with one eval set each.")],
    no_python: Annotated[
        bool, typer.Option("--no-python", help="Import no Python module; agents, tools and metrics are not checked.")
    ] = False,
) -> None:
    """Check eval sets against the agents, tools, metrics and models of the configuration. Needs no server.

    Prints each problem as "file:line: field: message" and exits with 2; exits with 0 if there are none.
    """
    finish(_validate(target_of(context), paths, has_python=not no_python))


async def _validate(target: Target, paths: list[Path], *, has_python: bool) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import pluralize
    from bough_server.errors import ConfigurationError

    known = _load_known_names(target, has_python=has_python)
    files = list(dict.fromkeys(paths))
    found: dict[str, None] = {}
    case_count = 0
    for path in files:
        try:
            cases, problems = _check_set(path, known)
        except ConfigurationError as error:
            # The other files are checked all the same.
            found |= dict.fromkeys(error.message.splitlines())
            continue
        case_count += cases
        found |= dict.fromkeys(map(str, problems))
    for problem in found:
        print_line(problem)
    if found:
        print_stderr(f"{pluralize(len(found), 'problem')} in {pluralize(len(files), 'file')}.")
        return ExitCode.IMPOSSIBLE
    print_stderr(f"{pluralize(case_count, 'case')} in {pluralize(len(files), 'file')}: no problems found.")
    return ExitCode.YES


def _check_set(path: Path, known: "KnownNames") -> tuple[int, list["Problem"]]:
    """Return how many cases a set has, and every problem of its file, in the order of the lines."""
    from bough_server.agents.loading import drop_reported_problems
    from bough_server.evals.sets.eval_set import read_eval_set
    from bough_server.evals.sets.validation import set_problems

    source, problems = read_eval_set(path)
    if source.lines:
        problems += drop_reported_problems(set_problems(source, known), problems)
    return len(source.set.cases), sorted(problems, key=lambda problem: (problem.path != str(path), problem.line))


def _load_known_names(target: Target, *, has_python: bool) -> "KnownNames":
    """Return the names of the configuration; none are known if there is no configuration."""
    from bough_server.cli.definitions import load_known_names
    from bough_server.evals.metrics.custom import load_metrics
    from bough_server.evals.sets.expectation_validation import KnownNames
    from bough_server.evals.sets.unknown_names import list_called_agents
    from bough_server.settings import Settings

    settings = Settings.load(target.config)
    if not settings.agents and not settings.python and not settings.models:
        print_stderr(
            "No agents and models are configured, so names are not checked; --config names a bough.yaml that has them."
        )
        return KnownNames()
    models = frozenset(settings.models)
    if not has_python:
        return KnownNames(models=models)
    known = load_known_names(settings)
    definitions = (*known.definitions, *known.code_agents)
    metrics = load_metrics(settings.python, settings.folder)
    return KnownNames(
        agents=frozenset(each.name for each in definitions),
        called_agents=list_called_agents(definitions),
        models=models,
        tools=frozenset(known.tools),
        metrics={name: function.takes_configuration for name, function in metrics.items()},
    )
