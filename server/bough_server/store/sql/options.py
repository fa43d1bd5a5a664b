"""How a store is opened, whichever its database is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from bough_server.clock import Clock, SystemClock
from bough_server.store.sql.write_queue import STALL_SECONDS
from bough_server.store.sql.writer import CommitHooks

Durability = Literal["disk", "process"]
"""The failure that a commit survives: a power cut, or only a killed process."""

WINDOW_BYTES: Final = 8 * 1024 * 1024
RETRY_DELAYS: Final = (0.05, 0.2, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is opened; times in seconds."""

    durability: Durability = "disk"
    window_bytes: int = WINDOW_BYTES
    """Bytes of recent events kept in memory for readers, over all live runs."""
    busy_timeout: float = 2.0
    """How long a statement waits for a lock of another connection."""
    retry_delays: Sequence[float] = RETRY_DELAYS
    """Before each retry of a failed commit."""
    stall_seconds: float = STALL_SECONDS
    """If a write takes longer, the database is taken not to respond."""
    reader_threads: int = 4
    listen_url: str = ""
    """The URL of PostgreSQL for notifications between servers; default: that of the database."""
    may_upgrade: bool = True
    """Whether opening may create or upgrade the schema; a new file is always created."""
    report_commit: Callable[[int, float], None] | None = None
    """Called on the writer thread after each commit, with the number of its writes and its duration."""
    hooks: CommitHooks = field(default_factory=CommitHooks)
    clock: Clock = field(default_factory=SystemClock)
