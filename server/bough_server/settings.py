"""The frozen Settings: flags over environment over bough.yaml over defaults. No other module reads the environment.

Model keys are not part of it: `Settings.secrets` passes on the variables that models name, without showing their
values.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from pydantic import Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from bough_server.auth.sections import AuthSection, ConfiguredTenant, TenantSection, list_tenant_problems
from bough_server.documents.yaml import Document, FieldPath, Value, raise_problems, read_documents
from bough_server.errors import ConfigurationError, Problem
from bough_server.models.config import ModelSection, model_problems
from bough_server.models.model import DEFAULT_CURRENCY
from bough_server.settings_sections import (
    AccountsSection,
    ClientSection,
    Currency,
    EvaluationSection,
    LimitsSection,
    LogFormat,
    LogLevel,
    RunsSection,
    Section,
    ServerSection,
    StorageSection,
    TelemetrySection,
    database_url,
    mistake_words,
    suggest_key,
)
from bough_server.tool_servers.config import ToolServerName, ToolServerSection, variables_of

if TYPE_CHECKING:
    from bough_server.tool_servers.servers import ToolServers

DEFAULT_FILE: Final = "bough.yaml"
DEFAULT_DATABASE: Final = "var/bough.db"


class Flags(TypedDict, total=False):
    """Values from the command line; None, and False for a switch, mean that the flag was not given."""

    host: str | None
    port: int | None
    mtls_port: int | None
    allow_no_tls: bool | None
    allow_no_auth: bool | None
    allow_insecure: bool | None
    database: str | None
    default_model: str | None
    log_level: str | None
    log_format: str | None
    address: str | None


_PLACES: Final[Mapping[str, FieldPath]] = {
    "host": ("server", "host"),
    "port": ("server", "port"),
    "mtls_port": ("server", "mtls", "port"),
    "allow_no_tls": ("server", "allow_no_tls"),
    "allow_no_auth": ("server", "allow_no_auth"),
    "allow_insecure": ("server", "allow_insecure"),
    "keys_file": ("auth", "keys_file"),
    "reflection": ("server", "reflection"),
    "database": ("storage", "url"),
    "default_model": ("models", "default"),
    "log_level": ("log_level",),
    "log_format": ("log_format",),
    "address": ("address",),
}
"""The path in the settings of each flag and variable."""


class Environment(BaseSettings):
    """The environment variables that are settings; an empty one counts as unset."""

    model_config = SettingsConfigDict(env_prefix="BOUGH_", env_ignore_empty=True, extra="ignore", frozen=True)

    config: Path | None = None
    """The configuration file; default: `bough.yaml` in the working directory or in the nearest folder above it."""
    address: str | None = None
    """Sets `address`."""
    database: str | None = None
    """Sets `storage.url`; a path is relative to the working directory."""
    default_model: str | None = None
    """Sets `models.default` to an alias of this model."""
    keys_file: Path | None = None
    """Sets `auth.keys_file`; a path is relative to the working directory."""
    reflection: bool | None = None
    """Sets `server.reflection`: 0 or 1."""
    log_level: str | None = None
    """Sets `log_level`."""
    log_format: str | None = None
    """Sets `log_format`."""


class _OpenTelemetry(BaseSettings):
    """The OTEL_ variables that decide whether spans, metrics and log records are exported; exporters read the rest."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", env_ignore_empty=True, extra="ignore", frozen=True)

    sdk_disabled: str = "false"
    traces_exporter: str = ""
    metrics_exporter: str = ""
    exporter_otlp_endpoint: str = ""
    exporter_otlp_traces_endpoint: str = ""
    exporter_otlp_metrics_endpoint: str = ""
    logs_exporter: str = ""
    exporter_otlp_logs_endpoint: str = ""

    @property
    def exports_traces(self) -> bool:
        return self._exports(self.traces_exporter, self.exporter_otlp_traces_endpoint)

    @property
    def exports_metrics(self) -> bool:
        return self._exports(self.metrics_exporter, self.exporter_otlp_metrics_endpoint)

    @property
    def exports_logs(self) -> bool:
        return self._exports(self.logs_exporter, self.exporter_otlp_logs_endpoint)

    def _exports(self, exporter: str, endpoint: str) -> bool:
        if self.sdk_disabled.strip().lower() == "true":
            return False
        if exporter:
            return "otlp" in exporter
        return bool(self.exporter_otlp_endpoint or endpoint)


class Secrets(Mapping[str, str]):
    """Environment variables by name; its repr shows only the names."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Secrets({sorted(self._values)})"


class Settings(Section):
    """Everything that an operator can configure, validated. Durations are in seconds, paths absolute."""

    server: ServerSection = ServerSection()
    """Where the server listens, and how it stops."""
    client: ClientSection = ClientSection()
    """How commands connect to the server that `address` or `--address` names."""
    storage: StorageSection = Field(
        default_factory=lambda: StorageSection(url=database_url(DEFAULT_DATABASE, Path.cwd()))
    )
    """The database that holds the logs of all runs."""
    agents: tuple[str, ...] = ()
    """Glob patterns of files with agent definitions, relative to this file."""
    python: tuple[str, ...] = ()
    """Python modules with tools, agents and functions, beside this file or installed."""
    models: Mapping[str, ModelSection] = {}
    """The models that agents name, by these names. Agents that name none, and have no caller to take one from, use
    `default`.
    """
    currency: Currency = DEFAULT_CURRENCY
    """The currency of all prices, by ISO 4217."""
    tool_servers: Mapping[ToolServerName, ToolServerSection] = {}
    """Programs outside that serve tools, by these names."""
    auth: AuthSection | None = None
    """Who may call. Without it every call is that of one local user, who may do everything."""
    tenants: Mapping[ConfiguredTenant, TenantSection] = {"*": TenantSection()}
    """The tenants that callers may be of, by their ids; `"*"` for any other one."""
    accounts: AccountsSection | None = None
    """Accounts that runs are paid from in advance. Without it runs cost what they cost, and nothing has to be left."""
    limits: LimitsSection = LimitsSection()
    """Limits of runs. A limit that is not set does not apply."""
    runs: RunsSection = RunsSection()
    """How runs behave if their requests do not say."""
    telemetry: TelemetrySection = TelemetrySection()
    """Traces and metrics."""
    evaluation: EvaluationSection = EvaluationSection()
    """Evaluations, as the command line writes them and judges see them."""
    log_level: LogLevel = "info"
    """The least severe messages that the server logs."""
    log_format: LogFormat = "text"
    """`text`: lines for people. `json`: one JSON object on each line."""
    address: str | None = None
    """The server that commands speak to; of several, separated by commas, the first that answers. Unset: the one that
    serves the database, else 127.0.0.1:50051 if it answers, else a server inside the command.
    """

    _folder: Path = PrivateAttr(default_factory=Path.cwd)
    _secrets: Secrets = PrivateAttr(default_factory=lambda: Secrets({}))

    _document: Document = PrivateAttr(default_factory=lambda: Document(path=DEFAULT_FILE, value={}, lines={}))
    _origins: Mapping[FieldPath, str] = PrivateAttr(default_factory=dict)
    _exports_traces: bool = PrivateAttr(default=False)
    _exports_metrics: bool = PrivateAttr(default=False)
    _exports_logs: bool = PrivateAttr(default=False)

    @property
    def exports_traces(self) -> bool:
        """Whether OpenTelemetry's variables configure an OTLP export of spans."""
        return self._exports_traces

    @property
    def exports_metrics(self) -> bool:
        """Whether OpenTelemetry's variables configure an OTLP export of metrics."""
        return self._exports_metrics

    @property
    def exports_logs(self) -> bool:
        """Whether OpenTelemetry's variables configure an OTLP export of log records: of the scores of evaluations."""
        return self._exports_logs

    @property
    def folder(self) -> Path:
        """The base of relative names in the settings: the configuration's folder, else the working directory."""
        return self._folder

    @property
    def secrets(self) -> Secrets:
        """The variables that models and tool servers name, and that of the commands' token, as far as they are set."""
        return self._secrets

    @classmethod
    def of(
        cls,
        values: Mapping[str, object],
        *,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        exports_traces: bool = False,
        exports_metrics: bool = False,
        exports_logs: bool = False,
    ) -> "Settings":
        """Validate values whose relative names are below `folder`. Raises pydantic's ValidationError.

        `variables` are the environment's; those that models and tool servers name become the secrets.
        """
        settings = cls.model_validate(values, context={"folder": folder})
        found = variables or {}
        names = {model.api_key_env for model in settings.models.values()} | {settings.client.token_env}
        names |= variables_of(settings.tool_servers)
        settings._folder = folder
        settings._secrets = Secrets({name: found[name] for name in sorted(names - {""}) if found.get(name)})
        settings._exports_traces, settings._exports_metrics = exports_traces, exports_metrics
        settings._exports_logs = exports_logs
        return settings

    def build_tool_servers(self, taken: Mapping[str, str], *, is_locked: bool = True) -> "ToolServers":
        """Return the tool servers, none connected; `taken` are names of other tools, each with what has it.

        Without `is_locked` they offer what was not reviewed too. Raises ConfigurationError if the lock cannot be read.
        """
        # Not above: commands to a running server need none of it.
        from bough_server.tool_servers.opening import build_tool_servers

        return build_tool_servers(
            self.tool_servers, variables=self._secrets, folder=self._folder, taken=taken, is_locked=is_locked
        )

    def _find_model_problems(self) -> Iterator[tuple[FieldPath, str]]:
        yield from model_problems(self.models)
        yield from list_tenant_problems(self.tenants, self.models)
        for name, model in self.models.items():
            if self.accounts is not None and model.price is None and not model.alias:
                words = "needs a `price`, as `accounts` are on: 0 for input and output if the model is free"
                yield ("models", name), words

    @property
    def has_auth(self) -> bool:
        """Whether callers are authenticated."""
        return self.auth is not None

    def locate(self, path: FieldPath, description: str) -> Problem:
        """Return a problem at a setting, with the file and line, the variable or the flag that set it."""
        return _locate_problem(path, description, self._document, self._origins)

    def for_worker(self) -> "Settings":
        """Return the settings of one of several workers: its metrics and its health are for the parent."""
        local = {"prometheus_host": "127.0.0.1", "prometheus_port": 0}
        telemetry = (
            self.telemetry if self.telemetry.prometheus_port is None else self.telemetry.model_copy(update=local)
        )
        server = self.server.model_copy(update={"health_port": None})
        return self.model_copy(update={"telemetry": telemetry, "server": server})

    def for_embedded_server(self) -> "Settings":
        """Return the settings of a server inside a program, which that alone calls: any free port of loopback."""
        alone = {"host": "127.0.0.1", "port": 0, "tls": None, "mtls": None, "health_port": None}
        return self.model_copy(update={"server": self.server.model_copy(update=alone), "auth": None})

    @classmethod
    def load_client(cls, config: Path | None = None) -> "Settings":
        """Read no more than the section `client`, for a server that is named: the rest may be another server's.

        A file that is not named, but found, is left out if it cannot be read. Raises ConfigurationError.
        """
        named = config or _environment().config
        try:
            document = _document(named)
        except ConfigurationError:
            if named is not None:
                raise
            return cls()
        values = document.value if isinstance(document.value, dict) else {}
        return cls._read(replace(document, value={"client": values.get("client")}), Environment.model_construct(), {})

    @classmethod
    def load(cls, config: Path | None = None, **flags: Unpack[Flags]) -> "Settings":
        """Read flags, environment and file, in this order of precedence.

        Without `config` the file is BOUGH_CONFIG, else bough.yaml in the working directory or the nearest folder above
        it, if there is one. Raises ConfigurationError with every mistake, each with its file and line, its variable or
        its flag.
        """
        environment = _environment()
        return cls._read(_document(config or environment.config), environment, flags)

    @classmethod
    def _read(cls, document: Document, environment: Environment, flags: Flags) -> "Settings":
        folder = Path(document.path).resolve().parent if document.lines else Path.cwd()
        values, origins = _merge_sources(document, environment, flags)
        _resolve_database(values, origins, folder)
        telemetry = _OpenTelemetry()
        try:
            settings = cls.of(
                values,
                folder=folder,
                variables=os.environ,
                exports_traces=telemetry.exports_traces,
                exports_metrics=telemetry.exports_metrics,
                exports_logs=telemetry.exports_logs,
            )
        except ValidationError as error:
            raise ConfigurationError(
                "\n".join(
                    str(_problem(each["loc"], each["type"], _words(each), document=document, origins=origins))
                    for each in error.errors()
                )
            ) from None
        settings._document, settings._origins = document, origins
        raise_problems([settings.locate(path, words) for path, words in settings._find_model_problems()])
        return settings


def _environment() -> Environment:
    try:
        return Environment()
    except ValidationError as error:
        lines = [f"BOUGH_{str(each['loc'][0]).upper()}: {_words(each)}" for each in error.errors()]
        raise ConfigurationError("\n".join(lines)) from None


def _document(config: Path | None) -> Document:
    """Return the configuration; an empty one if no file is named and none is found."""
    path = config or _find_file()
    if path is None:
        return Document(path=DEFAULT_FILE, value={}, lines={})
    documents = read_documents(path)
    if len(documents) > 1:
        raise ConfigurationError(f"{path}:{documents[1].line(())}: The file must contain one document, not several.")
    document = documents[0] if documents else Document(path=str(path), value={}, lines={(): 1})
    if not isinstance(document.value, dict):
        raise_problems([document.problem((), "must be a mapping, such as `server: {port: 50051}`")])
    return document


def _find_file() -> Path | None:
    """Return bough.yaml in the working directory or in the nearest folder above it; None if there is none.

    Raises ConfigurationError for a file above the working directory that another user owns: a configuration names code
    that commands run, and a shared folder such as /tmp may hold anyone's.
    """
    if Path(DEFAULT_FILE).exists():
        return Path(DEFAULT_FILE)
    path = next((each for folder in Path.cwd().parents if (each := folder / DEFAULT_FILE).is_file()), None)
    if path is not None and path.stat().st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"{path} belongs to another user and is not in the working directory: name it with --config to use it, or "
            "name another file."
        )
    return path


def _merge_sources(
    document: Document, environment: Environment, flags: Flags
) -> tuple[dict[str, Value], dict[FieldPath, str]]:
    """Merge all three sources; return the values, and the origin of each that is not from the file."""
    values: dict[str, Value] = _copy_sections(document.value)
    origins: dict[FieldPath, str] = {}
    overrides: dict[str, tuple[Value, str]] = {}
    for name, value in environment.model_dump(exclude_none=True, exclude={"config"}).items():
        overrides[name] = (str(Path.cwd() / value) if isinstance(value, Path) else value, f"BOUGH_{name.upper()}")
    for name, value in flags.items():
        if value is not None and value is not False:
            overrides[name] = (value, "--" + name.replace("_", "-"))  # type: ignore[assignment]
    for name, (value, origin) in overrides.items():
        if name == "default_model":
            if value == "default":
                continue  # an alias of itself would never resolve
            value = {"alias": value}
        place = _PLACES[name]
        _put(values, place, value)
        origins[place] = origin
    return values, origins


def _copy_sections(value: Value) -> dict[str, Value]:
    """Copy the file's sections, since they are changed here; an empty section counts as missing."""
    sections = value if isinstance(value, dict) else {}
    return {key: dict(each) if isinstance(each, dict) else each for key, each in sections.items() if each is not None}


def _put(values: dict[str, Value], place: FieldPath, value: Value) -> None:
    *outer, last = (str(step) for step in place)
    section = values
    for step in outer:
        inner = section.setdefault(step, {})
        if not isinstance(inner, dict):
            return  # not a mapping in the file: validation reports it
        section = inner
    section[last] = value


def _resolve_database(values: dict[str, Value], origins: Mapping[FieldPath, str], folder: Path) -> None:
    """Make the database a URL: by default beside the file; a path from a variable or a flag is relative to the working
    directory.
    """
    storage = values.setdefault("storage", {})
    if not isinstance(storage, dict):
        return
    is_the_files = ("storage", "url") not in origins
    given = storage.get("url", DEFAULT_DATABASE)
    if isinstance(given, str) and given:
        storage["url"] = database_url(given, folder if is_the_files else Path.cwd())


def _problem(
    path: FieldPath, kind: str, message: str, *, document: Document, origins: Mapping[FieldPath, str]
) -> Problem:
    if kind == "extra_forbidden":
        message = f"There is no such setting.{suggest_key(Settings, path)}"
    return _locate_problem(path, message.removeprefix("Value error, "), document, origins)


def _words(error: ErrorDetails) -> str:
    return mistake_words(error["type"], error.get("ctx", {})) or error["msg"]


def _locate_problem(path: FieldPath, message: str, document: Document, origins: Mapping[FieldPath, str]) -> Problem:
    for place, origin in origins.items():
        if path[: len(place)] == place:
            return Problem(path=origin, line=0, field="", description=message)
    return document.problem(path, message)
