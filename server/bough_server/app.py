"""Composition root: builds every long-lived object from the settings, serves, and closes them in order.

It is the only module that knows every part, and contains no behavior that a call can observe.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from grpc import aio
from opentelemetry.sdk.trace import TracerProvider

from bough_server.agents.catalog import AgentCatalog
from bough_server.agents.loading import definition_files, digest_code, load_python, load_sources
from bough_server.agents.registry import Registry
from bough_server.api.health import Health, serve_health
from bough_server.api.ports import TlsFiles, bind_ports, check_exposure
from bough_server.api.reflection import add_reflection
from bough_server.api.services import Services
from bough_server.auth.authentication import Authenticator
from bough_server.clock import Clock, SystemClock
from bough_server.distribution import version
from bough_server.documents.files import write_whole
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.evaluations import Evaluations
from bough_server.evals.metrics.custom import load_metrics
from bough_server.identity import LOCAL, Principal
from bough_server.ids import new_uuid7
from bough_server.interceptors.auth import current_caller
from bough_server.interceptors.chain import interceptors
from bough_server.interceptors.request_limits import most_bytes
from bough_server.matching.secrets import RedactionRules
from bough_server.models.registry import ConfiguredModels, build_models
from bough_server.observability.logs import configure_logging
from bough_server.observability.metrics import Metrics, open_metrics
from bough_server.observability.score_events import ScoreEvents, make_logger_provider
from bough_server.observability.tracing import Tracing, make_provider
from bough_server.process.loop import ServerRunner, end_cancelled_process
from bough_server.process.memory import give_back_freed_memory
from bough_server.process.stop_signals import StopSignals
from bough_server.process.watchdog import Watchdog
from bough_server.quotas import Quotas
from bough_server.runs.accounts import Accounts
from bough_server.runs.admission import RunDefaults
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.quotas import RunQuotas
from bough_server.runs.runs import Runs
from bough_server.settings import Settings
from bough_server.settings_sections import ServerSection, to_reachable_address
from bough_server.store.opening import display_database_url, open_store, wait_for_store
from bough_server.store.sql.store import Store
from bough_server.threads import run_in_thread

CLOSE_SECONDS: Final = 1.0
"""Seconds that streams have to send their last messages after the runs have ended."""

MAX_PENDING_CALLS: Final = 50_000
"""The most calls that may wait for the event loop to take them; their requests are not read before."""

MAX_CALLS_OF_CONNECTION: Final = 2_500
"""The most calls in progress on one connection. A client's further ones wait, unsent, until one of them has ended.

Not lower: clients send some calls before they know of an end or of this bound, which are refused with UNAVAILABLE. With
it 2,000 calls at once are answered; 250,000 bare headers on five connections take 340 MB instead of 3.2 GB.
"""

_METADATA_BYTES: Final = 16 * 1024
"""The most bytes of a call's metadata, if callers are asked for tokens."""

_OPTIONS: Final = (
    # With the default of five minutes the server closes quiet streams whose clients ping to keep them alive. Clients
    # ping every 30 seconds; what comes a little early is no abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    # Calls that arrive faster than the event loop takes them wait. With the defaults of 1,000 calls and 30 seconds gRPC
    # ends those beyond with a bare CANCELLED, which no client can tell from its own cancellation.
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.server_max_unrequested_time_in_server", 600),
)

_log = structlog.get_logger(__name__)


class App:
    """A serving server, created by `App.open`."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        registry: Registry,
        runs: Runs,
        evaluations: Evaluations,
        server: aio.Server,
        tls: TlsFiles | None,
        watchdog: Watchdog,
        authenticator: Authenticator | None = None,
    ) -> None:
        self.settings, self.store, self.registry, self.runs = settings, store, registry, runs
        self.evaluations = evaluations
        self.watchdog = watchdog
        self.health = Health()
        self._server, self._tls, self._probes = server, tls, AsyncExitStack()
        self._authenticator = authenticator
        self._stopping: asyncio.Task[None] | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self.address = ""
        """HOST:PORT with the port that was bound."""
        self.mtls_address = ""
        """HOST:PORT at which clients need a certificate; empty if there is none."""
        self.health_address = ""
        """HOST:PORT at which health alone is served; empty if there is none."""
        self.metrics: Metrics | None = None
        """The metrics of this process; None if they are disabled."""
        self.metrics_address = ""
        """HOST:PORT at which Prometheus can scrape metrics; empty if it cannot."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        *,
        clock: Clock | None = None,
        recover: bool = True,
        is_embedded: bool = False,
        is_watched: bool = True,
        is_worker: bool = False,
        principal: Principal = LOCAL.principal,
    ) -> "AsyncIterator[App]":
        """Open a server that serves until the context exits.

        Runs that an earlier server left open are recovered while calls are served; a server that only reads passes
        `recover` as False. `is_embedded` for a server inside a command; `is_watched` False if the event loop is another
        program's; `is_worker` if others serve the same port; `principal` is that of all calls, if callers are not
        authenticated. Raises ConfigurationError.
        """
        check_exposure(settings.server, has_auth=settings.has_auth)
        async with AsyncExitStack() as stack:
            clock = clock or SystemClock()
            tls = None if settings.server.tls is None else TlsFiles(settings.server, settings.locate, clock)
            registry = _registry(settings, _open_models(settings, stack, clock))
            stack.push_async_callback(registry.tool_servers.close)
            # Before the store, whose last commits are counted too.
            metrics, metrics_address = await stack.enter_async_context(_open_metrics(settings))
            # A command that only reads leaves the database to the versions that use it.
            may_upgrade = settings.storage.upgrade_at_start and (recover or not is_embedded)
            store = await _open_store(settings, metrics, clock, is_patient=not is_embedded, may_upgrade=may_upgrade)
            stack.push_async_callback(store.close)
            provider, tracing = _open_tracing(settings, stack)
            dependencies = _run_dependencies(
                settings, store=store, registry=registry, tracing=tracing, metrics=metrics, clock=clock
            )
            watchdog = Watchdog(metrics.on_loop_block if metrics is not None else None)
            if is_watched:  # before runs are recovered: one of them may block the loop at once
                stack.enter_context(watchdog)
            runs = Runs(dependencies)
            stack.push_async_callback(runs.close)
            score_events = _open_score_events(settings, stack)
            evaluation = _evaluation_dependencies(
                settings, runs, store=store, dependencies=dependencies, score_events=score_events
            )
            evaluations = Evaluations(evaluation)
            stack.push_async_callback(evaluations.close)
            if not is_embedded:  # a command connects to those only that its runs need
                registry.tool_servers.start()
            if recover:
                await _recover(runs, evaluations)
            authenticator = _make_authenticator(settings, clock, metrics)
            server = _make_server(settings.server, provider, authenticator, principal, shares_port=is_worker)
            services = Services(runs=runs, evaluations=evaluations, store=store, dependencies=dependencies)
            services.add_to(server, caller=current_caller)
            if settings.server.reflection:
                add_reflection(server)
            app = cls(
                settings=settings,
                store=store,
                registry=registry,
                runs=runs,
                evaluations=evaluations,
                server=server,
                tls=tls,
                watchdog=watchdog,
                authenticator=authenticator,
            )
            app.metrics, app.metrics_address = metrics, metrics_address
            if metrics is not None and tls is not None:
                metrics.watch_certificates(tls.count_refused_files, lambda: tls.certificate.value.expires)
            # Before start(), so that a failed start is undone as well.
            stack.push_async_callback(app.stop)
            await app.start()
            if recover or not is_embedded:  # a command that only reads ends before another one could use its server
                store.publish(to_reachable_address(app.address))
            yield app

    async def start(self) -> None:
        """Bind the port and serve, becoming SERVING last. Raises ConfigurationError if the port cannot be bound."""
        section = self.settings.server
        await self.health.start(self._server)
        self.address, self.mtls_address = bind_ports(self._server, section, self._tls)
        if section.health_port is not None:
            probes = serve_health(self.health, section.host, section.health_port)
            self.health_address = await self._probes.enter_async_context(probes)
        await self._server.start()
        await self.health.set_serving()
        self._watching = {
            asyncio.create_task(self.store.watch()),
            *(asyncio.create_task(each.watch()) for each in (self._tls.watched if self._tls is not None else ())),
            asyncio.create_task(self.health.follow(self.store.write_health.changes())),
            asyncio.create_task(give_back_freed_memory()),
            *(asyncio.create_task(watch) for watch in self.runs.watch_limits()),
        }
        if self._authenticator is not None:
            self._watching.add(asyncio.create_task(self._authenticator.watch()))

    async def serve(self, *, ready_file: Path | None = None, announce: Callable[[str], None] | None = None) -> None:
        """Serve until SIGINT or SIGTERM, then drain; a second signal ends the drain's grace period.

        The address is written to `ready_file`, then passed to `announce`. By then the server is SERVING and handles
        signals.
        """
        with StopSignals(self.watchdog.measure_block) as signals:
            # Objects loaded for serving live to the end: exempt them from every later collection.
            gc.collect()
            gc.freeze()
            self._log_start()
            if ready_file is not None:
                write_whole(ready_file, f"{self.address}\n")
            if announce is not None:
                announce(self.address)
            try:
                await signals.wait()
            except asyncio.CancelledError:
                end_cancelled_process()
            _log.info("stopping", grace=self.settings.server.drain_grace)
            hurry = asyncio.create_task(self._end_grace(signals))
            try:
                await self.stop(self.settings.server.drain_grace)
            finally:
                hurry.cancel()
                await asyncio.wait({hurry})

    def _log_start(self) -> None:
        _log.info(
            "serving",
            address=self.address,
            version=version(),
            database=display_database_url(self.settings.storage.url),
            agents=len(self.registry.resolver.agents),
            models=", ".join(self.settings.models),
            metrics=self.metrics_address or "none",
            **({"mtls": self.mtls_address} if self.mtls_address else {}),
            **({"health": self.health_address} if self.health_address else {}),
            worker=self.runs.worker.name,
        )

    async def _end_grace(self, signals: StopSignals) -> None:
        """Wait for a second signal and end the grace period that the first one started."""
        await signals.wait()
        await self.runs.drain(0)

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new runs, let effects in flight end within `grace` seconds, and close the port."""
        # One task for all callers, shielded: a cancelled caller must not leave the server half stopped.
        self._stopping = self._stopping or asyncio.create_task(self._stop(grace))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace: float) -> None:
        for watching in self._watching:
            watching.cancel()
        if self._watching:
            await asyncio.wait(self._watching)
        self.store.publish("")
        # In this order: load balancers stop sending calls, runs end, and their streams can still send the ends.
        await self.health.set_not_serving()
        await self.evaluations.close()
        await self.runs.drain(grace)
        await self._server.stop(CLOSE_SECONDS)
        await self._probes.aclose()


@asynccontextmanager
async def open_server(
    settings: Settings,
    *,
    clock: Clock | None = None,
    recover: bool = True,
    is_embedded: bool = False,
    on_wait: Callable[[], None] = lambda: None,
    principal: Principal = LOCAL.principal,
) -> AsyncIterator[str]:
    """Yield the address of a server that serves while the context is open; see App.open.

    One inside a command, if that ends well, waits for the runs that other commands follow, and calls `on_wait` first.
    """
    async with App.open(
        settings, clock=clock, recover=recover, is_embedded=is_embedded, is_watched=False, principal=principal
    ) as app:
        yield app.address
        if is_embedded and app.runs.list_followed_runs():
            on_wait()
            while followed := app.runs.list_followed_runs():
                await asyncio.wait(followed)


def serve(config: Path | None = None) -> None:
    """Serve a configuration until SIGINT or SIGTERM; for programs that bring their own agents."""
    settings = Settings.load(config)
    configure_logging(settings.log_level, settings.log_format)

    async def run_app() -> None:
        async with App.open(settings) as app:
            await app.serve()

    ServerRunner().run(run_app())


def _open_models(settings: Settings, stack: AsyncExitStack, clock: Clock) -> ConfiguredModels:
    models = build_models(
        settings.models, folder=settings.folder, secrets=settings.secrets, currency=settings.currency, clock=clock
    )
    stack.push_async_callback(models.close)
    return models


async def _open_store(
    settings: Settings, metrics: Metrics | None, clock: Clock, *, is_patient: bool, may_upgrade: bool
) -> Store:
    storage = settings.storage
    opening = partial(
        open_store,
        storage.url,
        listen_url=storage.listen_url or "",
        durability=storage.durability,
        may_upgrade=may_upgrade,
        report_commit=None if metrics is None else metrics.on_commit,
        clock=clock,
    )
    store = await wait_for_store(opening, storage.wait_at_start if is_patient else 0.0)
    if metrics is not None and store.followed is not None:
        metrics.watch_followed_logs(store.followed.count_reads)
    return store


def _open_tracing(settings: Settings, stack: AsyncExitStack) -> tuple[TracerProvider | None, Tracing]:
    provider = make_provider(export=settings.exports_traces)
    tracing = Tracing(provider, capture_content=settings.telemetry.capture_content)
    # In a thread: exporting the remaining spans blocks.
    stack.push_async_callback(run_in_thread, tracing.close)
    return provider, tracing


def _open_score_events(settings: Settings, stack: AsyncExitStack) -> ScoreEvents:
    provider = make_logger_provider(export=settings.exports_logs)
    score_events = ScoreEvents(provider, capture_content=settings.telemetry.capture_content)
    stack.push_async_callback(run_in_thread, score_events.close)
    return score_events


def _open_metrics(settings: Settings) -> AbstractAsyncContextManager[tuple[Metrics | None, str]]:
    telemetry = settings.telemetry
    return open_metrics(host=telemetry.prometheus_host, port=telemetry.prometheus_port, export=settings.exports_metrics)


def _make_authenticator(settings: Settings, clock: Clock, metrics: Metrics | None) -> Authenticator | None:
    if settings.auth is None:
        return None
    on_problem = _ignore if metrics is None else metrics.on_auth_problem
    return Authenticator(settings.auth, settings.tenants, clock=clock, on_problem=on_problem)


def _make_server(
    section: ServerSection,
    provider: TracerProvider | None,
    authenticator: Authenticator | None,
    principal: Principal,
    *,
    shares_port: bool,
) -> aio.Server:
    chain = interceptors(
        provider,
        max_files_bytes=section.max_files_bytes,
        max_request_bytes=section.max_request_bytes,
        max_streams=section.max_streams,
        max_streams_of_caller=section.max_streams_of_caller,
        authenticator=authenticator,
        local=replace(LOCAL, principal=principal),
    )
    received = ("grpc.max_receive_message_length", most_bytes(section.max_files_bytes))
    # Else two servers on one port would start without an error and share its calls.
    reuse = ("grpc.so_reuseport", int(shares_port))
    # Without a grace: streams in progress stay on their connection until they end.
    age = ("grpc.max_connection_age_ms", int(section.max_connection_age * 1000))
    # A token that names many groups is larger than the default of 8 KiB.
    metadata = () if authenticator is None else (("grpc.max_metadata_size", _METADATA_BYTES),)
    return aio.server(interceptors=chain, options=(received, reuse, age, *metadata, *_OPTIONS))


def _registry(settings: Settings, models: ConfiguredModels) -> Registry:
    python = load_python(settings.python, settings.folder)
    return Registry(
        [*load_sources(definition_files(settings.agents, settings.folder)), *python.graphs],
        models=models,
        code_agents=python.agents,
        tools=python.tools,
        functions=python.functions,
        tool_servers=settings.build_tool_servers,
    )


def _run_dependencies(
    settings: Settings, *, store: Store, registry: Registry, tracing: Tracing, metrics: Metrics | None, clock: Clock
) -> RunDependencies:
    worker = new_uuid7(clock.now_ns())
    return RunDependencies(
        store=store,
        agents=AgentCatalog(
            registry, store.agents, {tenant: section.models for tenant, section in settings.tenants.items()}
        ),
        quotas=RunQuotas(
            Quotas(tenants={tenant: section.limits() for tenant, section in settings.tenants.items()}),
            store.usage,
            store.run_counter,
            currency_code=settings.currency,
            worker=worker,
            clock=clock,
            metrics=metrics,
        ),
        tracing=tracing,
        metrics=metrics,
        clock=clock,
        defaults=_defaults(settings),
        worker=worker,
        max_files_bytes=settings.server.max_files_bytes,
        max_live_runs=settings.server.max_live_runs,
        accounts=None
        if settings.accounts is None
        else Accounts(
            store.accounts,
            per=settings.accounts.per,
            currency_code=settings.currency,
            worker=worker,
            clock=clock,
            metrics=metrics,
        ),
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


async def _recover(runs: Runs, evaluations: Evaluations) -> None:
    """Continue the runs and evaluations that no server executes."""
    if found := await runs.recover():
        _log.info("recovering runs that an earlier server left open", runs=found)
    if found := await evaluations.recover():
        _log.info("recovering evaluations that an earlier server left open", evaluations=found)


def _evaluation_dependencies(
    settings: Settings, runs: Runs, *, store: Store, dependencies: RunDependencies, score_events: ScoreEvents
) -> EvaluationDependencies:
    registry, redact = dependencies.agents.registry, settings.evaluation.redact
    return EvaluationDependencies(
        runs=runs,
        store=store,
        agents=dependencies.agents,
        clock=dependencies.clock,
        worker=runs.worker,
        models={
            info.name: model.config_digest
            for info in registry.list_models()
            if (model := registry.resolver.model(info.name)) is not None
        },
        metrics=load_metrics(settings.python, settings.folder),
        code_digest=digest_code(settings.python, settings.folder),
        score_events=score_events,
        redaction=RedactionRules(fields=redact.fields, patterns=redact.patterns),
        count_hung_metric=_ignore if dependencies.metrics is None else dependencies.metrics.on_hung_metric,
    )


def _ignore(*_: object) -> None:
    pass
