"""For authors of agents and tools: agent, tool, Context, serve; nothing else. Nothing is loaded before it is used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bough_server.agents.function import agent
    from bough_server.app import serve
    from bough_server.runtime.context import Context
    from bough_server.tools.tool import tool

__all__ = ["Context", "agent", "serve", "tool"]

_HOMES = {
    "agent": "bough_server.agents.function",
    "tool": "bough_server.tools.tool",
    "Context": "bough_server.runtime.context",
    "serve": "bough_server.app",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
