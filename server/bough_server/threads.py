"""Threads: every thread of the server is made here, which `tests.structure` checks, except those of libraries."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread of the event loop's default pool, and return its result or raise its exception."""
    return await asyncio.to_thread(function, *args, **kwargs)


def make_thread(work: Callable[[], object], *, name: str) -> threading.Thread:
    """Return a thread that is still to be started; the interpreter does not wait for it at its exit."""
    return threading.Thread(target=work, name=name, daemon=True)


def make_pool(name: str, *, threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool of at most so many threads (default: by the number of CPUs); `name` begins their names."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name)
