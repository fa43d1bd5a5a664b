"""A project's team on scripted models: a real server in a thread, and runs with what tests assert about them."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Final, Self, TypeAlias

import structlog
from pydantic import JsonValue

from bough import AsyncClient, Client, CollectedRun, collect_sync, user_message
from bough.v1 import event_pb2, execution_pb2, input_pb2, invocation_pb2
from bough_server.app import open_server
from bough_server.errors import ConfigurationError
from bough_server.models.config import ModelSection
from bough_server.process.loop import ServerRunner
from bough_server.settings import DEFAULT_FILE, Settings

Script: TypeAlias = Mapping[str, Sequence[JsonValue]]
"""The turns of each agent, as in a script file below `agents`."""

RUN_SECONDS: Final = 60.0
"""The most seconds of a run."""


class TeamRun:
    """A run of a team, up to its end or to where it waits for input."""

    def __init__(self, client: Client, collected: CollectedRun, invocation: invocation_pb2.Invocation) -> None:
        self._client = client
        self.collected = collected
        """The run as its events show it."""
        self.invocation = invocation
        """The record of the run: its agent tree with inputs, answers, tool calls, steps, usage and errors."""

    def __repr__(self) -> str:
        return f"<run {self.collected.run_id} {self.state}: {self.tree}>"

    @property
    def answer(self) -> str:
        """The text of the final answer; empty if there is none."""
        return self.collected.answer

    @property
    def state(self) -> str:
        """The run's state in lower case, such as "succeeded", "failed" or "input_required"."""
        return _state_text(self.collected.state)

    @property
    def error(self) -> str:
        """Why the run failed or was cancelled; empty if it was not."""
        return self.collected.error.message if self.collected.error is not None else ""

    @property
    def session_id(self) -> str:
        """The session, for a further run in it."""
        return self.collected.session_id

    @property
    def events(self) -> Sequence[event_pb2.AgentEvent]:
        """The events of the run, in order."""
        return self.collected.events

    @property
    def open_requests(self) -> Sequence[input_pb2.InputRequest]:
        """What the run waits for."""
        return self.collected.open_requests

    @property
    def tree(self) -> list[str]:
        """The agents in the order of their calls, one a line, indented by two spaces for each level.

        After the name come the tools that it called, and its state unless it succeeded: `forecaster (weather): failed`.
        Calls of other agents are lines, not tools.
        """
        tools: dict[str, list[str]] = {}
        for tool in self.invocation.tools:
            if not tool.child_invocation_id:
                tools.setdefault(tool.invocation_id, []).append(tool.name)
        return [_line(agent, tools.get(agent.invocation_id, [])) for agent in self.invocation.agents]

    def calls(self, tool: str) -> list[JsonValue]:
        """Return the arguments of each call of a tool, in order."""
        return [json.loads(each.arguments_json or "{}") for each in self.invocation.tools if each.name == tool]

    def resume(self, *answers: input_pb2.InputAnswer) -> "TeamRun":
        """Answer what the run waits for, and follow it to its end or to where it waits again.

        `bough.approve`, `refuse`, `tool_outcome` and `reply` make the answers.
        """
        with self._client.resume(self.collected.run_id, answers) as stream:
            return _team_run(self._client, [*self.events, *stream])


class Team:
    """A project's agents on a server of this process; its database is new."""

    def __init__(self, client: Client) -> None:
        self.client = client
        """A client of the server."""

    def run(self, agent: str, text: str, *, session_id: str = "") -> TeamRun:
        """Run an agent to its end, or to where it waits for input. Default: in a new session."""
        with self.client.run(agent, user_message(text), session_id=session_id) as stream:
            return _team_run(self.client, stream)


class ServerThread:
    """A thread with an event loop for the servers of all teams, while the context is open."""

    def __init__(self) -> None:
        self._loops: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._thread = Thread(target=self._run, name="bough", daemon=True)

    def __enter__(self) -> asyncio.AbstractEventLoop:
        self._thread.start()
        return self._loops.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loops.result().call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        ServerRunner().run(self._hold())  # asyncio.run would end with a task of agents that raises KeyboardInterrupt

    async def _hold(self) -> None:
        # gRPC polls for the process as long as it has a channel or a server. When the last one is closed, a wake-up
        # that is still queued fails in the next test: this channel, which never connects, keeps the poller.
        async with AsyncClient():
            self._loops.set_result(asyncio.get_running_loop())
            await self._stop.wait()


class Teams:
    """Opens teams of the project at or above a folder, until the context is left; files go to `scratch`."""

    def __init__(self, folder: Path, scratch: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._folder, self._scratch, self._loop = folder, scratch, loop
        self._number = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if not structlog.is_configured():
            _log_to_pytest()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __call__(self, script: Script | None = None, *, config: Path | None = None) -> Team:
        """Open a team whose models, all of them, answer from a script.

        Default: the script of the project's scripted model. `config` is the project's file; default: the nearest
        `bough.yaml`. Raises ConfigurationError if the project is invalid.
        """
        self._number += 1
        scratch = self._scratch / str(self._number)
        scratch.mkdir()
        settings = Settings.load(
            config or _nearest_file(self._folder), host="127.0.0.1", port=0, database=str(scratch / "bough.db")
        )
        if script is None:
            path = _script_of(settings)
        else:
            path = scratch / "script.yaml"
            path.write_text(json.dumps({"agents": script}, ensure_ascii=False), encoding="utf-8")
        scripted = {name: ModelSection(provider="scripted", script=path) for name in [*settings.models, "default"]}
        served = _Served(settings.model_copy(update={"models": scripted}), self._loop)
        address = self._open.enter_context(served).address
        return Team(self._open.enter_context(Client(address, timeout=RUN_SECONDS)))


class _Served:
    """A server that serves on the loop of a thread while the context is open."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings, self._loop = settings, loop
        self._stop = asyncio.Event()
        self._started: Future[str] = Future()
        self._ended: Future[None] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        self._ended = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        self.address = self._started.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._ended is not None, "it was entered"
        self._loop.call_soon_threadsafe(self._stop.set)
        self._ended.result()

    async def _serve(self) -> None:
        try:
            async with open_server(self._settings.for_embedded_server()) as address:
                self._started.set_result(address)
                await self._stop.wait()
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)


def _nearest_file(folder: Path) -> Path:
    for parent in (folder, *folder.parents):
        if (parent / DEFAULT_FILE).is_file():
            return parent / DEFAULT_FILE
    raise ConfigurationError(
        f"There is no {DEFAULT_FILE} in {folder} or above it: put the test into the project's folder, "
        "or pass `bough_team(config=...)`."
    )


def _script_of(settings: Settings) -> Path:
    """Return the script of the default model if that is scripted, else of the first model that is."""
    names = ["default", *settings.models]
    for name in names:
        section = settings.models.get(name)
        while section is not None and section.alias:
            section = settings.models.get(section.alias)
        if section is not None and section.script is not None:
            return section.script
    raise ConfigurationError(
        f"The project in {settings.folder} has no scripted model: add one to {DEFAULT_FILE}, or pass `bough_team` a "
        "script."
    )


def _team_run(client: Client, events: Iterable[event_pb2.AgentEvent]) -> TeamRun:
    collected = collect_sync(events)
    options = invocation_pb2.InvocationOptions(include_steps=True)
    return TeamRun(client, collected, client.get_invocation(collected.run_id, options=options))


def _line(agent: invocation_pb2.AgentInvocation, tools: Sequence[str]) -> str:
    called = f" ({', '.join(tools)})" if tools else ""
    state = "" if agent.state == execution_pb2.EXECUTION_STATE_SUCCEEDED else f": {_state_text(agent.state)}"
    return f"{'  ' * agent.depth}{agent.name}{called}{state}"


def _state_text(state: execution_pb2.ExecutionState.ValueType) -> str:
    return execution_pb2.ExecutionState.Name(state).removeprefix("EXECUTION_STATE_").lower()


def _log_to_pytest() -> None:
    """Send the server's log to the logging module, whose records pytest shows with a test that fails."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.filter_by_level,
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
