"""gRPC channel options for a Bough server: keepalive, reconnection, message size and retries."""

import json
from collections.abc import Iterable, Mapping
from typing import Final

ChannelOption = tuple[str, int | str]

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
Methods that are not listed are not: a repeated CreateAgent would find its own name taken, a repeated DeleteSession or
DeleteAgent nothing to delete, and a repeated UpdateSession or UpdateSessionState might undo another caller's change
in between.
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

CHANNEL_OPTIONS: Final[tuple[ChannelOption, ...]] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", 8 * 1024 * 1024),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)
"""Default channel options: pings as rare as the server requires, and retries of calls without a response so far.

The reconnection backoff is bounded at 5 seconds. With gRPC's default of two minutes, streams that wait to rejoin would
run out of patience although the server is back.
"""


def channel_options(options: Iterable[ChannelOption] = ()) -> tuple[ChannelOption, ...]:
    """Return `CHANNEL_OPTIONS` overridden by `options`."""
    # Merged by name, because gRPC uses the first of two options of one name.
    return tuple({**dict(CHANNEL_OPTIONS), **dict(options)}.items())
