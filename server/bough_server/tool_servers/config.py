"""Sections of bough.yaml that declare tool servers."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from bough_server.identity import is_group
from bough_server.ids import AGENT_NAME
from bough_server.settings_sections import Count, FilePath, Flag, Seconds, Section, VariableName

OnOutcomeUnknown: TypeAlias = Literal["retry", "fail", "ask"]
"""What happens to a call whose outcome is unknown: it is made again, fails, or the run asks."""

INHERITED: Final = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
"""The variables that a child process gets without being named, as children of other MCP clients do."""


def _check_name(name: str) -> str:
    if not AGENT_NAME.fullmatch(name):
        raise ValueError("must be a letter, then up to 58 letters, digits, _ or -")
    return name


ToolServerName = Annotated[str, AfterValidator(_check_name)]
"""The name of a tool server."""


def _check_group(group: str) -> str:
    if not is_group(group):
        raise ValueError("must be the name of a group, 1 to 128 printable characters")
    return group


class ToolServerTlsSection(Section):
    """How a tool server is proved, and how this server proves itself to it."""

    ca_file: FilePath | None = None
    """The authorities that issue the tool server's certificate, as PEM; relative to this file. Unset: the public ones.
    """
    cert_file: FilePath | None = None
    """This server's certificate, for a tool server that asks for one, as PEM; relative to this file."""
    key_file: FilePath | None = None
    """Its private key as PEM, without a passphrase; relative to this file."""

    @model_validator(mode="after")
    def _check_files(self) -> "ToolServerTlsSection":
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: set both, or none")
        return self


class GrpcSection(Section):
    """A tool server that serves `bough.v1.ToolService`."""

    address: Annotated[str, Field(min_length=1)]
    """HOST:PORT, or any other target that gRPC takes."""
    tls: ToolServerTlsSection | None = None
    """Certificates of an encrypted connection. Unset: the connection is in plaintext."""
    server_name: str = ""
    """The name that the tool server's certificate is for, if it is not that of the address."""
    token_env: VariableName = ""
    """The environment variable with the bearer token that calls have; never the token itself."""
    token_file: FilePath | None = None
    """A file with that token, which is read whenever a connection is made; relative to this file."""

    @model_validator(mode="after")
    def _check_fields(self) -> "GrpcSection":
        if self.token_env and self.token_file:
            raise ValueError("token_env and token_file are two places of one token: set one of them")
        return self


class McpSection(Section):
    """A tool server that speaks MCP: a child process with `command`, or a program at a `url`."""

    command: str = ""
    """The program to start, which speaks MCP on its standard input and output."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    cwd: FilePath | None = None
    """Its working directory; relative to this file. Unset: the folder of this file."""
    env: tuple[VariableName, ...] = ()
    """The names of the environment variables that it gets, beside HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    url: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    """The URL of a server that speaks MCP over streamable HTTP."""
    headers_env: Mapping[str, VariableName] = {}
    """HTTP headers that requests to `url` have: each header's name, and the environment variable with its value."""
    token_env: VariableName = ""
    """The environment variable with the bearer token that requests to `url` have; never the token itself."""
    token_file: FilePath | None = None
    """A file with that token, which is read whenever a connection is made; relative to this file."""
    tls: ToolServerTlsSection = ToolServerTlsSection()
    """Certificates of the connection to an `https` URL."""
    protocol: Literal["auto", "legacy", "2026-07-28"] = "auto"
    """The version of MCP. `auto`: the newest that both speak. `legacy`: those before 2026-07-28."""

    @model_validator(mode="after")
    def _check_fields(self) -> "McpSection":
        if bool(self.command) == bool(self.url):
            raise ValueError("needs `command`, a program to start, or `url`, the address of one; and not both")
        of_the_other = ("args", "cwd", "env") if self.url else ("headers_env", "token_env", "token_file", "tls")
        if wrong := sorted(self.model_fields_set & set(of_the_other)):
            raise ValueError(f"has a {'url' if self.url else 'command'}, which takes no {' and no '.join(wrong)}")
        if self.token_env and self.token_file:
            raise ValueError("token_env and token_file are two places of one token: set one of them")
        return self

    @property
    def variables(self) -> Iterator[str]:
        """The environment variables that the section needs the values of."""
        if self.command:
            yield from (*INHERITED, *self.env)
        else:
            yield from (*self.headers_env.values(), self.token_env)


class ToolServerSection(Section):
    """A program outside that serves tools, which agents name by its key in `tool_servers`."""

    mcp: McpSection | None = None
    """How it is reached, if it speaks MCP."""
    grpc: GrpcSection | None = None
    """How it is reached, if it serves `bough.v1.ToolService`."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,32}$")] | None = None
    """What the names of its tools begin with for agents. Unset: its name and `_`."""
    tools: tuple[Annotated[str, Field(min_length=1)], ...] = ("*",)
    """The tools that agents may use: patterns of the server's own names, such as `search_*`."""
    timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """How long a call may take, if the agent's link to the tool does not say."""
    connect_timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    """How long it may take to connect, and to begin to speak."""
    max_concurrency: Annotated[Count, Field(ge=1)] = 16
    """How many calls this server makes to it at once; further ones wait, which no timeout counts."""
    requires_approval: tuple[str, ...] = ()
    """The tools whose calls must be approved: patterns of the server's own names."""
    approvers: Annotated[str, AfterValidator(_check_group)] | None = None
    """The group of callers who approve. Unset: the user of the run, and administrators."""
    on_recovery: Mapping[str, OnOutcomeUnknown] = {}
    """What happens to a call whose outcome is unknown, by patterns of the server's own names; the first that matches
    holds. `retry`: it is made again. `fail`: it fails. `ask`: the run asks. Without a pattern it is as the tool's own
    definition says, by `grpc`; else it is made again by `grpc`, and by `mcp` if the tool's hints say that it only reads
    or is idempotent.
    """
    tenants: tuple[str, ...] | None = None
    """The tenants that may use it; for others it does not exist. Unset: all. One token serves all of them."""
    trust_hints: Flag = True
    """Whether `on_recovery` goes by what the server says of its tools, where no pattern matches."""

    @model_validator(mode="after")
    def _check_kind(self) -> "ToolServerSection":
        if (self.mcp is None) == (self.grpc is None):
            raise ValueError("needs `mcp` or `grpc`, which say how it is reached; and not both")
        return self

    @property
    def kind(self) -> str:
        """How it is called: "mcp" or "grpc"."""
        return "mcp" if self.mcp is not None else "grpc"

    @property
    def variables(self) -> Iterator[str]:
        """The environment variables that the section needs the values of."""
        if self.mcp is not None:
            yield from self.mcp.variables
        if self.grpc is not None:
            yield self.grpc.token_env

    def prefix_of(self, name: str) -> str:
        """Return what the names of its tools begin with, for a server of this name."""
        return f"{name}_" if self.prefix is None else self.prefix

    def is_visible_to(self, tenant_id: str) -> bool:
        """Return whether a tenant may use it."""
        return self.tenants is None or tenant_id in self.tenants


def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether one of the patterns matches a tool's name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def variables_of(servers: Mapping[str, ToolServerSection]) -> set[str]:
    """Return the names of the environment variables that tool servers need the values of."""
    return {name for server in servers.values() for name in server.variables} - {""}
