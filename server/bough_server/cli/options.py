"""Options shared by commands.

Imports nothing of the schema: `bough --help` and a shell's completion load this module. See conversions.py.
"""

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bough_server.cli.completion import complete_models, complete_runs


class View(StrEnum):
    """Selection of a stream's events."""

    FULL = "full"
    SUMMARY = "summary"


class Output(StrEnum):
    """Format of events on standard output."""

    LIVE = "live"
    PLAIN = "plain"
    JSON = "json"
    ANSWER = "answer"


class Delta(StrEnum):
    """Recording of streamed text."""

    AGGREGATED = "aggregated"
    PASSTHROUGH = "passthrough"


class OnDisconnect(StrEnum):
    """Policy for a run that no stream follows."""

    CANCEL = "cancel"
    CONTINUE = "continue"


class OnBusy(StrEnum):
    """Policy for a run whose session another run holds."""

    REJECT = "reject"
    QUEUE = "queue"
    CANCEL_INTERRUPTED = "cancel-interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """How a command follows a run."""

    output: Output
    view: View
    tree: bool
    """Whether the agent tree comes after the answer."""
    asks: bool = False
    """Whether the user is asked, at a terminal, for what the run waits for."""
    timeout: float | None = None
    """The deadline of the run after an answer, in seconds; None: unbounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server to use, as the global flags select it."""

    config: Path | None = None
    address: str | None = None
    embedded: bool = False
    as_caller: str | None = None
    """TENANT/USER, as which a server inside the command takes its calls; None for the local user."""
    verbose: bool = False

    @property
    def arguments(self) -> list[str]:
        """The global flags as they are typed."""
        words = ["--config", str(self.config)] if self.config is not None else []
        words += ["--address", self.address] if self.address is not None else []
        words += ["--as", self.as_caller] if self.as_caller is not None else []
        return words + (["--embedded"] if self.embedded else [])

    @property
    def command(self) -> str:
        """`bough` with the same global flags, quoted for a shell: begins a command to the same server."""
        return shlex.join(["bough", *self.arguments])


def target_of(context: typer.Context) -> Target:
    """Return the global flags of a command."""
    target = context.find_object(Target)
    return target if target is not None else Target()


def parse_seconds(text: str) -> float:
    """Parse a duration such as 10m into seconds, for an option. Raises typer.BadParameter."""
    from bough_server.documents.yaml import parse_duration

    try:
        nanoseconds = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    if nanoseconds <= 0:
        raise typer.BadParameter("must be longer than 0.")
    return nanoseconds / 1e9


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="The configuration file.  [default: BOUGH_CONFIG, else bough.yaml here or in a folder above]",
    ),
]


AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The server to use; of HOST:PORT,HOST:PORT the first that answers, and the next if that is lost.  "
        "[default: BOUGH_ADDRESS; the one that serves the database; the configured port of this machine, 50051, if "
        "Bough answers there; --embedded]",
    ),
]


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Report which server the command uses, if it is one inside it.")
]


EmbeddedOption = Annotated[
    bool,
    typer.Option("--embedded", help="Use a server inside this command, unless one serves the configured database."),
]


def _check_caller(text: str | None) -> str | None:
    if text is None:
        return None
    from bough_server.identity import is_tenant, is_user  # the schema need not be loaded for help

    tenant, separator, user = text.partition("/")
    if not (separator and is_tenant(tenant) and is_user(user)):
        raise typer.BadParameter("must be TENANT/USER, such as acme/jane.")
    return text


AsOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="TENANT/USER",
        callback=_check_caller,
        help="The caller of a server inside this command.  [default: local/local]",
    ),
]


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its full id, `last`, or 6 or more characters that it alone begins or ends with.",
        autocompletion=complete_runs,
    ),
]


SessionArgument = Annotated[
    str,
    typer.Argument(
        metavar="SESSION", help="A session: its id, `last` for that of the newest run, or a unique suffix of 6 or more."
    ),
]


SessionOption = Annotated[
    str,
    typer.Option(
        "--session",
        metavar="SESSION",
        help="The session to continue: its id, `last`, or a unique suffix.  [default: a new one]",
    ),
]


ContinueOption = Annotated[
    bool, typer.Option("--continue", help="Continue the session of the newest run, as --session last does.")
]


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The configured model of all agents of the run.  [default: their own]",
        autocompletion=complete_models,
    ),
]


NoInputOption = Annotated[
    bool,
    typer.Option("--no-input", help="Never ask, even at a terminal: a run that waits for input exits with 3."),
]


ViewOption = Annotated[
    View,
    typer.Option("--view", help="full shows every event; summary, of sub-agents, only start, text, requests and end."),
]


OutputOption = Annotated[
    Output,
    typer.Option(
        "--output",
        help="live for people; plain, a line for each event; json, an AgentEvent on each line; answer, only that.",
    ),
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


AfterOption = Annotated[int, typer.Option("--after", min=0, metavar="N", help="Only events after this sequence.")]


DefaultModelOption = Annotated[
    str | None,
    typer.Option(
        "--default-model",
        metavar="NAME",
        help="The configured model that `default` stands for.",
        autocompletion=complete_models,
    ),
]


RequestIdOption = Annotated[
    str,
    typer.Option(
        "--request-id", metavar="ID", help="Repeating a request under one id does it once.  [default: a new one]"
    ),
]


TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", parser=parse_seconds, metavar="DURATION", help="The run's deadline, such as 90s or 1h30m."
    ),
]


NoTreeOption = Annotated[bool, typer.Option("--no-tree", help="Omit the tree after the answer.")]


LimitOption = Annotated[
    int, typer.Option("--limit", min=1, metavar="N", help="How many to list at most, newest first.")
]
