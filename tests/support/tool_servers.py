"""Teams with tool servers: settings of child processes and addresses, and short readings of what they did."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bough.v1 import agent_pb2, error_pb2, event_pb2
from bough_server.tool_servers.config import ToolServerSection
from bough_server.tool_servers.lock import LOCK_FILE, write_lock
from bough_server.tool_servers.opening import build_tool_servers
from bough_server.tool_servers.servers import ToolServers
from tests.support.log_readings import results_of, text_of
from tests.support.run_harness import RunHarness
from tests.support.teams import llm, open_team, script

SUPPORT = Path(__file__).parent
VARIABLES = {"PATH": os.environ.get("PATH", ""), "NOTES_TOKEN": "secret"}


def notes(folder: Path, **rules: object) -> dict[str, object]:
    """The settings of a child process that keeps notes, with these rules."""
    command = {"command": sys.executable, "args": [str(SUPPORT / "mcp_notes.py"), str(folder / "notes.txt")]}
    return {"mcp": command, "connect_timeout": 60.0, **rules}


def by_hand(folder: Path, **rules: object) -> dict[str, object]:
    """The settings of a child process that keeps notes and starts in an instant, with these rules."""
    return faults("none", str(folder / "notes.txt"), **rules)


def faults(fault: str, *arguments: str, **rules: object) -> dict[str, object]:
    """The settings of a child process that misbehaves, with these rules."""
    command = {"command": sys.executable, "args": [str(SUPPORT / "mcp_faults.py"), fault, *arguments]}
    return {"mcp": command, "connect_timeout": 30.0, **rules}


def configure(folder: Path, **servers: object) -> Callable[[Mapping[str, str]], ToolServers]:
    """What makes the tool servers of these settings."""
    sections = {name: ToolServerSection.model_validate(each) for name, each in servers.items()}

    def build(taken: Mapping[str, str]) -> ToolServers:
        return build_tool_servers(sections, variables=VARIABLES, folder=folder, taken=taken)

    return build


@asynccontextmanager
async def team(
    folder: Path, turns: Sequence[object], *links: str | agent_pb2.ToolLink, **servers: object
) -> AsyncIterator[RunHarness]:
    """A harness with one agent, p, that has these tools, and these tool servers."""
    agent = llm("p")
    agent.llm.tools.extend(agent_pb2.ToolLink(name=link) if isinstance(link, str) else link for link in links)
    built = configure(folder, **servers)
    async with open_team(folder, script(p=turns), agent, tool_servers=built) as it:
        yield it


def kept(folder: Path) -> list[str]:
    """The notes, without the keys of the calls that made them."""
    file = folder / "notes.txt"
    return [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def keys(folder: Path) -> list[str]:
    """The keys of the calls that made the notes."""
    return [line.split()[1] for line in (folder / "notes.txt").read_text(encoding="utf-8").splitlines()]


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that another process does."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def describe(log: Sequence[event_pb2.AgentEvent]) -> list[str]:
    """The results of a log, each as its text or its error's reason."""
    return [
        error_pb2.ErrorReason.Name(result.error.reason).removeprefix("ERROR_REASON_")
        if result.HasField("error")
        else text_of(result)
        for result in results_of(log)
    ]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def lock_tools(folder: Path, section: ToolServerSection, *names: str) -> None:
    """Write the lock of some tools of the server s."""
    servers = build_tool_servers({"s": section}, variables=VARIABLES, folder=folder, is_locked=False)
    try:
        await servers.wait_until_settled(["s"])
        write_lock(folder / LOCK_FILE, [servers.offers.servers["s"].own[f"s_{name}"] for name in names])
    finally:
        await servers.close()
