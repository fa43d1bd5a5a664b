"""What every test shares: one event loop, the poller of gRPC that wakes it, a plain log, and no deadlines."""

import faulthandler
import gc
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
import structlog
from grpc._cython import cygrpc

from tests.support.databases import POSTGRES, on_postgres
from tests.support.examples import EXAMPLES

# What is imported lives to the end: while the tests are collected, the collector would only go over it again and again.
gc.disable()

_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 2 * 1024**3
_SUITE_SECONDS = 3600
"""How long all tests together may take: then the process ends, and says where it was."""


def _use_memory() -> None:
    """Put temporary files into memory, where there is plenty: on a disk each commit of each test waits for a flush.

    No test cuts the power, which is all that a flush is for. A TMPDIR that is set stays.
    """
    if "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK):
        return
    is_for_programs = not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC  # containers often forbid it there
    if is_for_programs and shutil.disk_usage(_MEMORY).free >= _ENOUGH_BYTES:
        os.environ["TMPDIR"] = str(_MEMORY)
        tempfile.tempdir = None  # else pytest's own temporary files have settled it


_use_memory()

# A machine that is busy with something else is no failure; what is stuck meets the timeout of pytest.
hypothesis.settings.register_profile("bough", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.register_profile("whole grid", deadline=None, max_examples=20 * EXAMPLES)
hypothesis.settings.load_profile("bough")

# Stacks as the server prints them. By default they are drawn with every local variable, which takes longer than what
# most tests do that fail on purpose.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the whole grid."""
    parser.addoption(
        "--whole-grid", action="store_true", help="cut runs after every event, and try twenty times as many random ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of tests that grow with the whole grid, and load its number of examples."""
    config.addinivalue_line("markers", "grid: at some places of some runs; at all, of more runs, with --whole-grid")
    config.addinivalue_line("markers", "wheel: builds the wheel and installs it, which `make wheel` does")
    if not hasattr(config, "workerinput"):  # the process that waits for the others
        faulthandler.dump_traceback_later(_SUITE_SECONDS, exit=True)
    if config.getoption("--whole-grid"):
        hypothesis.settings.load_profile("whole grid")


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `-n auto` starts: one more than there are cores, as many tests wait for a process."""
    return min(8, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what is loaded by now from every later collection, as a server does, and let the collector begin."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def whole_grid(request: pytest.FixtureRequest) -> bool:
    """Whether a test goes over every place of a recorded run."""
    return bool(request.config.getoption("--whole-grid"))


@pytest.fixture
def database_of_folders(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """The kind of database that all servers and harnesses of a test have; see databases.in_each_database."""
    with on_postgres(tmp_path) if request.param == str(POSTGRES) else nullcontext():
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The tests run on asyncio, as the server does."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def _one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Hold one event loop and one poller for all tests: grpc.aio polls for the process, and would wake closed loops."""
    # The poller counts its users: channels and servers. When the last one dies, it closes the socket by which it wakes
    # the loop; a wake-up that is queued at that moment then reads a closed socket, in whatever test comes next.
    # This user stays until the process ends.
    cygrpc.init_grpc_aio()
    yield  # noqa: PT022 # while a fixture of the session has not ended, its loop stays
