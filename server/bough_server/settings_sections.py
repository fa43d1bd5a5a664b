"""Sections of Settings, each a frozen model that rejects unknown keys; settings.py decides where values come from."""

import re
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from google.protobuf.duration_pb2 import Duration
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from bough.v1 import policy_pb2
from bough_server.documents.yaml import DURATION, FieldPath, parse_duration, suggestion
from bough_server.log.blobs import MAX_FILES_BYTES
from bough_server.quotas import QuotaLimits

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["text", "json"]

_LARGEST_INT32: Final = 2**31 - 1
_LARGEST_INT64: Final = 2**63 - 1


def _seconds(value: object) -> object:
    if isinstance(value, str):
        return parse_duration(value) / 1_000_000_000
    return value


_WRITTEN: Final = {
    "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": rf"^\s*{DURATION.pattern}\s*$"}]
}
Seconds = Annotated[
    float, BeforeValidator(_seconds), Field(ge=0, strict=True, allow_inf_nan=False), WithJsonSchema(_WRITTEN)
]
"""A duration in seconds; written as a number or as 10m, 50ms, 1h30m."""
Count = Annotated[int, Field(ge=0, le=_LARGEST_INT32, strict=True)]
Amount = Annotated[int, Field(ge=0, le=_LARGEST_INT64, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def _resolve_path(path: Path, info: ValidationInfo) -> Path:
    folder: Path = (info.context or {}).get("folder", Path.cwd())
    return folder / path


FilePath = Annotated[Path, AfterValidator(_resolve_path)]
"""A file, absolute; a relative name is below the configuration's folder."""


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]{0,127})?", name):
        raise ValueError("must be the name of an environment variable that holds the key, not the key")
    return name


VariableName = Annotated[str, AfterValidator(_check_variable)]
"""The name of an environment variable that holds a secret."""

PortNumber = Annotated[int, Field(ge=0, le=65535, strict=True)]


class Section(BaseModel):
    """Base of every section: frozen, rejects unknown keys, never quotes its input in errors.

    The docstrings of fields are for docs.generate, which reads them itself: with `use_attribute_docstrings` every
    command would parse the source of its settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _currency(code: str) -> str:
    if not re.fullmatch("[A-Z]{3}", code):
        raise ValueError("must be a currency by ISO 4217: three capital letters, such as USD")
    return code


Currency = Annotated[str, AfterValidator(_currency)]


_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""The address of this machine for a server that listens on all of its addresses."""


def to_reachable_address(address: str) -> str:
    """Return the address at which a process on this machine reaches a server that listens at `address`."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


class TlsSection(Section):
    """The server's certificate. Both files are read again when they change, and used if they pass the checks."""

    cert_file: FilePath
    """The server's certificate as PEM, then the certificates that issued it; relative to this file."""
    key_file: FilePath
    """Its private key as PEM, without a passphrase; relative to this file."""


class MutualTlsSection(Section):
    """A second port, at which every client needs a certificate."""

    port: PortNumber
    """The port at which every client needs a certificate; 0 for any free port."""
    client_ca_file: FilePath
    """The authorities that issue certificates of clients, as PEM; relative to this file. It is read again when it
    changes.
    """


class ServerSection(Section):
    """Where the server listens, and how it stops."""

    host: str = "127.0.0.1"
    """The address that the server listens on."""
    port: PortNumber = 50051
    """The port that the server listens on; 0 for any free port."""
    tls: TlsSection | None = None
    """Encrypts calls. Unset: they are in plaintext."""
    mtls: MutualTlsSection | None = None
    """A second port, at which every client needs a certificate; needs `tls`. Unset: there is none."""
    health_port: PortNumber | None = None
    """A port that answers `grpc.health.v1` alone, in plaintext and to anyone, for probes; 0 for any free port. Unset:
    there is none, and probes use `port`.
    """
    max_connection_age: Annotated[Seconds, Field(gt=0, le=20 * 86_400)] = 3_600.0
    """How long a connection may take new calls; then clients open another, and show their certificates anew. Calls and
    streams in progress stay on the old one until they end. At most 20 days.
    """
    reflection: Flag = True
    """Whether tools can list the services and read the schema from the server."""
    allow_no_tls: Flag = False
    """Whether the server may listen on another address than loopback without `tls`, behind a proxy that encrypts."""
    allow_no_auth: Flag = False
    """Whether the server may listen on another address than loopback although all callers are the same user."""
    allow_insecure: Flag = False
    """Both `allow_no_tls` and `allow_no_auth`."""
    max_files_bytes: Annotated[int, Field(ge=0, le=256 * 1024 * 1024, strict=True)] = MAX_FILES_BYTES
    """The most bytes of all files of one message or one tool's result; the default is 16 MiB."""
    max_request_bytes: Annotated[int, Field(ge=64 * 1024 * 1024, strict=True)] = 256 * 1024 * 1024
    """The most bytes of requests that the server receives and handles at once; the default is 256 MiB. A call for whose
    request there is no room waits up to 10 seconds for some, and then fails with RESOURCE_EXHAUSTED.
    """
    max_streams: Annotated[Count, Field(ge=1)] = 4_000
    """How many response streams the server has at once; further ones fail with RESOURCE_EXHAUSTED."""
    max_streams_of_caller: Annotated[Count, Field(ge=1)] = 2_000
    """How many of them one caller may have: a user of a tenant."""
    drain_grace: Seconds = 10.0
    """How long model and tool calls in flight may take to end when the server stops."""
    max_live_runs: Annotated[Count, Field(ge=1)] | None = None
    """How many runs the server executes at once; more are accepted, and wait for it, or for another server on the same
    PostgreSQL, to have room. Without it there is no bound.
    """

    @model_validator(mode="after")
    def _check_mtls(self) -> "ServerSection":
        if self.mtls is not None and self.tls is None:
            raise ValueError("mtls needs tls: set tls.cert_file and tls.key_file too")
        return self

    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the server."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"


class ClientSection(Section):
    """How commands connect to the server that `address` or `--address` names.

    The servers that they find on this machine by the rest of this file need none of it, except for the token.
    """

    tls: Flag | None = None
    """Whether the connection is encrypted. Unset: it is if `ca_file` or `cert_file` is set."""
    ca_file: FilePath | None = None
    """The authorities that issue the server's certificate, as PEM; relative to this file. Unset: the public ones that
    gRPC knows.
    """
    cert_file: FilePath | None = None
    """The certificate of the commands, for a server that asks for one, as PEM with the certificates that issued it;
    relative to this file.
    """
    key_file: FilePath | None = None
    """Its private key as PEM, without a passphrase; relative to this file."""
    token_env: VariableName = "BOUGH_TOKEN"
    """The environment variable with the bearer token that commands send; none is sent while it is unset."""

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection is encrypted."""
        return bool(self.ca_file or self.cert_file) if self.tls is None else self.tls

    @model_validator(mode="after")
    def _check_files(self) -> "ClientSection":
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: set both, or none")
        if self.tls is False and (self.ca_file or self.cert_file):
            raise ValueError("tls is false, and files of TLS are set: remove one or the other")
        return self


class StorageSection(Section):
    """The database that holds the logs of all runs."""

    url: Annotated[str, Field(min_length=1)]
    """The database. A file: a path, or `sqlite:///` and a path; the default and a path in the file are relative to the
    file's folder, any other to the working directory. Or PostgreSQL: `postgresql://USER@HOST:PORT/DATABASE`, with the
    password in the variable PGPASSWORD or in a password file rather than here.
    """
    listen_url: Annotated[str, Field(min_length=1)] | None = None
    """The URL of the same PostgreSQL database for notifications between servers, past a pooler that `url` may name; the
    password as there. Unset: `url`.
    """
    durability: Literal["disk", "process"] = "disk"
    """`disk`: what a client has seen survives a power cut. `process`: it survives a killed process only."""
    upgrade_at_start: bool = True
    """Whether a server that starts creates the tables of PostgreSQL, and upgrades tables of an older version; if false,
    `bough db upgrade` does.
    """
    wait_at_start: Seconds = 30.0
    """How long a server that starts waits for a PostgreSQL that cannot be reached."""


class LimitSet(Section):
    """Limits of a run."""

    model_calls: Count | None = None
    """Model calls; the retries and fallbacks of one call count once."""
    tool_calls: Count | None = None
    """Tool calls, calls of linked agents included."""
    tokens: Amount | None = None
    """Tokens of model calls, input and output."""
    cost_nanos: Amount | None = None
    """Cost of model calls, in billionths of `currency`. Calls of models without a price cost nothing."""
    depth: Count | None = None
    """Depth of the agent tree; 0 allows the root only."""
    transfers: Count | None = None
    """Transfers from one agent to another; a run without this limit has 20."""
    wall_duration: Annotated[Seconds, Field(gt=0)] | None = None
    """Wall-clock time; time during which the run waits for input does not count."""
    concurrency: Annotated[Count, Field(ge=1)] | None = None
    """Model calls and tools that run at the same time; further ones wait."""

    def message(self) -> policy_pb2.Limits:
        """Return the limits as the schema's message."""
        return policy_pb2.Limits(
            model_calls=self.model_calls,
            tool_calls=self.tool_calls,
            tokens=self.tokens,
            cost_nanos=self.cost_nanos,
            depth=self.depth,
            transfers=self.transfers,
            wall_duration=None if self.wall_duration is None else _duration(self.wall_duration),
            concurrency=self.concurrency,
        )


class AccountsSection(Section):
    """Accounts that runs are paid from in advance. Every model needs a price then, 0 if it is free."""

    per: Literal["user", "tenant"]
    """Whose the accounts are: of each `user` of a tenant, or of each `tenant` as a whole."""


_DEFAULT_LIMITS: Final = {"model_calls": 500, "depth": 16}
"""The second ends agents that call each other in turn, long before the first one does."""


class LimitsSection(Section):
    """Limits of runs. A limit that is not set does not apply."""

    default: LimitSet = LimitSet.model_validate(_DEFAULT_LIMITS)
    """The limits of a run if its request does not say."""
    maximum: LimitSet = LimitSet()
    """The highest limits that a request can set."""

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults(cls, values: Any) -> Any:
        """Keep the defaults of limits that `default` does not name."""
        if isinstance(values, dict) and isinstance(values.get("default"), dict):
            return {**values, "default": {**_DEFAULT_LIMITS, **values["default"]}}
        return values


class QuotaSection(Section):
    """Quotas of a tenant, or of each of its users. One that is not set does not apply."""

    concurrent_runs: Annotated[Count, Field(ge=1)] | None = None
    """Runs that are queued or executed at the same time, over all servers; those that wait for input do not count."""
    runs_per_minute: Annotated[Count, Field(ge=1)] | None = None
    """Runs that start within 60 seconds, over all servers."""
    tokens_per_day: Amount | None = None
    """Input and output tokens of model calls on one day, in UTC."""
    cost_nanos_per_month: Amount | None = None
    """Charges of model calls in one month, in UTC, in billionths of `currency`."""

    def limits(self) -> QuotaLimits:
        """Return the quotas as a plain value."""
        return QuotaLimits(**self.model_dump())


class DeltaSection(Section):
    """How streamed text is recorded if neither the request nor the agent says."""

    mode: Literal["aggregated", "passthrough"] = "aggregated"
    """`aggregated` joins fragments before they are recorded, `passthrough` records each one."""
    max_interval: Annotated[Seconds, Field(le=10)] | None = None
    """How long a fragment may be held back to be joined with the next ones; at most 10 s.

    Default: 50 ms, and 100 ms once a text has been streamed for a second.
    """
    max_chars: Annotated[Count, Field(ge=1)] = 256
    """How many characters may be held back."""

    def message(self) -> policy_pb2.DeltaPolicy:
        """Return the policy as the schema's message."""
        if self.mode == "passthrough":
            return policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())
        interval = None if self.max_interval is None else _duration(self.max_interval)
        return policy_pb2.DeltaPolicy(
            aggregated=policy_pb2.AggregatedDeltas(max_interval=interval, max_chars=self.max_chars)
        )


class RunsSection(Section):
    """How runs behave if their requests do not say."""

    deltas: DeltaSection = DeltaSection()
    """How streamed text is recorded."""
    on_disconnect: Literal["cancel", "continue"] = "cancel"
    """What happens to a run that no stream follows."""
    disconnect_grace: Seconds = 30.0
    """How long no stream may follow a run before `on_disconnect` applies; 0 for at once."""

    def message(self, limits: LimitSet) -> policy_pb2.RunPolicy:
        """Return the policy of a run whose request sets none."""
        is_cancel = self.on_disconnect == "cancel"
        return policy_pb2.RunPolicy(
            limits=limits.message(),
            deltas=self.deltas.message(),
            on_disconnect=policy_pb2.DISCONNECT_POLICY_CANCEL if is_cancel else policy_pb2.DISCONNECT_POLICY_CONTINUE,
            disconnect_grace=_duration(self.disconnect_grace),
        )


class TelemetrySection(Section):
    """Traces and metrics. The `OTEL_*` variables say where they are exported to by OTLP."""

    capture_content: Flag = False
    """Whether spans carry messages, instructions, arguments and results, and the events of scores their reasons."""
    prometheus_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address of the page with metrics for Prometheus, which is not encrypted."""
    prometheus_port: PortNumber | None = None
    """The port of that page; 0 for any free port. Unset: there is no page."""


class RedactSection(Section):
    """What is removed from files that `bough eval` writes, from what it prints of results, and from what judges see."""

    fields: tuple[str, ...] = ()
    """Paths of members of JSON in any text, such as `password` or `user.email`; `*` is any member or item."""
    patterns: tuple[str, ...] = ()
    """Regular expressions; what they match in any text is removed."""


class EvaluationSection(Section):
    """Evaluations, as the command line writes them and judges see them."""

    redact: RedactSection = RedactSection()
    """What is removed from files that `bough eval` writes, from what it prints of results, and from what judges see."""


def database_url(text: str, folder: Path) -> str:
    """Return the URL of a database that is given as a URL or as a path relative to `folder`."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return f"sqlite:///{(folder / text).resolve()}"
    # sqlite:///x is a relative path, sqlite:////x an absolute one.
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
    "too_short": "must be a list of at least {min_length}",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


def mistake_words(kind: str, context: Mapping[str, object]) -> str:
    """Return pydantic's error in the words that definitions use; empty for a kind without such words."""
    return _WORDS.get(kind, "").format(**context)


def suggest_key(root: type[BaseModel], path: FieldPath) -> str:
    """Return a suggestion of valid keys for an unknown one."""
    section = root
    for step in path[:-1]:
        # In a mapping of sections the step is a user's name for one, and all have the same type.
        if str(step) in section.model_fields:
            section = _section_in(section.model_fields[str(step)].annotation) or section
    return suggestion(str(path[-1]), section.model_fields)


def _section_in(annotation: object) -> type[BaseModel] | None:
    """Return the section that a field's type contains: directly, optional or as the values of a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section_in(each))), None)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1_000_000_000))
    return duration
