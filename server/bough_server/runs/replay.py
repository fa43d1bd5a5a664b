"""Offline replay: run the agents of a recorded run from its log alone, with models and tools that raise if called."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from bough.v1 import agent_pb2, event_pb2, tool_pb2
from bough_server.agents.pinned import REPLAY_VERSION
from bough_server.agents.registry import agent_of
from bough_server.clock import Clock
from bough_server.engine.execution import Execution
from bough_server.engine.files import SessionFiles
from bough_server.engine.journal import Journal
from bough_server.engine.keys import RunInfo
from bough_server.errors import ConfigurationError, NonDeterministic
from bough_server.history.session import SessionHistory
from bough_server.log import events
from bough_server.observability.tracing import Parent, Tracing
from bough_server.runs.fork import override_definitions
from bough_server.runtime.agent import Agent, Resolver, llm_of
from bough_server.runtime.context import LaneContext
from bough_server.runtime.dispatcher import dispatch_root
from bough_server.runtime.toolset import name_linked_tools
from bough_server.store.ports.sessions import StoredMessage
from bough_server.tools.builtin import SPECS
from bough_server.tools.tool import Tool

PATIENCE: Final = 10.0
"""Default timeout in seconds of a replay that makes no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """Outcome of a replay: the number of recorded results, and a message about its divergence, empty if it had none."""

    results: int
    divergence: str


async def replay(
    log: Sequence[event_pb2.AgentEvent],
    *,
    resolver: Resolver,
    tracing: Tracing,
    clock: Clock,
    session: Sequence[StoredMessage] = (),
    files: SessionFiles | None = None,
    patience: float = PATIENCE,
) -> ReplayOutcome:
    """Run the agents of a run that has ended, or was interrupted, again from its log.

    Every effect gets its recorded result; every end is computed again and compared with the recorded one. Nothing is
    appended, and no model or tool is called. An event that the log does not hold is a divergence. Code that waits for
    anything but its effects is a divergence too, if the replay makes no progress for `patience` seconds. `files` are
    those that agents' code may read.
    """
    journal = Journal(log)
    results = len(journal.results.keys() - journal.dispatched)  # ends of children are computed, not replayed
    facts = _build_run_info(log, session)
    execution = Execution(facts, tracing=tracing, clock=clock, journal=journal, recorder=None, files=files)
    execution.spans[""] = tracing.invoke_agent(
        agent=facts.started.agent,
        kind=facts.started.run_started.kind,
        description=resolver.agents[facts.started.agent].definition.description,
        invocation_id=facts.started.invocation_id,
        run_id=facts.run_id,
        session_id=facts.session_id,
        branch=facts.started.agent,
        depth=0,
        parent=Parent.current(),
    )
    divergence = ""
    try:
        await _run_to_end(execution, dispatch_root(execution, resolver, LaneContext), patience)
        if events.kind_of(log[-1]) not in {*events.TERMINAL_KINDS, events.RUN_INTERRUPTED}:
            divergence = "The log has no end."
    except NonDeterministic as error:
        divergence = error.message
    finally:
        execution.end_spans()
    return ReplayOutcome(results=results, divergence=divergence)


def _build_run_info(log: Sequence[event_pb2.AgentEvent], session: Sequence[StoredMessage]) -> RunInfo:
    started = log[0]
    users = [event.run_forked.user_id for event in log if event.HasField("run_forked")]
    return RunInfo(
        run_id=started.run_id or started.invocation_id,
        session_id=started.session_id,
        tenant_id=started.run_started.tenant_id,
        user_id=users[-1] if users else started.run_started.user_id,
        started=started,
        session=SessionHistory(session),
    )


async def _run_to_end(execution: Execution, root: Coroutine[Any, Any, None], patience: float) -> None:
    """Run the root agent to its end. Raises NonDeterministic, also if nothing is replayed for `patience` seconds."""
    finishing = asyncio.get_running_loop().create_task(execution.finish(root))
    try:
        left = None
        while not finishing.done():
            await asyncio.wait({finishing}, timeout=patience)
            before, left = left, len(execution.journal.todo)
            if before == left:
                execution.stop(
                    NonDeterministic(
                        f"The log holds {left} more results and ends, but the agents' code waits for something "
                        "else. Agent code may wait only for its effects."
                    )
                )
    finally:
        finishing.cancel()
    finishing.result()


class _OfflineModels:
    """Models of a replay, which calls none: the log holds the results of all calls."""

    def get(self, name: str) -> NoReturn:
        """Raise NonDeterministic."""
        raise NonDeterministic(f"The replay called the model {name!r}, which a replay never does.")


def make_offline(resolver: Resolver) -> Resolver:
    """Return a catalog whose models and tools raise NonDeterministic if used. Functions are pure, so they may run."""
    tools = {name: _offline_tool(tool) for name, tool in resolver.tools.items()}
    return replace(resolver, tools=tools, models=_OfflineModels())


def _offline_tool(tool: Tool) -> Tool:
    def refuse(**_: object) -> NoReturn:
        raise NonDeterministic(f"The replay ran the tool {tool.name!r}, which a replay never does.")

    return replace(tool, function=refuse, context_parameter="", arguments=None, remote=None)


def build_pinned_tool(ref: event_pb2.ToolRef) -> Tool:
    """Return a tool of a tool server that a log names; of what models were told of it, a replay needs nothing."""

    def refuse(**_: object) -> NoReturn:
        raise NonDeterministic(f"The replay ran the tool {ref.name!r}, which a replay never does.")

    info = tool_pb2.ToolInfo(name=ref.name, server=ref.server)
    return Tool(name=ref.name, description="", input_schema_json="{}", function=refuse, info=info)


def build_offline_resolver(log: Sequence[event_pb2.AgentEvent], resolver: Resolver, *, is_forced: bool) -> Resolver:
    """Return the catalog to replay a log with: the agents of `resolver`, with the changes of the log's forks applied.

    Raises ConfigurationError if an agent or a tool is missing and, unless `is_forced`, if an agent, a tool or the
    replay version differs from the one that the run started with; for agents the message names both revisions.
    """
    # Of tool servers a run has the tools that it began with, whatever they offer now.
    pinned = {ref.name: build_pinned_tool(ref) for ref in log[0].run_started.tool_refs}
    resolver = replace(resolver, tools={**resolver.tools, **pinned})
    versions = log[0].run_started.versions
    named = {ref.name: ref.revision for ref in log[0].run_started.definition_refs} | dict(versions.agents)
    missing = [f"The agent {name!r}" for name in sorted(named) if name not in resolver.agents]
    if missing:
        raise _build_missing_error(missing)
    definitions = {name: resolver.agents[name].definition for name in named}
    for event in log:
        if event.HasField("run_forked"):
            current = _replace_agents(definitions, resolver)
            definitions |= {each.name: each for each in override_definitions(event.run_forked.changes, current)}
            named |= {ref.name: ref.revision for ref in event.run_forked.definition_refs}
    changed = _replace_agents(definitions, resolver)
    if absent := _find_missing_tools(changed, definitions):
        raise _build_missing_error([f"The tool {name!r}" for name in absent])
    if not is_forced:
        _check_versions(versions, named, {name: changed.agents[name].revision for name in definitions}, resolver)
    return make_offline(changed)


def _check_versions(
    versions: event_pb2.RunVersions, named: Mapping[str, str], here: Mapping[str, str], resolver: Resolver
) -> None:
    """Raise ConfigurationError if an agent, a tool or the replay version differs from the run's.

    Models are not compared: a replay calls none.
    """
    others = [
        f"The agent {name!r} differs here: its revision is {here[name]}, and the run started with {revision}."
        for name, revision in sorted(named.items())
        if here[name] != revision
    ]
    others += [
        f"The tool {name!r} has another description or schema here than when the run started."
        for name, digest in sorted(versions.tools.items())
        if name not in resolver.tools or (not resolver.tools[name].server and resolver.tools[name].digest != digest)
    ]
    if versions.replay != REPLAY_VERSION:
        others.append(f"The replay version is {REPLAY_VERSION} here; the run has version {versions.replay}.")
    if others:
        raise ConfigurationError(
            "\n".join([*others, "Restore the configuration that the run started with, or try --force."])
        )


def _build_missing_error(missing: Sequence[str]) -> ConfigurationError:
    lines = [f"{each} is not in this configuration." for each in missing]
    return ConfigurationError("\n".join([*lines, "Name the configuration that the run started with by --config."]))


def _find_missing_tools(resolver: Resolver, agents: Iterable[str]) -> Sequence[str]:
    """Return the tools that agents name and that are missing: agents of a server's catalog come without their tools."""
    links = [link for name in agents for link in llm_of(resolver.agents[name].definition).tools]
    names = {name for _, name in name_linked_tools(links, resolver)}
    return sorted(names - SPECS.keys() - resolver.tools.keys())


def _replace_agents(definitions: Mapping[str, agent_pb2.AgentDefinition], resolver: Resolver) -> Resolver:
    return replace(resolver, agents={name: _resolve_agent(each, resolver) for name, each in definitions.items()})


def _resolve_agent(definition: agent_pb2.AgentDefinition, resolver: Resolver) -> Agent:
    current = resolver.agents[definition.name]
    return current if current.definition == definition else agent_of(definition, resolver.agents, resolver.functions)
