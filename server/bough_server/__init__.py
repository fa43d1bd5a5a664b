"""For authors of agents, tools and the pure functions that definitions name, and of programs that serve them.

Nothing else is here, and nothing is loaded before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bough_server.agents.function import agent
    from bough_server.app import serve
    from bough_server.functions import Snapshot, condition, input_builder, rewriter
    from bough_server.runtime.agent import Context
    from bough_server.tools.tool import tool

__all__ = ["Context", "Snapshot", "agent", "condition", "input_builder", "rewriter", "serve", "tool"]

_HOMES = {
    "agent": "bough_server.agents.function",
    "tool": "bough_server.tools.tool",
    "condition": "bough_server.functions",
    "input_builder": "bough_server.functions",
    "rewriter": "bough_server.functions",
    "Context": "bough_server.runtime.agent",
    "Snapshot": "bough_server.functions",
    "serve": "bough_server.app",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
