"""Scenarios as the YAML files of `scenarios/` have them, read strictly: an unknown or a wrong key is an error."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FOLDER: Final = Path(__file__).with_name("scenarios")

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

TokenKind: TypeAlias = Literal["valid", "brief", "expired", "invalid"]

Language: TypeAlias = Literal["python", "go", "typescript", "java"]

STREAMS: Final[Mapping[str, str]] = {
    "AgentService.Run": "run",
    "AgentService.WatchRun": "run",
    "AgentService.ResumeRun": "run",
    "AgentService.ForkRun": "run",
    "EvalService.Evaluate": "evaluation",
    "EvalService.WatchEvaluation": "evaluation",
}
"""The calls that stream events, and what the events are of."""


class ScenarioError(Exception):
    """A file of scenarios that is not valid; says where and why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OperatorCall(_Strict):
    """A call that the test itself makes, beside the driver."""

    call: str
    request: Mapping[str, Any] = {}


class Action(_Strict):
    """What happens at some moment; exactly one is set."""

    cut: bool = False
    """The connection of the driver is torn down."""
    kill: bool = False
    """The server is killed with SIGKILL and started again, at another port behind the same address."""
    stop: bool = False
    """The server is stopped with SIGTERM and started again."""
    open: bool = False
    """The tool `hold` returns, now and from now on."""
    shut: bool = False
    """The tool `hold` holds, from now on, as it does when a scenario begins."""
    operator: OperatorCall | None = None
    """The test makes a call, for a stream up to its first response."""
    token: TokenKind | None = None
    """The driver's next calls have another token."""
    renew: bool = False
    """The driver's token expires, and its next calls have another one."""

    @model_validator(mode="after")
    def _is_one(self) -> "Action":
        if len(self.model_fields_set) != 1:
            raise ValueError("exactly one action is needed")
        return self


class Moment(_Strict):
    """What happens after an event of a stream: the n-th, or the first of a name."""

    after: int | str
    do: Sequence[Action] = Field(min_length=1)


class ExpectedEvent(_Strict):
    """An event: its name, its agent, and some fields of its payload."""

    name: str = Field(alias="is")
    agent: str | None = Field(default=None, alias="of")
    payload: Mapping[str, Any] = Field(default={}, alias="with")


class ExpectedEnd(_Strict):
    """How a call ends."""

    code: str | Sequence[str] = "OK"
    """One of these."""
    reason: str = ""
    """`any` for one that does not matter."""
    message: str = ""
    """A pattern that is found in the message; empty for any."""
    metadata: Mapping[str, str] = {}
    violations: Sequence[Mapping[str, str]] = ()
    """Fields, and patterns of their descriptions, in any order; no further ones."""
    rejoins: Literal["none", "some", "any"] = "none"


class Expected(_Strict):
    """What a call must give. A text that begins with `~ ` is a pattern; mappings may have further keys."""

    events: Sequence[str | ExpectedEvent] | None = None
    """The events in order; `...` is any number of any others."""
    count: int | None = None
    starts_at: int | str | None = None
    """The sequence of the first event, where it does not follow from the request."""
    answer: Mapping[str, Any] | None = None
    smaller_than: int | None = None
    """Bytes that an answer, or all events together, stay below in their binary form."""
    larger_than: int | None = None
    """Bytes that they exceed."""
    end: ExpectedEnd = ExpectedEnd()
    within_seconds: float | None = None


class Step(_Strict):
    """A line for the driver, or actions without one."""

    call: str = ""
    tree: str = ""
    request: Mapping[str, Any] = {}
    collect: bool = False
    rejoin: bool = True
    timeout_seconds: float | None = None
    cancel_after_events: int | None = None
    during: Sequence[Moment] = ()
    cut_after_bytes: Sequence[int] = ()
    """The connection is cut after so many bytes to the client, then again after so many more."""
    do: Sequence[Action] = ()
    expect: Expected = Expected()
    save: Mapping[str, str] = {}
    """Variables for later steps: paths such as `events.-1.sequence`, `answer.run.run_id`, `end.metadata.run_id`."""

    @model_validator(mode="after")
    def _is_one(self) -> "Step":
        if sum(map(bool, (self.call, self.tree, self.do))) != 1:
            raise ValueError("exactly one of call, tree and do is needed")
        if self.is_stream and not self.collect and self.expect.events is None:
            raise ValueError("a call that streams events needs expect.events")
        return self

    @property
    def is_stream(self) -> bool:
        """Whether the call streams events."""
        return self.call in STREAMS

    def line(self) -> dict[str, object]:
        """The step as a driver reads it."""
        if self.tree:
            return {"tree": self.tree}
        line: dict[str, object] = {"call": self.call, "request": self.request}
        if self.timeout_seconds is not None:
            line["timeoutSeconds"] = self.timeout_seconds
        if self.cancel_after_events is not None:
            line["cancelAfterEvents"] = self.cancel_after_events
        if not self.rejoin:
            line["rejoin"] = False
        if self.collect:
            line["collect"] = True
        return line


class Scenario(_Strict):
    """Steps that one driver performs, in order."""

    name: str
    languages: Sequence[Language] = ("python", "go", "typescript", "java")
    """The languages whose drivers play it."""
    unreachable: bool = False
    """Whether the driver is given an address at which nothing listens."""
    steps: Sequence[Step] = Field(min_length=1)


class NewerServer(_Strict):
    """What a server of a newer schema serves, as it is; see newer_server.py.

    Every stream stops before its last event until the gate is open, as the tool `hold` does, and ends with OK after it.
    """

    run_id: str
    log: Sequence[Mapping[str, Any]]
    state: str = "EXECUTION_STATE_SUCCEEDED"
    """That of the run."""
    invocation: Mapping[str, Any]
    evaluation_id: str = ""
    evaluation_log: Sequence[Mapping[str, Any]] = ()


class Server(_Strict):
    """A server: agents and what the scripted model says; or one of a newer schema."""

    agents: Sequence[Mapping[str, Any]] = ()
    script: Mapping[str, Sequence[Any]] = {}
    settings: Mapping[str, Any] = {}
    tls: bool = False
    """Whether calls come over TLS, and each driver has a certificate, for which the server asks."""
    auth: bool = False
    """Whether callers are those of an issuer of the tests."""
    newer: NewerServer | None = None

    @model_validator(mode="after")
    def _encrypts_tokens(self) -> "Server":
        if self.auth and not self.tls:
            raise ValueError("auth needs tls: the test's own calls have a token too")
        return self


class Group(_Strict):
    """A file: one server, and scenarios that are played with it."""

    name: str = ""
    server: Server
    scenarios: Sequence[Scenario] = Field(min_length=1)


def read_groups(folder: Path = FOLDER) -> list[Group]:
    """Read every file of a folder, in the order of their names. Raises ScenarioError."""
    return [read_group(path) for path in sorted(folder.glob("*.yaml"))]


def read_group(path: Path) -> Group:
    """Read a file. Raises ScenarioError with every error that it has."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
        group = Group.model_validate({"name": path.stem, **(document or {})})
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path.name}: {error}") from None
    except ValidationError as error:
        places = [f"{_place(document, one['loc'])}: {one['msg']}" for one in error.errors()]
        raise ScenarioError("\n".join(f"{path.name}: {place}" for place in places)) from None
    names = [scenario.name for scenario in group.scenarios]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ScenarioError(f"{path.name}: several scenarios have the name {repeated[0]!r}")
    return group


def _place(document: Any, location: Sequence[int | str]) -> str:
    """Return the path to an error, with a scenario's name in place of its number."""
    match location:
        case ("scenarios", int(number), *rest):
            scenario = document["scenarios"][number]
            name = scenario.get("name", number) if isinstance(scenario, dict) else number
            return ".".join([f"scenario {name!r}", *map(str, rest)])
    return ".".join(map(str, location)) or "the file"
