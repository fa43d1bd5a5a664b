"""`bough replay`: re-executes a run from its log alone and says where it diverges; it changes and asks nothing."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import RunArgument, Target, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bough import AsyncClient
    from bough.v1 import agent_pb2, event_pb2
    from bough_server.agents.registry import Registry
    from bough_server.runtime.agent import Resolver
    from bough_server.store.ports import StoredMessage

ForceOption = Annotated[
    bool, typer.Option("--force", help="Also with agents that are others than those the run began with.")
]
_PAGE_SIZE = 1000


def replay(context: typer.Context, run: RunArgument, force: ForceOption = False) -> None:
    """Run a run's agents again from its log, with the agents that are configured here, or that the server has stored.

    No model is asked, no tool runs, nothing is recorded. 0: everything came as it was recorded; 1: it diverged, and
    where; 2: it could not be done.
    """
    finish(_replay(target_of(context), run, is_forced=force))


async def _replay(target: Target, text: str, *, is_forced: bool) -> ExitCode:
    from bough_server.cli.connection import connected, resolve_run
    from bough_server.cli.definitions import registry_of
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import counted
    from bough_server.clock import SystemClock
    from bough_server.runs.replay import offline_resolver
    from bough_server.runs.replay import replay as replay_log
    from bough_server.settings import Settings
    from bough_server.telemetry import Tracing, make_provider

    async with connected(target, is_reading=True) as connection:
        run_id = await resolve_run(connection.client, text)
        log = await _log(connection.client, run_id)
        session = await _session(connection.client, log)
        agents = await _agents(connection.client, log, registry_of(Settings.load(target.config)))
    resolver = offline_resolver(log, agents, is_forced=is_forced)
    tracing = Tracing(make_provider(export=False))
    replayed = await replay_log(log, resolver=resolver, tracing=tracing, clock=SystemClock(), session=session)
    handed_back = f"{counted(replayed.results, 'recorded result')} handed back"
    if replayed.divergence:
        print_line(f"run {run_id} diverges: {replayed.divergence}")
        return ExitCode.FAILED
    end = "to where it waits for input" if log[-1].HasField("run_interrupted") else "to its end"
    print_line(f"run {run_id} replays {end}: {handed_back}, nothing diverged")
    return ExitCode.YES


async def _log(client: "AsyncClient", run_id: str) -> "Sequence[event_pb2.AgentEvent]":
    """The log of a run that nobody executes now. Raises ConfigurationError for another."""
    from bough.v1 import follow_pb2
    from bough_server.errors import ConfigurationError
    from bough_server.events import RUN_INTERRUPTED, TERMINAL_KINDS, kind_of

    view, until = follow_pb2.EVENT_VIEW_FULL, follow_pb2.WATCH_UNTIL_CURRENT
    async with client.watch(run_id, until=until, view=view) as stream:
        log = [event async for event in stream]
    if not log or kind_of(log[-1]) not in {*TERMINAL_KINDS, RUN_INTERRUPTED}:
        raise ConfigurationError(f"Run {run_id} is still going: replay it when it has ended, or waits for input.")
    return log


async def _agents(client: "AsyncClient", log: "Sequence[event_pb2.AgentEvent]", registry: "Registry") -> "Resolver":
    """The agents that are configured here, and those that the server has stored, or had from the request of the run."""
    from bough import NotFound
    from bough_server.agents.registry import Overlay

    brought: list[agent_pb2.AgentDefinition] = []
    for ref in log[0].run_started.definition_refs:
        if not registry.place(ref.name):
            with suppress(NotFound):
                brought.append((await client.catalog.agent(ref.name, revision=ref.revision)).definition)
    return Overlay(registry, brought)


async def _session(client: "AsyncClient", log: "Sequence[event_pb2.AgentEvent]") -> "Sequence[StoredMessage]":
    """What of its session a run could see: the messages up to its cut, the oldest first."""
    from bough_server.store.ports import StoredMessage

    cut = max(event.run_started.session_cut or event.run_dequeued.session_cut for event in log)
    if not cut:
        return []
    messages = client.sessions.messages(log[0].session_id, page_size=_PAGE_SIZE)
    seen = [message async for message in messages if message.position <= cut]
    return [StoredMessage(message=each, run_id=each.run_id, agent=each.author, chain="") for each in reversed(seen)]
