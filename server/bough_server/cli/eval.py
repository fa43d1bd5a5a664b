"""`bough eval`: evaluate agents, and read what was found."""

import typer

from bough_server.cli import eval_results
from bough_server.cli.commands import command
from bough_server.cli.eval_import import export, import_
from bough_server.cli.eval_record import record
from bough_server.cli.eval_run import run
from bough_server.cli.eval_validate import validate

eval = typer.Typer(  # the command's name
    help="Evaluate agents by sets of cases: their answers, their tools, and the tree of who called whom.",
    no_args_is_help=True,
)

command(eval, "run")(run)
command(eval, "validate")(validate)
command(eval, "list")(eval_results.list_evaluations)
command(eval, "show")(eval_results.show)
command(eval, "watch")(eval_results.watch)
command(eval, "cancel")(eval_results.cancel)
command(eval, "compare")(eval_results.compare)
command(eval, "score")(eval_results.score)
command(eval, "diff")(eval_results.diff)
command(eval, "record")(record)
command(eval, "import")(import_)
command(eval, "export")(export)
