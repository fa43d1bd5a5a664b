"""The sections of Settings, each a frozen model that takes no unknown key; where values come from is settings.py's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from google.protobuf.duration_pb2 import Duration
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bough.v1 import policy_pb2
from bough_server.documents import FieldPath, parse_duration, suggestion

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_LARGEST_INT32: Final = 2**31 - 1
_LARGEST_INT64: Final = 2**63 - 1


def _seconds(value: object) -> object:
    if isinstance(value, str):
        return parse_duration(value) / 1_000_000_000
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, strict=True, allow_inf_nan=False)]
"""A duration in seconds; written as a number or as 10m, 50ms, 1h30m."""
Count = Annotated[int, Field(ge=0, le=_LARGEST_INT32, strict=True)]
Amount = Annotated[int, Field(ge=0, le=_LARGEST_INT64, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """What every section is: frozen, strict about its keys, silent about its input in errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)


class ServerSection(Section):
    """Where and how the server listens."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 50051
    """0 for any that is free."""
    reflection: Flag = True
    allow_insecure: Flag = False
    """Whether it may listen beyond loopback without TLS."""
    drain_grace: Seconds = 10.0
    """How long runs may go on when the server is told to stop."""


class StorageSection(Section):
    """Where the log is kept."""

    url: Annotated[str, Field(min_length=1)]
    durability: Literal["disk", "process"] = "disk"
    """disk survives a power cut, process only a killed process."""


class LimitSet(Section):
    """Bounds of a run; None is no bound."""

    model_calls: Count | None = None
    tool_calls: Count | None = None
    tokens: Amount | None = None
    cost_micros: Amount | None = None
    depth: Count | None = None
    handoffs: Count | None = None
    wall_duration: Annotated[Seconds, Field(gt=0)] | None = None
    parallel: Annotated[Count, Field(ge=1)] | None = None

    def message(self) -> policy_pb2.Limits:
        """The same in the schema's words."""
        return policy_pb2.Limits(
            model_calls=self.model_calls,
            tool_calls=self.tool_calls,
            tokens=self.tokens,
            cost_micros=self.cost_micros,
            depth=self.depth,
            handoffs=self.handoffs,
            wall_duration=None if self.wall_duration is None else _duration(self.wall_duration),
            parallel=self.parallel,
        )


class LimitsSection(Section):
    """What a run gets where its request does not say, and the most that a request may ask for."""

    default: LimitSet = LimitSet(model_calls=500)
    maximum: LimitSet = LimitSet()

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults(cls, values: Any) -> Any:
        """A `default` that names some bounds keeps the others' defaults."""
        if isinstance(values, dict) and isinstance(values.get("default"), dict):
            return {**values, "default": {"model_calls": 500, **values["default"]}}
        return values


class DeltaSection(Section):
    """How streamed text is recorded where neither the request nor the agent says."""

    mode: Literal["aggregated", "passthrough"] = "aggregated"
    max_interval: Annotated[Seconds, Field(le=10)] = 0.05
    max_chars: Annotated[Count, Field(ge=1)] = 256

    def message(self) -> policy_pb2.DeltaPolicy:
        """The same in the schema's words."""
        if self.mode == "passthrough":
            return policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())
        return policy_pb2.DeltaPolicy(
            aggregated=policy_pb2.AggregatedDeltas(max_interval=_duration(self.max_interval), max_chars=self.max_chars)
        )


class RunsSection(Section):
    """How runs behave where their requests do not say."""

    delta: DeltaSection = DeltaSection()
    on_disconnect: Literal["cancel", "continue"] = "cancel"
    disconnect_grace: Seconds = 30.0

    def message(self, limits: LimitSet) -> policy_pb2.RunPolicy:
        """The policy of a run whose request says nothing."""
        is_cancel = self.on_disconnect == "cancel"
        return policy_pb2.RunPolicy(
            limits=limits.message(),
            delta=self.delta.message(),
            on_disconnect=policy_pb2.ON_DISCONNECT_CANCEL if is_cancel else policy_pb2.ON_DISCONNECT_CONTINUE,
            disconnect_grace=_duration(self.disconnect_grace),
        )


class TelemetrySection(Section):
    """What spans carry, and where metrics are found; where both go by OTLP is said by the OTEL_ variables."""

    capture_content: Flag = False
    prometheus_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    prometheus_port: Annotated[int, Field(ge=0, le=65535, strict=True)] | None = None
    """Where metrics are scraped; None for nowhere, 0 for any port that is free."""


def database_url(text: str, folder: Path) -> str:
    """The URL of a database given as a URL or as a path; a path is relative to a folder."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return f"sqlite:///{(folder / text).resolve()}"
    if scheme.partition("+")[0] == "sqlite" and rest.startswith("/") and not rest.startswith("//"):
        path = rest[1:]
        return f"{scheme}:///{(folder / path).resolve()}" if path and path != ":memory:" else text
    return text


_WORDS: Final[Mapping[str, str]] = {
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text; put it in quotes",
    "string_too_short": "must not be empty",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


def mistake_words(kind: str, context: Mapping[str, object]) -> str:
    """A mistake of a value in the words of definitions' mistakes; empty for a kind that has none."""
    return _WORDS.get(kind, "").format(**context)


def known_keys(root: type[BaseModel], path: FieldPath) -> str:
    """What may stand where an unknown key stands, as a suggestion."""
    section = root
    for step in path[:-1]:
        # In a mapping of sections the step is a name, and the section is the same for all.
        if str(step) in section.model_fields:
            section = _section_in(section.model_fields[str(step)].annotation) or section
    return suggestion(str(path[-1]), section.model_fields)


def _section_in(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, alone, optional or by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section_in(each))), None)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1_000_000_000))
    return duration
