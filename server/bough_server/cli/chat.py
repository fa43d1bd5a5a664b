"""`bough chat`: several runs in one session, one for each line of the user."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.completion import complete_agents
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import (
    ContinueOption,
    DefaultModelOption,
    Display,
    ModelOption,
    Output,
    OutputOption,
    SessionOption,
    Target,
    TimeoutOption,
    View,
    ViewOption,
    target_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bough import AsyncClient
    from bough.v1 import agent_pb2
    from bough_server.cli.connection import Connection
    from bough_server.cli.follow import FollowedTurn

AgentArgument = Annotated[
    str,
    typer.Argument(
        metavar="[AGENT]",
        help="The agent to chat with.  [default: that of the session, else the only one that no other agent calls]",
        autocompletion=complete_agents,
    ),
]
_COMMANDS: Final = {
    "/help": "Show these commands.",
    "/new": "Begin a new session with the next message.",
    "/session": "Show the id of the session, and how to come back to it.",
    "/tree": "Show the agent tree of the last run.",
    "/quit": "Leave, as Ctrl-D does.",
}
"""The lines of a chat that are no messages."""

TreeOption = Annotated[bool, typer.Option("--tree", help="Show the agent tree after each answer.")]


def chat(
    context: typer.Context,
    agent: AgentArgument = "",
    session: SessionOption = "",
    continues: ContinueOption = False,
    model: ModelOption = "",
    view: ViewOption = View.FULL,
    timeout: TimeoutOption = "10m",  # type: ignore[assignment] # the parser converts it to seconds
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    tree: TreeOption = False,
) -> None:
    """Talk to an agent: each line is a message, answered in the same session.

    Questions and approvals are asked in place. Ctrl-C cancels the run, Ctrl-D leaves, /help lists the commands; a
    message that begins with a slash begins with two. Input from a pipe works too: a
    line for each message or answer; the exit code is then that of the last run, as of `bough run`.
    """
    display = Display(output=output, view=view, tree=tree, asks=True, timeout=timeout)
    session = session_of(session, continues=continues)
    finish(_chat(target_of(context), display, agent=agent, session=session, model=model, default_model=default_model))


def session_of(session: str, *, continues: bool) -> str:
    """Return the session that --session and --continue name; empty for a new one. Raises typer.BadParameter."""
    if session and continues:
        raise typer.BadParameter("--session and --continue exclude each other: omit one of them.")
    return "last" if continues else session


async def _chat(
    target: Target, display: Display, *, agent: str, session: str, model: str, default_model: str | None
) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_session
    from bough_server.cli.definitions import with_model

    async with connect(target, default_model=default_model) as connection:
        client = connection.client
        session_id = await resolve_session(client, session) if session else ""
        agent = agent or await _agent_of(client, session_id)
        # Raises NotFound before the user has typed a message in vain.
        await client.catalog.get_agent(agent)
        definitions = await with_model(client, agent, model) if model else []
        conversation = Conversation(connection, agent, display, session_id=session_id, definitions=definitions)
        code = await conversation.hold()
        if conversation.session_id:
            print_stderr(f"session {conversation.session_id}")
        return code


class Conversation:
    """A user's runs of one agent in one session."""

    def __init__(
        self,
        connection: "Connection",
        agent: str,
        display: Display,
        *,
        session_id: str,
        definitions: "Sequence[agent_pb2.AgentDefinition]",
    ) -> None:
        from bough_server.cli.dialogs import InterruptibleDialog, PipedDialog
        from bough_server.cli.prompts import TerminalDialog, is_terminal

        self._connection, self._agent, self._display = connection, agent, display
        self._definitions = definitions
        self._is_terminal = is_terminal()
        self._dialog = InterruptibleDialog(TerminalDialog() if self._is_terminal else PipedDialog())
        self.session_id = session_id
        """The session; empty until a run has begun it."""
        self._run_id = ""
        """The last run; empty before the first."""

    async def hold(self) -> ExitCode:
        """Run a turn for each message until the input ends. Return 0 at a terminal, else the code of the last run."""
        code = ExitCode.YES
        if self._is_terminal:
            print_stderr(f"{self._agent} answers. Ctrl-C cancels a run, Ctrl-D leaves, /help shows more.")
        if self.session_id:
            code = await self._answer_open_requests() or code
        while (text := await self._next_message()) not in (None, "/quit"):
            if text.startswith("/") and not text.startswith("//"):
                await self._obey(text)
            elif text:
                code = await self._try_turn(text.removeprefix("/"))
        return ExitCode.YES if self._is_terminal else code

    async def _obey(self, text: str) -> None:
        """Do what a command says; one that does not exist is answered by those that do."""
        from bough_server.cli.follow import print_tree
        from bough_server.documents.yaml import suggestion

        if text == "/new":
            self.session_id = ""
        elif text == "/tree" and self._run_id:
            await print_tree(self._connection.client, self._run_id, ())
        elif text == "/session" and self.session_id:
            print_stderr(f"{self.session_id}: {self._connection.command} chat --session {self.session_id}")
        elif text == "/help":
            self._dialog.show([f"{name:10}{words}" for name, words in _COMMANDS.items()])
            self._dialog.show(["A message that begins with a slash begins with two: //etc/hosts."])
        elif text in _COMMANDS:
            print_stderr(f"There is no {'run' if text == '/tree' else 'session'} yet: it begins with a message.")
        else:
            print_stderr(f"There is no command {text!r}.{suggestion(text, _COMMANDS)} Type two slashes to send it.")

    async def _next_message(self) -> str | None:
        text = await self._dialog.ask(">")
        if not self._dialog.is_interrupted:
            return text
        if not self._is_terminal:
            raise KeyboardInterrupt
        print_stderr("\nCtrl-D leaves.")
        return ""

    async def _try_turn(self, text: str) -> ExitCode:
        """Run a turn; at a terminal a refused call is printed, and the conversation continues."""
        from bough import CallFailed
        from bough_server.cli.exit_codes import sentences

        try:
            return await self._run_turn(text)
        except CallFailed as error:
            if not self._is_terminal:
                raise
            for line in sentences(error):
                print_stderr(line)
            return ExitCode.IMPOSSIBLE

    async def _run_turn(self, text: str) -> ExitCode:
        from bough_server.cli.conversions import policy_of, view_of
        from bough_server.cli.follow import follow_turn
        from bough_server.cli.options import OnBusy

        stream = self._connection.client.run(
            self._agent,
            text,
            session_id=self.session_id,
            definitions=self._definitions,
            # A question that the user left open must not block the next message.
            policy=policy_of(None, None, OnBusy.CANCEL_INTERRUPTED),
            view=view_of(self._display.view),
            timeout=self._display.timeout,
        )
        followed = await follow_turn(self._connection, stream, self._display, self._dialog)
        self.session_id = followed.session_id or self.session_id
        return await self._report(followed)

    async def _answer_open_requests(self) -> ExitCode | None:
        """Ask for what the session's run waits for, if it does; return the code of the run."""
        from bough_server.cli.conversions import view_of
        from bough_server.cli.follow import follow_turn
        from bough_server.cli.prompts import ask_all

        client = self._connection.client
        run_id = (await client.sessions.get(self.session_id)).current_run_id
        run = await client.get_run(run_id) if run_id else None
        if run is None or not run.open_requests:
            return None
        answers = await ask_all(run.open_requests, self._dialog)
        if not answers or self._dialog.is_interrupted:
            return ExitCode.INPUT_REQUIRED
        stream = client.resume(run_id, answers, view=view_of(self._display.view), timeout=self._display.timeout)
        return await self._report(await follow_turn(self._connection, stream, self._display, self._dialog))

    async def _report(self, followed: "FollowedTurn") -> ExitCode:
        from bough.v1 import execution_pb2
        from bough_server.cli.follow import print_turn_outcome

        self._run_id = followed.run_id
        is_waiting = followed.run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        if is_waiting and self._dialog.is_interrupted:
            await self._connection.client.cancel(followed.run_id)
            print_stderr("\nThe run was cancelled.")
            return ExitCode.CANCELLED
        return await print_turn_outcome(self._connection, followed, self._display)


async def _agent_of(client: "AsyncClient", session_id: str) -> str:
    """Return the agent of a session's newest run; without one, the only agent that no other agent calls.

    Raises ConfigurationError if there is not exactly one.
    """
    from bough_server.errors import ConfigurationError

    if session_id:
        async for run in client.list_runs(session_id=session_id, page_size=1):
            return run.agent
    definitions = [agent.definition async for agent in client.catalog.list_agents()]
    called = {link.agent for each in definitions for link in each.sub_agents if link.agent != each.name}
    first = [each.name for each in definitions if each.name not in called]
    if len(first) == 1:
        return first[0]
    names = ", ".join(first or [each.name for each in definitions])
    raise ConfigurationError(f"Name the agent to chat with: {names}." if names else "There are no agents to chat with.")
