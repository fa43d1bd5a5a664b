"""Channels to a Bough server: their options, TLS and tokens."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from typing import Final, TypeAlias

import grpc
from grpc import aio

from bough.arguments import wrong_type

ChannelOption = tuple[str, int | str]

Token: TypeAlias = str | Callable[[], str]
"""A bearer token, or what returns the current one; it is called once for each call."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Default address of a server."""

RUN_TIMEOUT: Final = 600.0
"""Default timeout for following a run, in seconds."""

CALL_TIMEOUT: Final = 10.0
"""Default timeout of any other call, in seconds."""

RETRIED_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "bough.v1.AgentService": ("Run", "WatchRun", "ResumeRun", "ForkRun", "CancelRun", "GetRun", "ListRuns"),
    "bough.v1.EvalService": (
        "GetInvocation",
        "AggregateEvents",
        "Evaluate",
        "WatchEvaluation",
        "CancelEvaluation",
        "GetEvaluation",
        "ListCaseResults",
        "ListEvaluations",
        "CompareEvaluations",
        "ScoreInvocations",
        "DiffInvocations",
    ),
    "bough.v1.CatalogService": (
        "UpdateAgent",
        "GetAgent",
        "ListAgents",
        "ValidateAgents",
        "ListTools",
        "ListModels",
    ),
    "bough.v1.SessionService": (
        "CreateSession",
        "GetSession",
        "ListSessions",
        "ListMessages",
        "GetSessionState",
        "ReadBlob",
    ),
}
"""Idempotent methods by service, which the channel may retry.

Run, ResumeRun, ForkRun, Evaluate and CreateSession are idempotent because this client always sends a request id.
Methods that are not listed are not: a repeated CreateAgent would find its own name taken, a repeated DeleteSession,
DeleteAgent or DeleteEvaluation nothing to delete, and a repeated UpdateSession or UpdateSessionState might undo another
caller's change in between.
"""

_SERVICE_CONFIG: Final = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method}
                for service, methods in RETRIED_METHODS.items()
                for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

_HOST: Final = re.compile(r"(?:dns:(?://[^/]*/)?|ipv[46]:)?([^][:/,]+|\[[^]]*\])(:\d{1,5})?")
"""An address of one server by host, and by port if it is whole."""

_WITHOUT_PORT: Final = ("unix:", "unix-abstract:", "vsock:", "xds:", "google-c2p:")
"""How addresses begin that gRPC resolves without a port."""

_TOKEN: Final = re.compile("[!-~]+")

CHANNEL_OPTIONS: Final[tuple[ChannelOption, ...]] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)
"""Default channel options: pings while a call is open, and retries of calls without a response so far.

The reconnection backoff is bounded at 5 seconds. With gRPC's default of two minutes, streams that wait to rejoin would
run out of patience although the server is back.
"""


def channel_options(options: Iterable[ChannelOption] = ()) -> tuple[ChannelOption, ...]:
    """Return `CHANNEL_OPTIONS` overridden by `options`."""
    # Merged by name, because gRPC uses the first of two options of one name.
    return tuple({**dict(CHANNEL_OPTIONS), **dict(options)}.items())


def check_address(address: str) -> None:
    """Raise ValueError for an address that is not HOST:PORT or another that gRPC knows, TypeError for no text."""
    if not isinstance(address, str):
        raise wrong_type("address", "a str", address)
    if address.startswith(_WITHOUT_PORT):
        return
    hosts = [_HOST.fullmatch(each) for each in address.split(",")]
    if all(host is not None and host[2] for host in hosts):
        return
    if all(hosts):
        raise ValueError(f"The address {address!r} has no port: write HOST:PORT, such as {DEFAULT_ADDRESS}.")
    if address.startswith(("http://", "https://")):
        raise ValueError(
            f"The address {address!r} is a URL: write HOST:PORT, such as {DEFAULT_ADDRESS}. For TLS pass credentials, "
            "such as grpc.ssl_channel_credentials()."
        )
    raise ValueError(f"The address {address!r} is not HOST:PORT, such as {DEFAULT_ADDRESS}.")


def async_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Iterable[ChannelOption]
) -> aio.Channel:
    """Return a channel of asyncio: with TLS if there are credentials, else plaintext.

    Raises TypeError or ValueError for a wrong address.
    """
    check_address(address)
    if credentials is None:
        return aio.insecure_channel(address, options=channel_options(options))
    return aio.secure_channel(address, credentials, options=channel_options(options))


def sync_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Iterable[ChannelOption]
) -> grpc.Channel:
    """Return a channel for threads: with TLS if there are credentials, else plaintext.

    Raises TypeError or ValueError for a wrong address.
    """
    check_address(address)
    if credentials is None:
        return grpc.insecure_channel(address, options=channel_options(options))
    return grpc.secure_channel(address, credentials, options=channel_options(options))


def token_metadata(
    token: Token | None, address: str, credentials: grpc.ChannelCredentials | None
) -> Callable[[], Metadata]:
    """Return what makes the metadata of a call: the token, if there is one.

    Raises ValueError for a token that would travel unencrypted to another machine.
    """
    if token is None:
        return tuple
    if credentials is None and not _is_loopback(address):
        raise ValueError(
            f"the token would travel to {address} unencrypted: pass credentials, such as grpc.ssl_channel_credentials()"
        )
    current = token if callable(token) else lambda: token
    return lambda: (("authorization", f"Bearer {_check_token(current())}"),)


def _check_token(token: str) -> str:
    """Return a token that a header may have; raises ValueError, which does not show it, for any other."""
    if _TOKEN.fullmatch(token) is None:
        raise ValueError("the token is empty or has characters that no bearer token has")
    return token


def _is_loopback(address: str) -> bool:
    """Return whether an address of gRPC names this machine: a Unix socket, localhost, or an address of loopback."""
    host = _HOST.fullmatch(address)
    if host is None or host[1] == "localhost":
        return host is not None or address.startswith("unix:")
    try:
        return ip_address(host[1].strip("[]")).is_loopback
    except ValueError:
        return False
