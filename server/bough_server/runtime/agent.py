"""Agents as the runtime sees them: the `Agent` and `Resolver` protocols, and the `Context` that their code is given."""

import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from bough.v1 import action_pb2, agent_pb2, execution_pb2, message_pb2, step_pb2
from bough_server.functions import Function
from bough_server.history.transcript import Transcript
from bough_server.models.model import Model, ModelRequest, ToolSpec
from bough_server.session_state import json_text
from bough_server.tools.tool import Tool

Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an agent ended well: its answer, why it ended, and what it asks of whoever waits for it."""

    output: message_pb2.Message
    end_reason: execution_pb2.EndReason.ValueType = execution_pb2.END_REASON_ANSWERED
    action: action_pb2.AgentAction | None = None
    author: str = ""
    """Who wrote the output, where others did and the agent hands it on; it stands in histories as theirs already."""
    is_said: bool = False
    """Whether the output is a part of what the agent has said already."""
    closed_by: str = ""
    """The tool whose call ended the agent, where one did that is there for it."""
    transfer_id: str = ""
    """The call that hands over to another member of a swarm; empty where none does."""

    @classmethod
    def exit(cls, output: str | message_pb2.Message) -> "Outcome":
        """End every agent above with this answer, up to an agent that was called as a tool."""
        answer = _message(output)
        return cls(
            output=answer,
            end_reason=execution_pb2.END_REASON_EXITED,
            action=action_pb2.AgentAction(exit=action_pb2.ExitAction(final_answer=answer)),
        )

    @classmethod
    def break_loop(cls, output: str | message_pb2.Message | None = None, *, is_said: bool = False) -> "Outcome":
        """End the nearest loop above, whose answer is the one before.

        `output` is what the agent says itself, and the loop's answer if there is none before; `is_said` if the agent's
        model has said it already.
        """
        said = _message(output)
        return cls(
            output=said,
            end_reason=execution_pb2.END_REASON_BROKE_LOOP,
            action=action_pb2.AgentAction(break_loop=action_pb2.BreakLoopAction()),
            is_said=is_said or not said.parts,
        )

    @classmethod
    def transfer(
        cls,
        agent: str,
        message: str | message_pb2.Message | None = None,
        *,
        output: str | message_pb2.Message | None = None,
        call_id: str = "",
    ) -> "Outcome":
        """Transfer to another member of the agent's swarm, with a message to it or without one.

        `output` is what the agent says itself. `call_id` is the model's call that transfers; its output is said
        already.
        """
        said = _message(output)
        told = _message(message) if message is not None else None
        return cls(
            output=said,
            end_reason=execution_pb2.END_REASON_TRANSFERRED,
            action=action_pb2.AgentAction(transfer=action_pb2.TransferAction(agent=agent, message=told)),
            is_said=bool(call_id) or not said.parts,
            transfer_id=call_id,
        )


def _message(said: str | message_pb2.Message | None) -> message_pb2.Message:
    """A text as a message; None as an empty one."""
    if isinstance(said, str):
        return message_pb2.Message(parts=[message_pb2.Part(text=said)])
    return message_pb2.Message() if said is None else said


def value_of(output: message_pb2.Message) -> str:
    """An answer as a value of the session's state: the JSON that it is, several pieces as a list, else its text."""
    if output.parts and all(part.HasField("data_json") for part in output.parts):
        pieces = [part.data_json for part in output.parts]
        return pieces[0] if len(pieces) == 1 else f"[{','.join(pieces)}]"
    return json_text("".join(part.text or part.data_json for part in output.parts))


def llm_of(definition: agent_pb2.AgentDefinition) -> agent_pb2.LlmAgent:
    """What an agent's model is and is told; empty where it asks none. Of a definition's own, so changes are its."""
    return definition.supervisor.llm if definition.HasField("supervisor") else definition.llm


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A call's result and, for a linked agent, what it saw and said."""

    result: message_pb2.ToolResult
    child: Transcript | None = None


NO_DEFAULT: Final = object()
"""The default of a question that fails if it is not answered in time."""


class Context(Protocol):
    """What the code of an agent can do: its effects, each recorded, and answered from the log when it is replayed.

    Effects of one context are sequential; concurrency goes through `gather`, `map` and `tools`.
    """

    @property
    def run_id(self) -> str:
        """The run."""
        ...

    @property
    def session_id(self) -> str:
        """The session."""
        ...

    @property
    def user_id(self) -> str:
        """The session's user."""
        ...

    @property
    def invocation_id(self) -> str:
        """This execution of this agent."""
        ...

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """A copy of the definition that the agent runs under."""
        ...

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The session's values; what is written is recorded with the next effect, or the agent's end."""
        ...

    @property
    def step_index(self) -> int:
        """The number of the last step; -1 before the first."""
        ...

    def history(self) -> list[message_pb2.Message]:
        """Return what this agent sees of the session and the run so far, its own input and steps included."""
        ...

    def offers(self) -> list[ToolSpec]:
        """Return the tools and linked agents that may still be called."""
        ...

    async def model(
        self, request: ModelRequest | Callable[[], ModelRequest], *, model: str = ""
    ) -> step_pb2.LlmResponse:
        """Ask a model; the answer's calls, if any, are for `tools`. An empty `model` is the agent's own.

        A request that is a function is built only if it is sent, and not while a log is replayed; if what it makes of
        `history` is more than the agent's history policy allows, it is built again of less.

        Raises RunError: the limit of model calls is reached, or the model's retries are used up.
        """
        ...

    async def tools(self, calls: Sequence[message_pb2.ToolCall], *, parallel: bool = True) -> list[Answered]:
        """Run calls of the last model answer, all or some, linked agents among them; results in the order given.

        The step ends when all have results, or with the next model call. Nothing that goes wrong in a call raises: the
        model is to see it. Raises RunError: BAD_ARGUMENTS if the last answer has no such call or it was run before,
        SUB_AGENT_FAILED if a sub-agent's failure aborts this agent.
        """
        ...

    async def dispatch(self, agent: str, input: str | message_pb2.Message, *, key: str = "") -> message_pb2.Message:
        """Run a linked agent and return its answer.

        Raises RunError: it is not linked (NOT_LINKED), a limit is reached, it failed (SUB_AGENT_FAILED).
        """
        ...

    async def call_tool(self, name: str, /, **arguments: object) -> Any:
        """Call one of the agent's own tools; return its JSON value, else its text.

        The call is checked, approved, counted and limited as a model's call is, but belongs to no step, and no history
        shows it. Linked agents are run by `dispatch`.

        Raises RunError with the tool's reason, such as TOOL_FAILED, TOOL_TIMEOUT or NOT_APPROVED; UNKNOWN_TOOL,
        BAD_ARGUMENTS or LIMIT_EXCEEDED if the call is refused.
        """
        ...

    async def gather(self, *work: "Work[T]") -> list[T]:
        """Run `fn(ctx, *args)` of each `(fn, *args)` at once, and return the results in the order given.

        Each has a context for itself. A bare callable is called with its context alone. Raises what the first in order
        raised, after all have ended.
        """
        ...

    async def map(self, fn: "Callable[[Context, Item], Awaitable[T]]", items: Iterable[Item]) -> list[T]:
        """Run `fn(ctx, item)` of every item at once, as `gather` does; results in the order of the items."""
        ...

    async def ask(
        self,
        prompt: str,
        *,
        schema: Mapping[str, Any] | None = None,
        expires: float | None = None,
        default: object = NO_DEFAULT,
        key: str = "",
    ) -> Any:
        """Ask the user, and return the answer: a JSON value that fits the schema, if one is given.

        The run waits for as long as it takes, over restarts, or for `expires` seconds; then the default is the answer.
        Raises RunError: INPUT_EXPIRED without a default, BAD_ARGUMENTS if the default does not fit.
        """
        ...

    async def step(self, name: str, work: Callable[[], Awaitable[Any]], *, key: str = "") -> Any:
        """Do any other work on the world once, and return its value: something that JSON can hold.

        Until its value is recorded it may run again. Raises RunError TOOL_FAILED if the work raises.
        """
        ...

    async def now(self) -> datetime:
        """Return the time, the same on a replay."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; after a crash only for what is left of it. A replay of a finished run does not wait."""
        ...

    def new_id(self) -> str:
        """Return a new UUID, the same on a replay."""
        ...

    @property
    def random(self) -> random.Random:
        """Random numbers that are the same on a replay; each reading begins a new row of them."""
        ...


Work: TypeAlias = Callable[[Context], Awaitable[T]] | tuple[Callable[..., Awaitable[T]], *tuple[object, ...]]
"""What `gather` runs at once with others: a coroutine function of a context, alone or with its further arguments."""


class Agent(Protocol):
    """A coroutine over a context, and what is known of it. It fails by raising and touches the world by effects."""

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """Name, description, links, limits and policies; an agent in code has no `kind`."""
        ...

    @property
    def revision(self) -> str:
        """The SHA-256 hex of its definition's content; of an agent in code the version that its author declared."""
        ...

    @property
    def kind(self) -> execution_pb2.AgentKind.ValueType:
        """What runs it."""
        ...

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools it may call, besides the agents that its definition links."""
        ...

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
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

    def versions(self, root: str) -> "VersionHashes":
        """Hashes of what those definitions name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionHashes:
    """Name to content hash, of tools and models; name to declared version, of agents in code; the price list's hash."""

    tools: Mapping[str, str]
    models: Mapping[str, str]
    agents: Mapping[str, str]
    prices: str
