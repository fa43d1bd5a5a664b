"""Work that nobody waits for, tried again until the store takes it; what the work is, it does not know."""

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from bough_server.clock import Clock
from bough_server.errors import ServerStopping, StorageFailed

_log = structlog.get_logger(__name__)

FIRST_PATIENCE: Final = 1.0
LONGEST_PATIENCE: Final = 60.0
"""Seconds between two tries."""


async def until_stored(clock: Clock, work: Callable[[], Awaitable[object]]) -> None:
    """Does something again and again until storage no longer fails at it, or the server stops."""
    patience = FIRST_PATIENCE
    while True:
        try:
            await work()
            break
        except ServerStopping:
            break
        except StorageFailed as error:
            _log.warning("storage failed; tried again", seconds=patience, error=error.message)
        await clock.sleep(patience)
        patience = min(LONGEST_PATIENCE, patience * 2)
