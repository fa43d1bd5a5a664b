"""How a channel to a Bough server is set up; it opens none by itself."""

import json
from typing import Final

_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{}],
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

ChannelOption = tuple[str, int | str]

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Where a server listens unless it is told otherwise."""

RUN_TIMEOUT: Final = 600.0
"""Seconds that following a run may take unless the caller says otherwise."""

CALL_TIMEOUT: Final = 10.0
"""Seconds that any other call may take unless the caller says otherwise."""

CHANNEL_OPTIONS: Final[tuple[ChannelOption, ...]] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 8 * 1024 * 1024),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)
"""Pings that the server's own limits allow, and retries where nothing has been answered yet: every call is idempotent,
a Run by its request id."""
