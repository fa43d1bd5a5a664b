"""`bough eval`: evaluate agents, and read what was found."""

import typer

from bough_server.cli.commands import command
from bough_server.cli.eval import results
from bough_server.cli.eval.import_ import export, import_
from bough_server.cli.eval.record import record
from bough_server.cli.eval.run import run
from bough_server.cli.eval.validate import validate

eval = typer.Typer(  # the command's name
    help="Evaluate agents by sets of cases: their answers, their tools, and the tree of who called whom.",
    no_args_is_help=True,
)

command(eval, "run")(run)
command(eval, "validate")(validate)
command(eval, "list")(results.list_evaluations)
command(eval, "show")(results.show)
command(eval, "watch")(results.watch)
command(eval, "cancel")(results.cancel)
command(eval, "compare")(results.compare)
command(eval, "score")(results.score)
command(eval, "diff")(results.diff)
command(eval, "record")(record)
command(eval, "import")(import_)
command(eval, "export")(export)
