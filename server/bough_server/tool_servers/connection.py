"""What a tool server is asked over a connection, whatever it speaks."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from bough.v1 import message_pb2, tool_pb2

Emit: TypeAlias = Callable[[str], Awaitable[None]]
"""Receives each piece of text that a tool sends while it runs."""

MAX_TOOLS = 10_000
MAX_PAGES = 1_000
MAX_LIST_BYTES = 16 * 1024 * 1024
LIST_SECONDS = 60.0
"""The bounds of a list of tools."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""The most bytes of one message of a tool server; a larger one closes the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool as its server describes it; nothing of it is checked. Schemas are JSON texts, empty if there is none."""

    name: str
    title: str = ""
    description: str = ""
    input_schema_json: str = ""
    output_schema_json: str = ""
    hints: tool_pb2.ToolHints = field(default_factory=tool_pb2.ToolHints)
    timeout: float | None = None
    """How long a call may take, in seconds; None if it does not say."""
    on_recovery: tool_pb2.ToolRecovery.ValueType = tool_pb2.TOOL_RECOVERY_UNSPECIFIED
    requires_approval: bool = False
    problem: str = ""
    """Why it cannot be called over this connection, in a sentence; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCall:
    """A call of a tool, with its name at its server, and the run that makes it."""

    tool: str
    arguments: dict[str, Any]
    idempotency_key: str
    """The same for every attempt of the call."""
    call_id: str = ""
    attempt: int = 1
    run_id: str = ""
    session_id: str = ""
    user_id: str = ""
    agent: str = ""
    invocation_id: str = ""


class NotSent(Exception):
    """The request has not reached the tool server, so it may be sent again; the message says why, as a clause."""


class OutcomeUnknown(Exception):
    """The request was sent and no answer will come; the message says why, as a clause."""


class Unreachable(Exception):
    """The tool server cannot be connected to, or its list cannot be read; the message says why, in a sentence."""


class ToolConnection(Protocol):
    """An open connection to a tool server, which the task that opened it closes."""

    async def list_tools(self) -> Sequence[ListedTool]:
        """Return all tools. Raises Unreachable."""
        ...

    async def call(self, call: ServerCall, emit: Emit, *, timeout: float) -> Sequence[message_pb2.Part]:
        """Call a tool and return its result; a cancellation cancels the call at the server.

        The caller cancels it after `timeout`, in seconds, which is for the server to know.

        Raises RunError if the tool fails, NotSent and OutcomeUnknown.
        """
        ...

    async def wait_for_change(self) -> bool:
        """Wait until the list may have changed, and return True; return False once the connection is lost."""
        ...

    async def close(self) -> None:
        """Close the connection; what is in flight is lost."""
        ...
