"""Metrics of this process by OpenTelemetry, for Prometheus and by OTLP: agents, model calls, tools, runs, the store.

Model call metrics have the names of the GenAI conventions. Recording costs the caller only a queue entry; the collector
does the rest. The number of distinct names from outside is bounded.
"""

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import datetime
from threading import Thread
from typing import TYPE_CHECKING, Final, NamedTuple
from wsgiref.simple_server import WSGIServer

from opentelemetry.metrics import CallbackOptions, Histogram, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

from bough.v1 import usage_pb2
from bough_server.errors import ConfigurationError
from bough_server.observability.tracing import resource
from bough_server.threads import run_in_thread

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_NAMES: Final = 256
"""The most distinct names of agents, of tools and of models; further ones are reported as OTHER."""
OTHER: Final = "other"

_MAX_PENDING: Final = 4096
_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""The buckets that the GenAI conventions recommend for the duration of an operation."""
_LONG_SECONDS: Final = (*_SECONDS, 163.84, 327.68, 655.36, 1310.72, 2621.44)
_COMMIT_SECONDS: Final = tuple(0.0005 * 2**power for power in range(15))
"""From half a millisecond to eight seconds."""
_WRITES: Final = tuple(2**power for power in range(11))
"""Up to as many as are committed together."""
_TOKENS: Final = {
    "input_tokens": ("input_tokens", "Input tokens, with those of a cache."),
    "output_tokens": ("output_tokens", "Output tokens, with those of reasoning."),
    "cache_read.input_tokens": ("cached_input_tokens", "Input tokens that a provider's cache had."),
    "cache_write.input_tokens": ("cache_write_tokens", "Input tokens that a provider's cache has from here on."),
    "reasoning.output_tokens": ("reasoning_tokens", "Output tokens of reasoning."),
}
"""Ends of the names of counters, with their fields of Usage and their descriptions."""
_MODALITY: Final = {"gen_ai.token.modality": "unknown"}
"""No provider is asked for tokens by modality, and the conventions require the attribute."""


class BoundedNames:
    """Names as attribute values: the first MAX_NAMES of them, and OTHER for all further ones."""

    def __init__(self, most: int = MAX_NAMES) -> None:
        self._most, self._known = most, set[str]()

    def __call__(self, name: str) -> str:
        """Return the name to report."""
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(name)
        return name


class ModelCallEnd(NamedTuple):
    """A model call that ended, or lost an attempt."""

    agent: str
    provider: str
    model: str
    """The model that was called."""
    answered_by: str
    """The provider's own name of the model that answered; empty if none did."""
    seconds: float | None
    """Duration of the call with all its attempts; None if it continues."""
    error: str
    """Reason of the failure; empty if the call did not fail."""
    used: usage_pb2.Usage | None
    """Usage of the attempt; None if the provider reported no tokens."""


class Metrics:
    """Metrics of a process. Only new events may be recorded, not those that a replay reads again."""

    def __init__(self, provider: MeterProvider) -> None:
        self._provider = provider
        meter = provider.get_meter("bough")
        self._pending: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._runs = 0
        self._agents, self._tools, self._models = BoundedNames(), BoundedNames(), BoundedNames()
        self._invocations = meter.create_counter(
            "bough.agent.invocations", unit="{invocation}", description="Agent invocations that ended."
        )
        self._cost = meter.create_counter(
            "bough.agent.cost",
            unit="{billionth}",
            description="Cost of an agent's model calls, in billionths of the prices' currency.",
        )
        self._blocked = meter.create_counter(
            "bough.event_loop.blocks",
            unit="{block}",
            description="Times that the event loop did not turn for a second.",
        )
        self._takeovers = meter.create_counter(
            "bough.run.takeovers",
            unit="{run}",
            description="Runs of other servers, and of earlier ones, that this one continued.",
        )
        self._lease_losses = meter.create_counter(
            "bough.leases.lost",
            unit="{lease}",
            description="Times that this server found that others had taken it for lost.",
        )
        self._hung_metrics = meter.create_counter(
            "bough.evaluation.metrics.hung",
            unit="{call}",
            description="Calls of custom metrics that had not returned when the timeout of their case passed.",
        )
        self._auth_problems = meter.create_counter(
            "bough.auth.problems",
            unit="{problem}",
            description="Times that a new file of API keys was not used, or an issuer's keys could not be fetched.",
        )

        self._charges = meter.create_counter(
            "bough.charges",
            unit="{billionth}",
            description="Charges of the ledger for attempts of model calls, in billionths of their currency.",
        )
        self._quota_refusals = meter.create_counter(
            "bough.quota.refusals",
            unit="{refusal}",
            description="Runs and model calls that a quota of a tenant or a user did not allow.",
        )
        self._balance_refusals = meter.create_counter(
            "bough.balance.refusals",
            unit="{refusal}",
            description="Runs and model calls that were refused because too little was left of an account.",
        )

        def histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                name, unit=unit, description=description, explicit_bucket_boundaries_advisory=bounds
            )

        self._agent_time = histogram("bough.agent.duration", "s", "An invocation, start to end.", _LONG_SECONDS)
        self._run_time = histogram("bough.run.duration", "s", "A run, start to end.", _LONG_SECONDS)
        self._tool_time = histogram("bough.tool.duration", "s", "A call of a tool, start to end.", _SECONDS)
        self._tokens = {
            field: meter.create_counter(
                f"gen_ai.client.inference.usage.{name}", unit="{token}", description=description
            )
            for name, (field, description) in _TOKENS.items()
        }
        self._model_time = histogram(
            "gen_ai.client.inference.duration", "s", "A model call with all its attempts.", _SECONDS
        )
        self._batch_size = histogram("bough.store.batch.size", "{write}", "Writes that one commit held.", _WRITES)
        self._commit_time = histogram(
            "bough.store.commit.duration", "s", "A commit, from the begin of its transaction.", _COMMIT_SECONDS
        )
        meter.create_observable_up_down_counter(
            "bough.runs.active",
            callbacks=[self._collect],
            unit="{run}",
            description="Runs that this process executes, without those waiting for a session or for input.",
        )

    def watch_followed_logs(self, counted: Callable[[], Mapping[str, int]]) -> None:
        """Report how often logs of other servers were found to have grown, by how they were found."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(times, {"found_by": name}) for name, times in counted().items()]

        self._provider.get_meter("bough").create_observable_counter(
            "bough.followed_logs.reads",
            callbacks=[observe],
            unit="{read}",
            description="Reads of new events of logs that are followed here and written by other servers.",
        )

    def watch_certificates(self, count_refused_files: Callable[[], int], expires: Callable[[], datetime]) -> None:
        """Report when the server's certificate expires, and how many files of certificates are not used."""

        def observe_expiry(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(expires().timestamp())]

        def observe_refused_files(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(count_refused_files())]

        meter = self._provider.get_meter("bough")
        meter.create_observable_gauge(
            "bough.certificate.expiry",
            callbacks=[observe_expiry],
            unit="s",
            description="When the server's certificate expires, in seconds since 1970.",
        )
        meter.create_observable_gauge(
            "bough.certificate.files.refused",
            callbacks=[observe_refused_files],
            unit="{file}",
            description="Changed files of certificates that failed the checks, so that their last contents are used.",
        )

    @contextlib.contextmanager
    def run_active(self) -> Iterator[None]:
        """Count a run as executed by this process while the context is open."""
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1

    def on_agent_end(self, agent: str, *, kind: str, state: str, end_reason: str, seconds: float) -> None:
        """Count and time an invocation that has ended."""
        self._enqueue(self._write_agent, agent, {"kind": kind, "state": state}, end_reason, seconds)

    def on_run_end(self, agent: str, *, state: str, seconds: float) -> None:
        """Count and time a run that has ended."""
        self._enqueue(self._write_run, agent, state, seconds)

    def on_tool_end(self, tool: str, *, outcome: str, error: str, seconds: float) -> None:
        """Count and time a tool call that has ended; `error` is the reason if its outcome is `failed`."""
        self._enqueue(self._write_tool, tool, outcome, error, seconds)

    def on_model_call(self, call: "ModelCallEnd") -> None:
        """Count an attempt of a model call that failed, or its end."""
        self._enqueue(self._write_model, call)

    def on_loop_block(self) -> None:
        """Count that the event loop has not turned for a second; any thread may call it."""
        self._enqueue(self._blocked.add, 1)

    def on_takeover(self, cause: str) -> None:
        """Count that this server continues a run of another, or of itself before: `lost`, or `released` in order."""
        self._enqueue(self._takeovers.add, 1, {"cause": cause})

    def on_charge(self, nanos: int, currency_code: str) -> None:
        """Count a charge of an attempt of a model call."""
        self._enqueue(self._charges.add, nanos, {"currency": currency_code})

    def on_quota_refusal(self, quota: str) -> None:
        """Count a run or a model call that a quota does not allow, by the name of its setting."""
        self._enqueue(self._quota_refusals.add, 1, {"quota": quota})

    def on_balance_refusal(self) -> None:
        """Count a run or a model call for which too little is left of an account."""
        self._enqueue(self._balance_refusals.add, 1)

    def on_lease_loss(self) -> None:
        """Count that other servers declared this one dead, and may have its runs."""
        self._enqueue(self._lease_losses.add, 1)

    def on_hung_metric(self) -> None:
        """Count a call of a custom metric that has not returned in time."""
        self._enqueue(self._hung_metrics.add, 1)

    def on_auth_problem(self, source: str) -> None:
        """Count that what proves callers could not be read: `keys_file`, or the keys of an `issuer`."""
        self._enqueue(self._auth_problems.add, 1, {"source": source})

    def on_commit(self, writes: int, seconds: float) -> None:
        """Count a transaction of the store with so many writes; any thread may call it."""
        self._enqueue(self._write_commit, writes, seconds)

    @property
    def pending(self) -> int:
        """The number of recorded values that are added to the metrics at the next collection."""
        return len(self._pending)

    def close(self) -> None:
        """Export the remaining metrics for at most 5 seconds; blocks, so do not call it on the event loop."""
        self._provider.shutdown(5_000)

    def _enqueue(self, write: Callable[..., None], *values: object) -> None:
        self._pending.append((write, values))
        # No reader has collected: drain two per new entry, so that the queue shrinks and no caller waits long.
        if len(self._pending) > _MAX_PENDING:
            self._drain(2)

    def _drain(self, most: int) -> None:
        for _ in range(most):
            try:
                write, values = self._pending.popleft()
            except IndexError:  # the collector's thread has emptied the queue meanwhile
                return
            write(*values)

    def _write_agent(self, agent: str, labels: Mapping[str, str], end_reason: str, seconds: float) -> None:
        named = {"agent": self._agents(agent), **labels}
        self._invocations.add(1, {**named, "end_reason": end_reason})
        self._agent_time.record(seconds, named)

    def _write_run(self, agent: str, state: str, seconds: float) -> None:
        self._run_time.record(seconds, {"agent": self._agents(agent), "state": state})

    def _write_tool(self, tool: str, outcome: str, error: str, seconds: float) -> None:
        named = {"tool": self._tools(tool), "outcome": outcome}
        self._tool_time.record(seconds, {**named, "error.type": error} if error else named)

    def _write_model(self, call: "ModelCallEnd") -> None:
        agent = self._agents(call.agent)
        named = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": call.provider or "unknown",
            "gen_ai.request.model": self._models(call.model),
            "gen_ai.agent.name": agent,
        }
        if call.answered_by:
            named["gen_ai.response.model"] = self._models(call.answered_by)
        if call.seconds is not None:
            self._model_time.record(call.seconds, {**named, "error.type": call.error} if call.error else named)
        if call.used is not None:
            used = {field.name: value for field, value in call.used.ListFields()}
            for name, counter in self._tokens.items():
                if name in used:
                    counter.add(used[name], {**named, **_MODALITY})
            if call.used.cost_nanos:
                self._cost.add(call.used.cost_nanos, {"agent": agent, "currency": call.used.currency_code})

    def _write_commit(self, writes: int, seconds: float) -> None:
        self._batch_size.record(writes)
        self._commit_time.record(seconds)

    def _collect(self, _: CallbackOptions) -> Iterable[Observation]:
        # The SDK calls callbacks before it reads the instruments, so this collection has the drained values.
        self._drain(2 * _MAX_PENDING)
        return [Observation(self._runs)]


@contextlib.asynccontextmanager
async def open_metrics(*, host: str, port: int | None, export: bool) -> AsyncIterator[tuple[Metrics | None, str]]:
    """Open metrics that Prometheus scrapes on `port`, 0 for any free one, and that OTLP exports if `export` is set.

    Yields the metrics, None if neither is configured, and HOST:PORT for scraping, empty if there is none. Raises
    ConfigurationError.
    """
    if port is None and not export:
        yield None, ""
        return
    async with contextlib.AsyncExitStack() as stack:
        readers: list[MetricReader] = []
        address = ""
        if port is not None:
            # Imported here, so that only a server that is scraped, or that exports, pays for loading the exporters.
            from opentelemetry.exporter.prometheus import PrometheusMetricReader
            from prometheus_client import CollectorRegistry

            registry = CollectorRegistry()
            readers.append(PrometheusMetricReader(registry=registry, scope_info_enabled=False))
            server, thread = listen_for_scrapes(registry, host, port)
            stack.push_async_callback(run_in_thread, stop_scrapes, server, thread)
            address = f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"
        if export:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        metrics = make_metrics(*readers)
        stack.push_async_callback(run_in_thread, metrics.close)
        yield metrics, address


def make_metrics(*readers: MetricReader) -> Metrics:
    """Return metrics that the readers collect."""
    exemplars = AlwaysOffExemplarFilter()
    provider = MeterProvider(
        metric_readers=readers, resource=resource(), exemplar_filter=exemplars, shutdown_on_exit=False
    )
    return Metrics(provider)


def listen_for_scrapes(registry: "CollectorRegistry", host: str, port: int) -> "tuple[WSGIServer, Thread]":
    """Serve the metrics of a registry by HTTP. Raises ConfigurationError if the port cannot be bound."""
    from prometheus_client import start_http_server

    try:
        return start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"Port {port} of {host} cannot be bound for metrics; it is probably in use. Choose another with "
            "telemetry.prometheus_port, or 0 for any free one."
        ) from error


def stop_scrapes(server: WSGIServer, thread: Thread) -> None:
    """Stop serving metrics; blocks until requests in progress have ended."""
    server.shutdown()
    server.server_close()
    thread.join()
