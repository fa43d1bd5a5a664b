"""How a channel to a Bough server is set up; it opens none by itself."""

import json
from collections.abc import Iterable, Mapping
from typing import Final

ChannelOption = tuple[str, int | str]

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Where a server listens unless it is told otherwise."""

RUN_TIMEOUT: Final = 600.0
"""Seconds that following a run may take unless the caller says otherwise."""

CALL_TIMEOUT: Final = 10.0
"""Seconds that any other call may take unless the caller says otherwise."""

RETRIED_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "bough.v1.AgentService": ("Run", "WatchRun", "ResumeRun", "ForkRun", "CancelRun", "GetRun", "ListRuns"),
    "bough.v1.EvalService": ("GetInvocation", "AggregateEvents"),
    "bough.v1.CatalogService": (
        "UpdateAgent",
        "GetAgent",
        "ListAgents",
        "ValidateAgents",
        "ListTools",
        "ListModels",
    ),
    "bough.v1.SessionService": ("CreateSession", "GetSession", "ListSessions", "ListMessages", "GetSessionState"),
}
"""The methods that may be called twice for once, by service: Run, ResumeRun, ForkRun and CreateSession because the
client never sends them without a request id. CreateAgent would find its own name taken, and DeleteSession and
DeleteAgent would find nothing to delete; UpdateSession and UpdateSessionState might undo another caller's change made
between the two."""

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
"""Pings that the server's own limits allow, and retries where nothing has been answered yet.

Left to itself a channel whose server is gone looks for it less and less often, at last every two minutes: streams that
wait would lose their patience with a server that has long been back.
"""


def channel_options(options: Iterable[ChannelOption] = ()) -> tuple[ChannelOption, ...]:
    """`CHANNEL_OPTIONS` and a caller's own, which win: of two of one name gRPC takes the first."""
    return tuple({**dict(CHANNEL_OPTIONS), **dict(options)}.items())
