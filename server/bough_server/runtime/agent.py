"""What the runtime asks of an agent and of whoever finds agents, tools and models by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bough.v1 import agent_pb2, event_pb2, message_pb2
from bough_server.functions import Function
from bough_server.models.model import Model
from bough_server.session_state import json_text
from bough_server.tools.tool import Tool

if TYPE_CHECKING:
    from bough_server.runtime.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an agent ended well: its answer, why it ended, and what it asks of whoever waits for it."""

    output: message_pb2.Message
    end_reason: event_pb2.EndReason.ValueType = event_pb2.END_REASON_ANSWERED
    action: event_pb2.Action | None = None
    author: str = ""
    """Who wrote the output, where others did and the agent hands it on; it stands in histories as theirs already."""
    is_said: bool = False
    """Whether the output is a part of what the agent has said already."""
    closed_by: str = ""
    """The tool whose call ended the agent, where one did that is there for it."""
    transfer_id: str = ""
    """The call that hands over to another member of a swarm; empty where none does."""


def exited(output: message_pb2.Message) -> Outcome:
    """The outcome of an agent that ends everything above it, up to an agent that was called as a tool."""
    action = event_pb2.Action(exit=event_pb2.Exit(final_result=output))
    return Outcome(output=output, end_reason=event_pb2.END_REASON_EXITED, action=action)


def broke_loop(output: message_pb2.Message) -> Outcome:
    """The outcome of an agent that ends the nearest loop above it; `output` is said already, or empty."""
    action = event_pb2.Action(break_loop=event_pb2.BreakLoop())
    return Outcome(output=output, end_reason=event_pb2.END_REASON_BROKE_LOOP, action=action, is_said=True)


def transferred(
    agent: str,
    *,
    message: message_pb2.Message | None = None,
    output: message_pb2.Message | None = None,
    call_id: str = "",
) -> Outcome:
    """The outcome of a member of a swarm that hands over to another one and tells it `message`, if anything.

    `output` is what it says itself; with the call that hands over it is said already.
    """
    said = output or message_pb2.Message()
    return Outcome(
        output=said,
        end_reason=event_pb2.END_REASON_TRANSFERRED,
        action=event_pb2.Action(transfer=event_pb2.Transfer(agent=agent, message=message)),
        is_said=bool(call_id) or not said.parts,
        transfer_id=call_id,
    )


def value_of(output: message_pb2.Message) -> str:
    """An answer as a value of the session's state: the JSON that it is, several pieces as a list, else its text."""
    if output.parts and all(part.HasField("data_json") for part in output.parts):
        pieces = [part.data_json for part in output.parts]
        return pieces[0] if len(pieces) == 1 else f"[{','.join(pieces)}]"
    return json_text("".join(part.text or part.data_json for part in output.parts))


def llm_of(definition: agent_pb2.AgentDefinition) -> agent_pb2.LlmAgent:
    """What an agent's model is and is told; empty where it asks none. Of a definition's own, so changes are its."""
    return definition.supervisor.llm if definition.HasField("supervisor") else definition.llm


class Agent(Protocol):
    """A coroutine over a context, and what is known of it. It fails by raising and touches the world by effects."""

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """Name, description, links, limits and policies; an agent in code has no `kind` and its version as revision."""
        ...

    @property
    def kind(self) -> event_pb2.AgentKind.ValueType:
        """What runs it."""
        ...

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools it may call, besides the agents that its definition links."""
        ...

    async def run(self, ctx: "Context", input: message_pb2.Message) -> Outcome:
        """Answers an input. Raises RunError, or anything, to fail."""
        ...


class Resolver(Protocol):
    """Finds what definitions name, as it was when the run began: a run keeps its resolver to its end."""

    def agent(self, name: str) -> Agent:
        """Raises KeyError where there is none."""
        ...

    def tool(self, name: str) -> Tool:
        """Raises KeyError where there is none."""
        ...

    def function(self, name: str) -> Function:
        """One of the operator's pure functions. Raises KeyError where there is none."""
        ...

    def model(self, name: str) -> Model:
        """Aliases are followed; empty is the default model. Raises KeyError where there is none."""
        ...

    def reachable(self, root: str) -> Sequence[agent_pb2.AgentDefinition]:
        """The definitions that a run of `root` can reach by links, sorted by name, the root's among them."""
        ...

    def versions(self, root: str) -> "RunVersions":
        """Hashes of what those definitions name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVersions:
    """Name to content hash, of tools and models; name to declared version, of agents in code; the price list's hash."""

    tools: Mapping[str, str]
    models: Mapping[str, str]
    agents: Mapping[str, str]
    prices: str
