"""The composition root: makes every long-lived object from the settings, serves, and ends them in order.

It is the only place that knows every part, and it decides nothing that a call can see.
"""

import asyncio
import gc
import ipaddress
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog
from grpc import aio

from bough.v1 import agent_service_pb2_grpc, catalog_service_pb2_grpc, eval_service_pb2_grpc, session_service_pb2_grpc
from bough_server.agents.catalog import AgentCatalog
from bough_server.agents.editing import AgentEditor
from bough_server.agents.loading import definition_files, load_python, load_sources
from bough_server.agents.registry import Registry
from bough_server.api.agent_service import AgentService
from bough_server.api.catalog_service import CatalogService
from bough_server.api.eval_service import EvalService
from bough_server.api.health import Health, add_reflection
from bough_server.api.session_service import SessionService
from bough_server.clock import Clock, SystemClock
from bough_server.errors import ConfigurationError
from bough_server.ids import new_uuid7
from bough_server.interceptors.auth import current_principal
from bough_server.interceptors.chain import interceptors
from bough_server.metrics import open_metrics
from bough_server.models.registry import ConfiguredModels, build_models
from bough_server.runs.admission import RunDefaults
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.runs import Runs
from bough_server.settings import Settings
from bough_server.settings_sections import LogLevel, ServerSection
from bough_server.store.sql.store import Store, open_store
from bough_server.telemetry import Tracing, make_provider

RECEIVE_BYTES: Final = 8 * 1024 * 1024
"""The largest request."""

CLOSE_SECONDS: Final = 1.0
"""How long streams may take to send their ends once the runs have ended."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", RECEIVE_BYTES),
    # Two servers on one port would start without an error and share its calls.
    ("grpc.so_reuseport", 0),
    # The default of five minutes ends quiet streams whose clients ping to keep them alive.
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
)

_log = structlog.get_logger(__name__)


class App:
    """A server that serves; made by `App.open`."""

    def __init__(self, *, settings: Settings, store: Store, registry: Registry, runs: Runs, server: aio.Server) -> None:
        self.settings, self.store, self.registry, self.runs = settings, store, registry, runs
        self._server, self._health = server, Health()
        self._stopping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.address = ""
        """HOST:PORT, with the port that was bound."""
        self.scraped = ""
        """HOST:PORT where metrics are found; empty where they are not."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings, *, clock: Clock | None = None, goes_on: bool = True
    ) -> "AsyncIterator[App]":
        """A server made from settings, serving until the context is left.

        Runs that an earlier server left open are gone on with while calls are served, unless it only reads and so
        `goes_on` with none. Raises ConfigurationError.
        """
        _check_host(settings.server)
        clock = clock or SystemClock()
        async with AsyncExitStack() as stack:
            models = build_models(
                settings.models,
                folder=settings.folder,
                secrets=settings.secrets,
                currency=settings.currency,
                clock=clock,
            )
            stack.push_async_callback(models.close)
            registry = _registry(settings, models)
            store = open_store(settings.storage.url, durability=settings.storage.durability)
            stack.push_async_callback(store.close)
            provider = make_provider(export=settings.exports_traces)
            tracing = Tracing(provider, capture_content=settings.telemetry.capture_content)
            stack.push_async_callback(asyncio.to_thread, tracing.close)
            told = settings.telemetry
            metrics, scraped = await stack.enter_async_context(
                open_metrics(host=told.prometheus_host, port=told.prometheus_port, export=settings.exports_metrics)
            )
            equipment = replace(
                _equipment(settings, store=store, registry=registry, tracing=tracing, clock=clock), metrics=metrics
            )
            runs = Runs(equipment)
            stack.push_async_callback(runs.close)
            found = await runs.recover() if goes_on else 0
            if found:
                _log.info("going on with runs that an earlier server left open", runs=found)
            server = aio.server(interceptors=interceptors(provider), options=_OPTIONS)
            _add_services(server, runs=runs, store=store, equipment=equipment)
            if settings.server.reflection:
                add_reflection(server)
            app = cls(settings=settings, store=store, registry=registry, runs=runs, server=server)
            app.scraped = scraped
            stack.push_async_callback(app.stop)
            await app.start()
            yield app

    async def start(self) -> None:
        """Binds and serves; SERVING last of all. Raises ConfigurationError where it cannot listen."""
        section = self.settings.server
        await self._health.start(self._server)
        host = f"[{section.host}]" if ":" in section.host else section.host
        try:
            port = self._server.add_insecure_port(f"{host}:{section.port}")
        except RuntimeError as error:
            raise ConfigurationError(
                f"Port {section.port} of {section.host} cannot be listened on; it is probably in use. "
                "Choose another by --port, or 0 for any that is free."
            ) from error
        await self._server.start()
        self.address = f"{host}:{port}"
        await self._health.serving()
        self._watching = asyncio.create_task(self._health.follow(self.store.writing.turns()))

    async def serve(self, *, ready_file: Path | None = None, announce: Callable[[str], None] | None = None) -> None:
        """Serves until SIGINT or SIGTERM, then drains; a second one ends the drain's grace.

        The ready file gets the address, and then `announce` does; the server is SERVING by then, and hears signals.
        """
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told.put_nowait, None)
        hurry = None
        try:
            # What was loaded to serve stays to the end: the collector need not look at it again and again.
            gc.collect()
            gc.freeze()
            if ready_file is not None:
                _write_whole(ready_file, f"{self.address}\n")
            if announce is not None:
                announce(self.address)
            await told.get()
            _log.info("stopping", grace=self.settings.server.drain_grace)
            hurry = asyncio.create_task(self._hurry(told))
            await self.stop(self.settings.server.drain_grace)
        finally:
            if hurry is not None:
                hurry.cancel()
                await asyncio.wait({hurry})
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _hurry(self, told: "asyncio.Queue[None]") -> None:
        """A second signal ends the grace that a first one gives."""
        await told.get()
        await self.runs.drain(0)

    async def stop(self, grace: float = 0.0) -> None:
        """Takes no new runs, lets effects in flight end within `grace` seconds, and closes the port."""
        self._stopping = self._stopping or asyncio.create_task(self._stop(grace))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace: float) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self._health.stopping()
        await self.runs.drain(grace)
        await self._server.stop(CLOSE_SECONDS)


def configure_logging(level: LogLevel) -> None:
    """Sends the log to stderr, from this level on. Stacks are printed without local variables, which may be secret."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    logging.basicConfig(stream=sys.stderr, level=max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING))


@asynccontextmanager
async def serving(settings: Settings, *, clock: Clock | None = None, goes_on: bool = True) -> AsyncIterator[str]:
    """The address of a server that serves while the context is open; see App.open."""
    async with App.open(settings, clock=clock, goes_on=goes_on) as app:
        yield app.address


def serve(config: Path | None = None) -> None:
    """Serves what a configuration says until SIGINT or SIGTERM; for programs that bring their own agents."""
    settings = Settings.load(config)
    configure_logging(settings.log_level)

    async def until_told() -> None:
        async with App.open(settings) as app:
            _log.info("serving", address=app.address)
            await app.serve()

    asyncio.run(until_told())


def _registry(settings: Settings, models: ConfiguredModels) -> Registry:
    python = load_python(settings.python, settings.folder)
    sources = load_sources(definition_files(settings.agents, settings.folder))
    return Registry(sources, models=models, code_agents=python.agents, tools=python.tools, functions=python.functions)


def _equipment(
    settings: Settings, *, store: Store, registry: Registry, tracing: Tracing, clock: Clock
) -> RunDependencies:
    return RunDependencies(
        log=store.log,
        index=store.runs,
        sessions=store.sessions,
        catalog=store.catalog,
        leases=store.leases,
        mailbox=store.mailbox,
        resolver=registry,
        agents=AgentCatalog(registry, store.agents),
        tracing=tracing,
        clock=clock,
        defaults=_defaults(settings),
        worker=new_uuid7(clock.now_ns()),
    )


def _defaults(settings: Settings) -> RunDefaults:
    policy = settings.runs.message(settings.limits.default)
    return RunDefaults(
        limits=policy.limits,
        maximum=settings.limits.maximum.message(),
        deltas=policy.deltas,
        on_disconnect=policy.on_disconnect,
        disconnect_grace=settings.runs.disconnect_grace,
    )


def _add_services(server: aio.Server, *, runs: Runs, store: Store, equipment: RunDependencies) -> None:
    clock, agents = equipment.clock, equipment.agents
    agent = AgentService(runs=runs, principal=current_principal, clock=clock)
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(agent, server)
    trees = EvalService(runs=runs, log=store.log, principal=current_principal)
    eval_service_pb2_grpc.add_EvalServiceServicer_to_server(trees, server)
    catalog = CatalogService(
        agents=agents,
        editor=AgentEditor(agents, store.agents, clock),
        revisions=store.catalog,
        principal=current_principal,
    )
    catalog_service_pb2_grpc.add_CatalogServiceServicer_to_server(catalog, server)
    sessions = SessionService(
        sessions=store.sessions, changing=equipment.changing, principal=current_principal, clock=clock
    )
    session_service_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)


def _check_host(section: ServerSection) -> None:
    """Refuses to be heard where anybody could listen, unless that is wanted. Raises ConfigurationError."""
    try:
        is_loopback = ipaddress.ip_address(section.host).is_loopback
    except ValueError:
        is_loopback = section.host == "localhost"
    if not is_loopback and not section.allow_insecure:
        raise ConfigurationError(
            f"{section.host} is not a loopback address, and calls would travel unencrypted and unauthenticated: "
            "listen on 127.0.0.1, or say --allow-insecure."
        )


def _write_whole(path: Path, text: str) -> None:
    """Writes a file so that whoever sees it sees all of it."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
