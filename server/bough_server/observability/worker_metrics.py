"""One page of metrics for several workers: what each has, with a label that names it."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.request import urlopen

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bough_server.observability.metrics import listen_for_scrapes, stop_scrapes
from bough_server.threads import run_in_thread

_SECONDS: Final = 2.0
"""How long a worker has to answer; one that does not is left out."""

FindMetrics = Callable[[], tuple[str, str]]
"""Returns a worker's name, and HOST:PORT of its metrics; empty while it has none."""


class WorkerMetrics(Collector):
    """Collects the metrics of all workers when they are scraped."""

    def __init__(self, workers: Sequence[FindMetrics]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        """Return each metric once, with the samples of all workers."""
        families: dict[str, Metric] = {}
        for name, address in (find() for find in self._workers):
            for family in _scrape(address) if address else ():
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, "worker": name}))
        return families.values()


@asynccontextmanager
async def serve_worker_metrics(host: str, port: int, workers: Sequence[FindMetrics]) -> AsyncIterator[str]:
    """Serve one page of all workers; yield HOST:PORT. Raises ConfigurationError if the port cannot be bound."""
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(workers))
    server, thread = listen_for_scrapes(registry, host, port)
    try:
        yield f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"
    finally:
        await run_in_thread(stop_scrapes, server, thread)


def _scrape(address: str) -> list[Metric]:
    try:
        with urlopen(f"http://{address}/metrics", timeout=_SECONDS) as page:
            return list(text_string_to_metric_families(page.read().decode()))
    except (OSError, ValueError):
        return []  # it has just ended, or is about to
