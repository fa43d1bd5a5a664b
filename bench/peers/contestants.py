"""The systems that run the desk: Bough, bare loops and the peers; how each is started, and what it keeps of a turn."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk_team import write_project
from bench.peers import adk_client, bough_client
from bench.peers.desk_turns import TURN_SECONDS, Lap, run
from bench.programs import Program, running
from bench.servers import bough_server

QUIET: Final = {
    "ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS": "false",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
"""The environment of peers: they record and export no traces."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A contestant that is ready: its process, and how it runs turns; `run` takes how many, and how many at once."""

    program: Program
    run: Callable[[int, int], Awaitable[Lap]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a contestant starts from."""

    folder: Path
    """An empty one on a disk."""
    base_url: str
    """Of the model server."""
    python: str = sys.executable
    """The interpreter of its environment."""


Start = Callable[[Ground], AbstractAsyncContextManager[Runner]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A system that runs the desk."""

    name: str
    environment: str = ""
    """The requirements that it is installed from; empty for this project's environment."""
    package: str = ""
    """The package whose version is shown."""
    is_peer: bool = True
    is_streamed: bool = True
    """Whether texts arrive piece by piece; bare loops return them whole."""
    kept: str
    durable: str
    tree: str
    start: Start


@asynccontextmanager
async def _bough(ground: Ground) -> AsyncIterator[Runner]:
    config = write_project(ground.folder, base_url=ground.base_url)
    async with bough_server(ground.folder, config) as server, aio.insecure_channel(server.address) as channel:
        yield Runner(server, partial(run, bough_client.turn_of(channel)))


@asynccontextmanager
async def _loop(ground: Ground, *, kind: str) -> AsyncIterator[Runner]:
    async with _answering(ground, "floor_desk", kind, ground.base_url) as runner:
        yield runner


@asynccontextmanager
async def _library(ground: Ground, *, module: str, database: str = "") -> AsyncIterator[Runner]:
    path = [str(ground.folder / database)] if database else []
    async with _answering(ground, module, ground.base_url, *path) as runner:
        yield runner


@asynccontextmanager
async def _answering(ground: Ground, module: str, *arguments: str) -> AsyncIterator[Runner]:
    """A program that runs turns as lines ask for them."""
    async with running(
        ground.folder,
        module,
        ("-m", f"bench.peers.{module}", *arguments),
        python=ground.python,
        environment=QUIET,
        takes_lines=True,
    ) as program:

        async def ask(count: int, at_once: int) -> Lap:
            return Lap(**await program.ask("run", count, at_once))

        yield Runner(program, ask)


@asynccontextmanager
async def _adk(ground: Ground, *, database: str = "") -> AsyncIterator[Runner]:
    port = adk_client.free_port()
    sessions = f"sqlite:///{ground.folder / database}" if database else "memory://"
    async with running(
        ground.folder,
        "adk",
        adk_client.serve(port, sessions),
        python=ground.python,
        environment={**QUIET, "BENCH_BASE_URL": ground.base_url},
    ) as server:
        await server.wait_for_port(port, seconds=TURN_SECONDS)
        async with adk_client.turns(server.address) as turn:
            yield Runner(server, partial(run, turn))


BOUGH: Final = Contestant(
    name="`bough serve`",
    is_peer=False,
    kept="every event of every agent; pieces of a text joined",
    durable="SQLite, synced before a client sees it; a killed run is continued",
    tree="each agent with its caller, usage and times",
    start=_bough,
)
TYPED: Final = Contestant(
    name="floor: `openai`, typed chunks",
    package="openai",
    is_peer=False,
    is_streamed=False,
    kept="nothing",
    durable="no",
    tree="no",
    start=partial(_loop, kind="typed"),
)
RAW: Final = Contestant(
    name="floor: `openai`, raw stream",
    package="openai",
    is_peer=False,
    is_streamed=False,
    kept="nothing",
    durable="no",
    tree="no",
    start=partial(_loop, kind="raw"),
)
PEERS: Final = (
    Contestant(
        name="openai-agents",
        environment="openai-agents",
        package="openai-agents",
        kept="nothing",
        durable="no",
        tree="no",
        start=partial(_library, module="openai_agents_desk"),
    ),
    Contestant(
        name="openai-agents, `SQLiteSession`",
        environment="openai-agents",
        package="openai-agents",
        kept="the lead's messages and calls",
        durable="SQLite, after each of the lead's steps",
        tree="no",
        start=partial(_library, module="openai_agents_desk", database="sessions.db"),
    ),
    Contestant(
        name="langgraph",
        environment="langgraph",
        package="langgraph",
        kept="nothing",
        durable="no",
        tree="no",
        start=partial(_library, module="langgraph_desk"),
    ),
    Contestant(
        name="langgraph, `AsyncSqliteSaver`",
        environment="langgraph",
        package="langgraph",
        kept="the state after each step of each graph",
        durable="SQLite, while the next step runs; a killed run can be continued",
        tree="a namespace for each nested graph",
        start=partial(_library, module="langgraph_desk", database="checkpoints.db"),
    ),
    Contestant(
        name="`adk api_server`, in memory",
        environment="adk",
        package="google-adk",
        kept="whole events of every agent, until it stops",
        durable="no",
        tree="a path on each event, usage on each model call",
        start=_adk,
    ),
    Contestant(
        name="`adk api_server`, SQLite",
        environment="adk",
        package="google-adk",
        kept="whole events of every agent",
        durable="SQLite, each event before a client sees it",
        tree="a path on each event, usage on each model call",
        start=partial(_adk, database="adk.db"),
    ),
)
ALL: Final = (RAW, TYPED, BOUGH, *PEERS)
