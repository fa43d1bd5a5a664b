"""Tools: a Python function, its name and its JSON Schema; running one is execution.py's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class ToolContext(Protocol):
    """What a tool may know of the call it answers; a parameter annotated with it is filled in and not in the schema."""

    @property
    def run_id(self) -> str:
        """The run."""
        ...

    @property
    def session_id(self) -> str:
        """The session."""
        ...

    @property
    def invocation_id(self) -> str:
        """The calling invocation."""
        ...

    @property
    def agent(self) -> str:
        """The calling agent."""
        ...

    @property
    def call_id(self) -> str:
        """The call."""
        ...

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that models may call. Made by `@tool`; still callable as the function it is."""

    name: str
    description: str
    input_schema_json: str
    function: Callable[..., Any]
    timeout: float | None = None
    """Seconds; None for no limit."""
    context_parameter: str = ""
    """The parameter that takes the ToolContext; empty for none."""
    digest: str = ""
    """SHA-256 hex of name, description and schema."""
