"""Dependencies shared by this package."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bough_server.agents.catalog import AgentCatalog
from bough_server.clock import Clock
from bough_server.evals.metrics.custom import MetricFunction
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.matching.secrets import RedactionRules
from bough_server.observability.score_events import ScoreEvents
from bough_server.ownership.worker import Worker
from bough_server.runs.runs import Runs
from bough_server.store.ports.workers import RunStore
from bough_server.tools.threads import ThreadLimit

METRIC_THREADS: Final = 16
"""The most threads of the operator's metrics, beside those that hang."""

HUNG_METRIC_THREADS: Final = 64
"""The most threads of metrics that hang and are replaced by others; those beyond keep the places of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDependencies:
    """The collaborators of evaluations; `worker` is the name under which this process owns them."""

    runs: Runs
    store: RunStore
    agents: AgentCatalog
    clock: Clock
    worker: Worker
    count_hung_metric: Callable[[], None]
    """Called for each call of a metric that has not returned in time."""
    score_events: ScoreEvents
    """Where the scores of trials are emitted."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The configured models, with the hash of each one's configuration."""
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    """The operator's metrics, by name."""
    code_digest: str = ""
    """The hash of the project's Python code; empty without any."""
    redaction: RedactionRules = field(default_factory=RedactionRules)
    """What judges are not sent, and what placeholders in expectations match."""
    threads: ThreadLimit = field(default_factory=lambda: ThreadLimit(METRIC_THREADS, spare=HUNG_METRIC_THREADS))
    """Where the operator's metrics run."""

    def collect_known_names(self, tenant_id: str) -> KnownNames:
        """Return the names that a tenant's sets may refer to; agents and tools are checked when a run starts."""
        metrics = {name: function.takes_configuration for name, function in self.metrics.items()}
        resolver = self.agents.for_tenant(tenant_id).resolver
        models = frozenset(name for name in self.models if resolver.model(name) is not None)
        return KnownNames(models=models, metrics=metrics)
