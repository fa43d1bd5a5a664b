"""Give memory that was freed back to the system: the allocator of most Linux systems keeps what a burst needed."""

import asyncio
import ctypes
import sys
from mmap import PAGESIZE
from pathlib import Path
from typing import Final

from bough_server.threads import run_in_thread

CHECK_SECONDS: Final = 30.0
"""How often the memory is looked at."""

GROWTH_BYTES: Final = 64 * 1024 * 1024
"""By how much it must have grown since freed memory was last given back: giving it back takes time."""

_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the memory that this process has; 0 where the system does not say."""
    try:
        return int(_STATM.read_bytes().split()[1]) * PAGESIZE
    except OSError:
        return 0


async def give_back_freed_memory() -> None:
    """Give freed memory back whenever the process has grown, until cancelled; nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is None:
        return
    lowest = resident_bytes()
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        if resident_bytes() > lowest + GROWTH_BYTES:
            await run_in_thread(trim, 0)
            lowest = resident_bytes()
        lowest = min(lowest, resident_bytes())
