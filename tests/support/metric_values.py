"""What a process's metrics say, read in a line: values by the name of the metric and its attributes."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint

from bough_server.observability.metrics import Metrics, make_metrics

Point: TypeAlias = NumberDataPoint | HistogramDataPoint


class Counted:
    """Metrics that a test reads."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.metrics: Metrics = make_metrics(self._reader)

    def of(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """The values of a metric, added up by some of its attributes; of a histogram the sums."""
        return self._added(name, by, lambda point: point.sum if isinstance(point, HistogramDataPoint) else point.value)

    def times(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """How often a histogram was given a value, added up by some of its attributes."""
        return self._added(name, by, lambda point: point.count if isinstance(point, HistogramDataPoint) else 0)

    def _added(self, name: str, by: tuple[str, ...], value: Callable[[Point], float]) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for point in self._points(name):
            key = tuple(str((point.attributes or {}).get(each, "")) for each in by)
            found[key] = found.get(key, 0) + value(point)
        return found

    def _points(self, name: str) -> Iterator[Point]:
        collected = self._reader.get_metrics_data()
        for resource in collected.resource_metrics if collected is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        yield from metric.data.data_points  # type: ignore[misc]
