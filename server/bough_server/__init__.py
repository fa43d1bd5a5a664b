"""API for authors of agents, tools and pure functions, and for programs that serve them.

Each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bough.v1.message_pb2 import Message, Part
    from bough_server.agents.function import agent
    from bough_server.agents.graph.builder import Graph
    from bough_server.agents.graph.function import node
    from bough_server.app import serve
    from bough_server.errors import RunError
    from bough_server.evals.metrics.custom import metric
    from bough_server.functions import (
        Snapshot,
        Update,
        condition,
        handler,
        input_builder,
        reducer,
        rewriter,
        router,
    )
    from bough_server.log.blobs import file_part
    from bough_server.messages import text_of
    from bough_server.models.model import ModelRequest
    from bough_server.runtime.agent import Context, Outcome
    from bough_server.tools.tool import ToolContext, tool

__all__ = [
    "Context",
    "Graph",
    "Message",
    "ModelRequest",
    "Outcome",
    "Part",
    "RunError",
    "Snapshot",
    "ToolContext",
    "Update",
    "agent",
    "condition",
    "file_part",
    "handler",
    "input_builder",
    "metric",
    "node",
    "reducer",
    "rewriter",
    "router",
    "serve",
    "text_of",
    "tool",
]

_HOMES = {
    "Context": "bough_server.runtime.agent",
    "Graph": "bough_server.agents.graph.builder",
    "Message": "bough.v1.message_pb2",
    "ModelRequest": "bough_server.models.model",
    "Outcome": "bough_server.runtime.agent",
    "Part": "bough.v1.message_pb2",
    "RunError": "bough_server.errors",
    "Snapshot": "bough_server.functions",
    "ToolContext": "bough_server.tools.tool",
    "Update": "bough_server.functions",
    "agent": "bough_server.agents.function",
    "condition": "bough_server.functions",
    "file_part": "bough_server.log.blobs",
    "handler": "bough_server.functions",
    "input_builder": "bough_server.functions",
    "metric": "bough_server.evals.metrics.custom",
    "node": "bough_server.agents.graph.function",
    "reducer": "bough_server.functions",
    "rewriter": "bough_server.functions",
    "router": "bough_server.functions",
    "serve": "bough_server.app",
    "text_of": "bough_server.messages",
    "tool": "bough_server.tools.tool",
}


# Lazy, so that a module that only defines a tool does not load the server.
def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
