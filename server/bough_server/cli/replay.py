"""`bough replay`: execute a run again from its log alone, and report where it diverges."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import RunArgument, Target, target_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from bough import AsyncClient
    from bough.v1 import agent_pb2, event_pb2, message_pb2
    from bough_server.agents.registry import Registry
    from bough_server.engine.files import SessionFiles
    from bough_server.identity import Principal, Scope
    from bough_server.runtime.agent import Resolver
    from bough_server.store.ports.sessions import BlobPiece, StoredMessage

ForceOption = Annotated[
    bool, typer.Option("--force", help="Replay even with agents other than those the run started with.")
]
_PAGE_SIZE = 1000


def replay(context: typer.Context, run: RunArgument, force: ForceOption = False) -> None:
    """Execute a run again from its log, with the agents that are configured here or stored on the server.

    No model is called, no tool runs, and nothing is recorded. The exit code is 0 if everything happened as recorded, 1
    if the run diverged, with the place, and 2 if it could not be replayed.
    """
    finish(_replay(target_of(context), run, is_forced=force))


async def _replay(target: Target, text: str, *, is_forced: bool) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.definitions import registry_of
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import pluralize
    from bough_server.clock import SystemClock
    from bough_server.observability.tracing import Tracing, make_provider
    from bough_server.runs.replay import build_offline_resolver
    from bough_server.runs.replay import replay as replay_log
    from bough_server.settings import Settings

    async with connect(target, is_reading=True) as connection:
        run_id = await resolve_run(connection.client, text)
        log = await _log(connection.client, run_id)
        session = await _session(connection.client, log)
        agents = await _agents(connection.client, log, registry_of(Settings.load(target.config)))
        resolver = build_offline_resolver(log, agents, is_forced=is_forced)
        replayed = await replay_log(
            log,
            resolver=resolver,
            tracing=Tracing(make_provider(export=False)),
            clock=SystemClock(),
            session=session,
            files=_files(connection.client, log[0].session_id),
        )
    results = f"{pluralize(replayed.results, 'recorded result')} replayed"
    if replayed.divergence:
        print_line(f"run {run_id} diverges: {replayed.divergence}")
        return ExitCode.FAILED
    end = "to where it waits for input" if log[-1].HasField("run_interrupted") else "to its end"
    print_line(f"run {run_id} replays {end}: {results}, nothing diverged")
    return ExitCode.YES


async def _log(client: "AsyncClient", run_id: str) -> "Sequence[event_pb2.AgentEvent]":
    """Read the log of a run that has ended or waits for input. Raises ConfigurationError if it is still running."""
    from bough_server.errors import ConfigurationError
    from bough_server.log.events import RUN_INTERRUPTED, TERMINAL_KINDS, kind_of

    log = await _events(client, run_id)
    if not log or kind_of(log[-1]) not in {*TERMINAL_KINDS, RUN_INTERRUPTED}:
        raise ConfigurationError(f"Run {run_id} is still running: replay it when it has ended or waits for input.")
    return log


async def _events(client: "AsyncClient", run_id: str) -> "Sequence[event_pb2.AgentEvent]":
    from bough.v1 import follow_pb2

    view, until = follow_pb2.EVENT_VIEW_FULL, follow_pb2.WATCH_UNTIL_CURRENT
    async with client.watch(run_id, until=until, view=view) as stream:
        return [event async for event in stream]


async def _agents(client: "AsyncClient", log: "Sequence[event_pb2.AgentEvent]", registry: "Registry") -> "Resolver":
    """Return the agents configured here, and the run's other agents: stored on the server or sent with the run."""
    from bough import NotFound
    from bough_server.agents.registry import overlay_definitions

    fetched: list[agent_pb2.AgentDefinition] = []
    for ref in log[0].run_started.definition_refs:
        if not registry.place(ref.name):
            # An agent in code exists only in configurations; build_offline_resolver() names it if it is missing here.
            with suppress(NotFound):
                fetched.append((await client.catalog.get_agent(ref.name, revision=ref.revision)).definition)
    return overlay_definitions(registry.resolver, fetched)


def _files(client: "AsyncClient", session_id: str) -> "SessionFiles":
    from bough_server.engine.files import FileCache, SessionFiles
    from bough_server.identity import Principal

    return SessionFiles(_ServerFiles(client), FileCache(), Principal(tenant_id="", user_id=""), session_id)


class _ServerFiles:
    """The files of sessions, read from the server, which knows the caller."""

    def __init__(self, client: "AsyncClient") -> None:
        self._client = client

    async def read(
        self, scope: "Scope", session_id: str, sha256: str, *, offset: int = 0, count: int | None = None
    ) -> "BlobPiece":
        """See Blobs; always returns the whole file."""
        from bough_server.store.ports.sessions import BlobPiece

        data = await self._client.sessions.read_blob(session_id, sha256)
        return BlobPiece(data=data, size=len(data), media_type="")

    async def find_missing(
        self, principal: "Principal", session_id: str, sha256s: "Collection[str]"
    ) -> "Collection[str]":
        """See Blobs; what is missing is found when it is read."""
        return ()


async def _session(client: "AsyncClient", log: "Sequence[event_pb2.AgentEvent]") -> "Sequence[StoredMessage]":
    """Return the messages of the session that the run could see, and calls of linked agents, in order."""
    cut = max(event.run_started.session_cut or event.run_dequeued.session_cut for event in log)
    if not cut:
        return []
    session_id = log[0].session_id
    by_run: dict[str, list[message_pb2.Message]] = {}
    async for message in client.sessions.list_messages(session_id, page_size=_PAGE_SIZE):
        if message.position <= cut:
            by_run.setdefault(message.run_id, []).append(message)
    found = [
        each
        for run_id, said in by_run.items()
        for each in await _read_session_messages(client, run_id, session_id, said)
    ]
    return sorted(found, key=lambda one: one.message.position)  # stable: calls come after the message before them


async def _read_session_messages(
    client: "AsyncClient", run_id: str, session_id: str, listed: "Sequence[message_pb2.Message]"
) -> "Sequence[StoredMessage]":
    """Return the messages and calls that a run has left in its session, read from its log as the server does.

    `listed` are its messages, newest first; they are used alone if a fork outlived the run.
    """
    from bough import NotFound
    from bough_server.log.events import kind_of
    from bough_server.store.ports.log import LogEvent
    from bough_server.store.ports.sessions import StoredMessage
    from bough_server.store.projected import LogAddress
    from bough_server.store.projection import RunFold

    try:
        log = await _events(client, run_id)
    except NotFound:
        return [StoredMessage(message=each, run_id=run_id, agent=each.author, chain="") for each in reversed(listed)]
    fold = RunFold(LogAddress(run_id=run_id, tenant_id="", user_id="", session_id=session_id))
    records = [LogEvent(sequence=event.sequence, kind=kind_of(event), data=b"", event=event) for event in log]
    said = fold.project(records)
    return [*said.shared, *said.messages, *said.shared_calls, *said.calls]
