"""Open connections to tool servers; what they are spoken to with is loaded when the first is opened."""

from collections.abc import Mapping
from pathlib import Path

from bough_server.threads import run_in_thread
from bough_server.tool_servers.config import ToolServerSection
from bough_server.tool_servers.connection import ToolConnection, Unreachable
from bough_server.tool_servers.lock import LOCK_FILE, read_lock
from bough_server.tool_servers.server import Connect
from bough_server.tool_servers.servers import Connector, ToolServers


def build_connector(variables: Mapping[str, str], folder: Path) -> Connector:
    """Return what opens connections; `variables` are the environment's, `folder` that of the configuration."""

    def connect_to(name: str, section: ToolServerSection) -> Connect:
        async def connect() -> ToolConnection:
            if section.grpc is not None:
                from bough_server.tool_servers.grpc_client import connect_to_service

                return await connect_to_service(section.grpc, variables)
            try:
                # In a thread: to load the package takes most of a second.
                await run_in_thread(_load_mcp)
            except ImportError:
                raise Unreachable(
                    "Tool servers that speak MCP need the extra `mcp`: pip install 'bough-agents[mcp]'."
                ) from None
            from bough_server.tool_servers.mcp_client import connect_to_mcp

            return await connect_to_mcp(name, section, variables=variables, folder=folder)

        return connect

    return connect_to


def build_tool_servers(
    sections: Mapping[str, ToolServerSection],
    *,
    variables: Mapping[str, str],
    folder: Path,
    taken: Mapping[str, str] | None = None,
    is_locked: bool = True,
) -> ToolServers:
    """Return the tool servers of a configuration, none connected; `taken` as ToolServers has it.

    Without `is_locked` they offer what was not reviewed too. Raises ConfigurationError if the lock cannot be read.
    """
    lock = read_lock(folder / LOCK_FILE) if sections and is_locked else None
    return ToolServers(sections, build_connector(variables, folder), lock=lock, taken=taken)


def _load_mcp() -> None:
    import bough_server.tool_servers.mcp_client  # noqa: F401
