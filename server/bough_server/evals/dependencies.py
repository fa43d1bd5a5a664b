"""Dependencies shared by this package."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bough_server.agents.catalog import AgentCatalog
from bough_server.clock import Clock
from bough_server.evals.metrics.custom import MetricFunction
from bough_server.runs.runs import Runs
from bough_server.store.worker_ports import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDependencies:
    """What evaluations are executed with; `worker` is the name under which this process owns them."""

    runs: Runs
    store: RunStore
    agents: AgentCatalog
    clock: Clock
    worker: str
    models: Mapping[str, str] = field(default_factory=dict)
    """The configured models, with the hash of each one's configuration."""
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    """The operator's metrics, by name."""
