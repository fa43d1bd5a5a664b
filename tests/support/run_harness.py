"""A harness for tests of runs: a real store on a file, a registry, and Runs, without a server around them."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import NoReturn

from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    event_pb2,
    follow_pb2,
    fork_pb2,
    input_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
)
from bough_server.agents.catalog import AgentCatalog
from bough_server.agents.registry import ListedModels, Registry
from bough_server.clock import Clock, SystemClock
from bough_server.engine.files import FileCache, SessionFiles
from bough_server.functions import Function
from bough_server.identity import Principal, WholeTenant
from bough_server.log import events
from bough_server.observability.metrics import Metrics
from bough_server.observability.tracing import Parent, Tracing, make_provider
from bough_server.quotas import Quotas
from bough_server.runs.accounts import Accounts, Per
from bough_server.runs.admission import EvaluationRun, RunDefaults
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.live import LiveRun
from bough_server.runs.quotas import RunQuotas
from bough_server.runs.replay import ReplayOutcome, build_pinned_tool, replay
from bough_server.runs.runs import Runs
from bough_server.runs.takeover import session_position
from bough_server.runtime.agent import Agent
from bough_server.store.opening import Store, open_store, upgrade_database
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.runs import RunRow
from bough_server.store.ports.sessions import StoredMessage
from bough_server.store.sql.writer import CommitHooks
from bough_server.store.sqlite.database_path import database_path, is_postgres
from bough_server.tool_servers.servers import ToolServers
from bough_server.tools.tool import Tool
from bough_server.tree.fold import fold_log
from tests.support.databases import database_in

_workers = count(1)

ME = Principal(tenant_id="local", user_id="local")
EVERYONE = WholeTenant(tenant_id=ME.tenant_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHarness:
    """What a test of runs needs."""

    store: Store
    registry: Registry
    dependencies: RunDependencies
    runs: Runs
    tracing: Tracing
    clock: Clock
    crashed: asyncio.Event = field(default_factory=asyncio.Event)

    async def crash(self) -> None:
        """Takes the store away from its runs, as a killed process does: nothing more is written."""
        self.crashed.set()
        await self.store.close()

    def executed(self) -> list[LiveRun]:
        """The runs that this process executes."""
        return list(self.runs.supervisor.live_runs)

    async def try_again(self, record: RunRow) -> None:
        """Waits until recovery has tried to continue one run."""
        await self.runs.supervisor.recovery.try_now(record)

    async def park(self, record: RunRow, missing: str) -> None:
        """Leaves a run that cannot be executed here."""
        await self.runs.supervisor.park(record, missing)

    def live(self, run_id: str) -> LiveRun | None:
        """A run that this process executes."""
        return next((live for live in self.executed() if live.run_id == run_id), None)

    async def until_over(self, run: run_pb2.Run) -> None:
        """Wait until this process has released a run, without following it."""
        live = self.live(run.run_id)
        if live is not None:
            await live.wait_for_end()

    async def start(
        self,
        agent: str,
        text: str = "hello",
        *,
        session_id: str = "",
        request_id: str = "",
        policy: policy_pb2.RunPolicy | None = None,
        deadline_time_ns: int | None = None,
        principal: Principal = ME,
        creates: bool = False,
        case: EvaluationRun | None = None,
    ) -> run_pb2.Run:
        """Starts a run; one that `creates` makes the session that it names, if there is none."""
        create = agent_service_pb2.MISSING_SESSION_POLICY_CREATE
        request = agent_service_pb2.RunRequest(
            agent=agent,
            session_id=session_id,
            request_id=request_id,
            policy=policy,
            on_missing_session=create if creates else agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED,
            input=message_pb2.Message(parts=[message_pb2.Part(text=text)]),
        )
        record = await self.runs.start(
            principal, request, deadline_time_ns=deadline_time_ns, trace=Parent.current(), evaluation=case
        )
        return record.run

    async def fork(
        self,
        run: run_pb2.Run,
        after: int,
        *,
        request_id: str = "",
        labels: Mapping[str, str] | None = None,
        allow_open_effects: bool = False,
        deadline_time_ns: int | None = None,
        policy: policy_pb2.RunPolicy | None = None,
        principal: Principal = ME,
        case: EvaluationRun | None = None,
        **changes: object,
    ) -> run_pb2.Run:
        """Forks a run after a sequence; `changes` are the fields of ForkChanges."""
        request = agent_service_pb2.ForkRunRequest(
            run_id=run.run_id,
            after_sequence=after,
            request_id=request_id,
            labels=labels,
            allow_open_effects=allow_open_effects,
            policy=policy,
            changes=fork_pb2.ForkChanges(**changes) if changes else None,  # type: ignore[arg-type]
        )
        record, _ = await self.runs.fork(
            principal, request, deadline_time_ns=deadline_time_ns, evaluation=case, scope=EVERYONE
        )
        return record.run

    async def follow(self, run: run_pb2.Run, *, after: int = 0) -> AsyncGenerator[event_pb2.AgentEvent, None]:
        """The events of a run as they are committed, to its end."""
        stamp = events.stamp(run.run_id, run.session_id)
        async with aclosing(self.runs.follow(EVERYONE, run.run_id, after=after)) as pages:
            async for page in pages:
                for stored in page:
                    yield events.parse(stamp + stored.data)

    async def until_interrupted(self, run: run_pb2.Run) -> list[event_pb2.AgentEvent]:
        """A run's events up to where it waits for input, or its end."""
        stamp, until = events.stamp(run.run_id, run.session_id), follow_pb2.WATCH_UNTIL_INTERRUPTED
        async with aclosing(self.runs.follow(ME, run.run_id, until=until)) as pages:
            return [events.parse(stamp + stored.data) async for page in pages for stored in page]

    async def resume(self, run: run_pb2.Run, *answers: input_pb2.InputAnswer, request_id: str = "") -> run_pb2.Run:
        """Answers what a run asks."""
        request = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=answers, request_id=request_id)
        resumed = await self.runs.resume(ME, request, deadline_time_ns=None)
        return resumed.run_row.run

    async def log(self, run: run_pb2.Run) -> list[event_pb2.AgentEvent]:
        """A run's events, once it has ended."""
        return [event async for event in self.follow(run)]

    async def turn(
        self, agent: str, text: str = "hello", *, session_id: str = "", policy: policy_pb2.RunPolicy | None = None
    ) -> list[event_pb2.AgentEvent]:
        """The events of a whole run."""
        return await self.log(await self.start(agent, text, session_id=session_id, policy=policy))

    async def tree(
        self, log: Sequence[event_pb2.AgentEvent], *, include_steps: bool = False
    ) -> invocation_pb2.Invocation:
        """The record of a run, folded from its stored events."""
        run_id, session_id, after = log[0].run_id, log[0].session_id, 0
        stored: list[StoredEvent] = []
        while page := await self.store.log.read(run_id, after=after):
            stored.extend(page)
            after = page[-1].sequence
        options = invocation_pb2.InvocationOptions(include_steps=include_steps)
        return fold_log(stored, run_id=run_id, session_id=session_id, options=options)

    async def messages(self, session_id: str) -> Sequence[StoredMessage]:
        """A session's messages."""
        return await self.store.sessions.messages(ME, session_id, through=2**31)

    async def replay(self, log: Sequence[event_pb2.AgentEvent], *, patience: float = 30.0) -> ReplayOutcome:
        """Re-executes a run from its log with models and tools that raise when touched."""
        cut = session_position(log)
        session = await self.store.sessions.history(ME, log[0].session_id, through=cut) if cut else ()
        ours = self.registry.resolver
        tools = {name: untouchable(tool) for name, tool in ours.tools.items()}
        pinned = {ref.name: build_pinned_tool(ref) for ref in log[0].run_started.tool_refs}
        resolver = replace(ours, tools={**tools, **pinned}, models=UntouchableModels())
        return await replay(
            log,
            resolver=resolver,
            tracing=self.tracing,
            clock=self.clock,
            session=session,
            files=SessionFiles(self.store.blobs, FileCache(), ME, log[0].session_id),
            patience=patience,
        )


class UntouchableModels:
    """Models that must not be used."""

    def get(self, name: str) -> NoReturn:
        """Raises: a replay asked for a model."""
        raise AssertionError(f"a replay touched the model {name!r}")


def untouchable(tool: Tool) -> Tool:
    """The tool with a function that raises: a replay knows its schema and never runs it."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError(f"a replay touched the tool {tool.name!r}")

    return Tool(
        name=tool.name,
        description=tool.description,
        input_schema_json=tool.input_schema_json,
        function=touched,
        timeout=tool.timeout,
        digest=tool.digest,
    )


@cache
def _empty_database() -> bytes:
    """A database without runs; to create its schema takes longer than all else that opens a store."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bough.db"
        upgrade_database(f"sqlite:///{path}")
        return path.read_bytes()


def _database(folder: Path) -> str:
    """The URL of the database of a folder, made if it is missing."""
    url = database_in(folder)
    if not is_postgres(url) and not (path := database_path(url)).exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_empty_database())
    return url


@asynccontextmanager
async def open_harness(
    folder: Path,
    *,
    models: ListedModels,
    definitions: Iterable[agent_pb2.AgentDefinition] = (),
    code_agents: Iterable[Agent] = (),
    tools: Iterable[Tool] = (),
    functions: Iterable[Function] = (),
    defaults: RunDefaults | None = None,
    hooks: CommitHooks | None = None,
    clock: Clock | None = None,
    worker: str = "",
    metrics: Metrics | None = None,
    tool_servers: Callable[[Mapping[str, str]], ToolServers] = ToolServers.none,
    quotas: Quotas | None = None,
    accounts_per: Per | None = None,
) -> AsyncIterator[RunHarness]:
    """A harness on the database of a folder; it closes everything at the end."""
    clock = clock or SystemClock()
    worker = worker or f"worker-{next(_workers)}"  # as of servers: no two have one name
    store = open_store(_database(folder), durability="process", hooks=hooks or CommitHooks())
    tracing = Tracing(make_provider(export=False))
    registry = Registry(
        definitions,
        models=models,
        code_agents=code_agents,
        tools=tools,
        functions=functions,
        tool_servers=tool_servers,
    )
    accounts = None
    if accounts_per is not None:
        accounts = Accounts(store.accounts, per=accounts_per, currency_code="USD", worker=worker, clock=clock)
    dependencies = RunDependencies(
        store=store,
        agents=AgentCatalog(registry, store.agents),
        tracing=tracing,
        clock=clock,
        defaults=defaults or RunDefaults(),
        worker=worker,
        metrics=metrics,
        quotas=RunQuotas(
            quotas or Quotas(),
            store.usage,
            store.run_counter,
            currency_code="USD",
            worker=worker,
            clock=clock,
            metrics=metrics,
        ),
        accounts=accounts,
    )
    runs = Runs(dependencies)
    await store.leases.begin(worker)
    harness = RunHarness(
        store=store, registry=registry, dependencies=dependencies, runs=runs, tracing=tracing, clock=clock
    )
    try:
        yield harness
    finally:
        await runs.close()
        await registry.tool_servers.close()
        if not harness.crashed.is_set():
            await store.close()


def names(log: Iterable[event_pb2.AgentEvent]) -> list[str]:
    """A log as "agent: event" lines, the leading "agent." of the event's name left out."""
    return [f"{event.agent}: {events.name_of(event).removeprefix('agent.')}" for event in log]
