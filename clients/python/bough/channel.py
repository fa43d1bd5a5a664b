"""Channels to a Bough server: their options, TLS and tokens."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

import grpc
from grpc import aio

from bough.addresses import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from bough.addresses import check_address, is_loopback, resolve_target, split_address, split_host

ChannelOption = tuple[str, int | str]

Token: TypeAlias = str | Callable[[], str]
"""A bearer token, or what returns the current one; it is called once for each call."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]

RUN_TIMEOUT: Final = 600.0
"""Default timeout for following a run, in seconds."""

CALL_TIMEOUT: Final = 10.0
"""Default timeout of any other call, in seconds."""

RETRIED_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "bough.v1.AccessService": ("GetCaller",),
    "bough.v1.AgentService": (
        "Run",
        "WatchRun",
        "ResumeRun",
        "ForkRun",
        "CancelRun",
        "GetRun",
        "ListRuns",
        "ListInputRequests",
        "AnswerInput",
    ),
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
        "ListToolServers",
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
    "bough.v1.UsageService": (
        "GetUsage",
        "ListUsageEntries",
        "GetQuotas",
        "GetAccount",
        "AdjustBalance",
        "ListAdjustments",
    ),
}
"""Idempotent methods by service, which the channel may retry.

Run, ResumeRun, ForkRun, Evaluate, CreateSession and AdjustBalance are idempotent because this client always sends a
request id, and AnswerInput because an equal answer is accepted again.
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

_AUTHORITY: Final = "grpc.default_authority"
"""The option that names the servers of a channel, and so what their certificates are checked for."""

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


def async_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Iterable[ChannelOption]
) -> aio.Channel:
    """Return a channel of asyncio: with TLS if there are credentials, else plaintext.

    Raises TypeError or ValueError for a wrong address.
    """
    target, merged = _prepare(address, credentials, options)
    if credentials is None:
        return aio.insecure_channel(target, options=merged)
    return aio.secure_channel(target, credentials, options=merged)


def sync_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Iterable[ChannelOption]
) -> grpc.Channel:
    """Return a channel for threads: with TLS if there are credentials, else plaintext.

    Raises TypeError or ValueError for a wrong address.
    """
    target, merged = _prepare(address, credentials, options)
    if credentials is None:
        return grpc.insecure_channel(target, options=merged)
    return grpc.secure_channel(target, credentials, options=merged)


def _prepare(
    address: str, credentials: grpc.ChannelCredentials | None, options: Iterable[ChannelOption]
) -> tuple[str, tuple[ChannelOption, ...]]:
    """Return the target and the options of a channel. Raises TypeError or ValueError for a wrong address."""
    check_address(address)
    merged = dict(channel_options(options))
    servers = split_address(address)
    if len(servers) > 1 and credentials is not None and _AUTHORITY not in merged:
        # gRPC checks the certificates of all for one name, and would take the list for it.
        if len({split_host(server) for server in servers}) > 1:
            raise ValueError(
                f"The address {address!r} names several hosts, whose certificates are checked for one name: pass "
                f'that as options=[("{_AUTHORITY}", "bough.example")].'
            )
        merged[_AUTHORITY] = servers[0]
    return resolve_target(address), tuple(merged.items())


def token_metadata(
    token: Token | None, address: str, credentials: grpc.ChannelCredentials | None
) -> Callable[[], Metadata]:
    """Return what makes the metadata of a call: the token, if there is one.

    Raises ValueError for a token that would travel unencrypted to another machine.
    """
    if token is None:
        return tuple
    if credentials is None and not is_loopback(address):
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
