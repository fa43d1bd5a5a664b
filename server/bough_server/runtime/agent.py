"""Protocols between the runtime and agents: `Agent`, `Resolver`, and the `Context` that is passed to agent code."""

import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from bough.v1 import action_pb2, agent_pb2, execution_pb2, message_pb2, step_pb2
from bough_server.functions import Function
from bough_server.history.transcript import Transcript
from bough_server.log.session_state import json_text
from bough_server.messages import text_of
from bough_server.models.model import Model, ModelRequest, ToolSpec
from bough_server.tools.tool import Tool

Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Successful end of an agent: its answer, the reason of its end, and the action that it requests of its caller."""

    output: message_pb2.Message
    end_reason: execution_pb2.EndReason.ValueType = execution_pb2.END_REASON_ANSWERED
    action: action_pb2.AgentAction | None = None
    author: str = ""
    """The agent that wrote the output, if this one only relays it; histories have it under that author already."""
    is_in_transcript: bool = False
    """True if the output is already part of the agent's transcript."""
    closed_by: str = ""
    """The closing tool whose call ended the agent; empty if none did."""
    transfer_id: str = ""
    """The call that transfers to another member of a swarm; empty if there is none."""

    @classmethod
    def exit(cls, output: str | message_pb2.Message) -> "Outcome":
        """End every agent above with this answer, up to an agent that was called as a tool."""
        answer = _to_message(output)
        return cls(
            output=answer,
            end_reason=execution_pb2.END_REASON_EXITED,
            action=action_pb2.AgentAction(exit=action_pb2.ExitAction(final_answer=answer)),
        )

    @classmethod
    def break_loop(
        cls, output: str | message_pb2.Message | None = None, *, is_in_transcript: bool = False
    ) -> "Outcome":
        """End the nearest loop above, whose answer is the one before.

        `output` is what the agent says itself, and the loop's answer if there is none before; `is_in_transcript` if
        the agent's model has said it already.
        """
        said = _to_message(output)
        return cls(
            output=said,
            end_reason=execution_pb2.END_REASON_BROKE_LOOP,
            action=action_pb2.AgentAction(break_loop=action_pb2.BreakLoopAction()),
            is_in_transcript=is_in_transcript or not said.parts,
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
        said = _to_message(output)
        told = _to_message(message) if message is not None else None
        return cls(
            output=said,
            end_reason=execution_pb2.END_REASON_TRANSFERRED,
            action=action_pb2.AgentAction(transfer=action_pb2.TransferAction(agent=agent, message=told)),
            is_in_transcript=bool(call_id) or not said.parts,
            transfer_id=call_id,
        )


def _to_message(content: str | message_pb2.Message | None) -> message_pb2.Message:
    """A text as a message; None as an empty one."""
    if isinstance(content, str):
        return message_pb2.Message(parts=[message_pb2.Part(text=content)])
    return message_pb2.Message() if content is None else content


def value_of(output: message_pb2.Message) -> str:
    """Return an answer as JSON text for the session state: its JSON parts, several as a list, else its text."""
    if output.parts and all(part.HasField("data_json") for part in output.parts):
        pieces = [part.data_json for part in output.parts]
        return pieces[0] if len(pieces) == 1 else f"[{','.join(pieces)}]"
    return json_text(text_of(output))


def llm_of(definition: agent_pb2.AgentDefinition) -> agent_pb2.LlmAgent:
    """Return the LlmAgent settings of a definition, empty if it has none. Not a copy: changes affect the definition."""
    return definition.supervisor.llm if definition.HasField("supervisor") else definition.llm


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """A call's result and, for a linked agent, its transcript."""

    result: message_pb2.ToolResult
    child: Transcript | None = None


NO_DEFAULT: Final = object()
"""Marks a question that has no default: it fails if it is not answered in time."""


class Context(Protocol):
    """The effects available to agent code; each is recorded, and answered from the log during a replay.

    Effects of one context are sequential; concurrency goes through `gather`, `map` and `tools`.
    """

    @property
    def run_id(self) -> str:
        """The run's id."""
        ...

    @property
    def session_id(self) -> str:
        """The session's id."""
        ...

    @property
    def tenant_id(self) -> str:
        """The id of the tenant that the run's user is of."""
        ...

    @property
    def user_id(self) -> str:
        """The id of the user who started the run, or forked it; not of one who answers or cancels it."""
        ...

    @property
    def invocation_id(self) -> str:
        """The id of this agent invocation."""
        ...

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """A copy of the definition that the agent runs under."""
        ...

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The session state; writes are recorded with the next effect, or at the agent's end."""
        ...

    @property
    def step_index(self) -> int:
        """The number of this context's last step, from 0; -1 before the first. Each parallel branch counts its own."""
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
        """Call a model and return its answer; run the answer's calls with `tools`. Default of `model`: the agent's own.

        A request that is a function is built only if it is sent, not during a replay; if the request is larger than the
        agent's history policy allows, it is built again from a shorter `history`.

        Raises RunError if the limit of model calls is reached, or the model's retries are used up.
        """
        ...

    async def tools(self, calls: Sequence[message_pb2.ToolCall], *, parallel: bool = True) -> list[CallResult]:
        """Run calls of the last model answer, all or some, and return their results in the order given.

        Calls of linked agents are run too. The step ends when all calls have results, or with the next model call. A
        failed call returns its error as the result, for the model to see. Raises RunError: BAD_ARGUMENTS if the last
        answer has no such call or it was run before, SUB_AGENT_FAILED if a sub-agent's failure aborts this agent.
        """
        ...

    async def dispatch(self, agent: str, input: str | message_pb2.Message, *, key: str = "") -> message_pb2.Message:
        """Run a linked agent and return its answer.

        Raises RunError: NOT_LINKED, LIMIT_EXCEEDED, or SUB_AGENT_FAILED if it failed.
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
        raised, after all have ended. All start at once, however many there are: a `concurrency` limit bounds the model
        calls and tools that run at a time, not the coroutines, so bound their number in the code.
        """
        ...

    async def map(self, fn: "Callable[[Context, Item], Awaitable[T]]", items: Iterable[Item]) -> list[T]:
        """Run `fn(ctx, item)` of every item at once, as `gather` does; results in the order of the items.

        All items start at once, so bound their number in the code; see `gather`.
        """
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
        """Ask the user and return the answer: a JSON value that matches the schema, if there is one.

        The run waits without limit, also across restarts, or for `expires` seconds; then the default is the answer.
        Raises RunError: INPUT_EXPIRED if there is no default, BAD_ARGUMENTS if the default does not match the schema.
        """
        ...

    async def step(self, name: str, work: Callable[[], Awaitable[Any]], *, key: str = "") -> Any:
        """Run other work with side effects and return its value, which must be serializable as JSON.

        It runs once, but may run again after a crash until its value is recorded. Raises RunError TOOL_FAILED if the
        work raises.
        """
        ...

    async def now(self) -> datetime:
        """Return the current time; a replay returns the recorded one."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep; after a crash only for the remaining time. A replay of a finished run does not sleep."""
        ...

    async def read_file(self, blob: message_pb2.Blob) -> bytes:
        """Return the bytes of a file of a message of this session; they are the same in a replay.

        Raises RunError BAD_ARGUMENTS for a file that has an address only.
        """
        ...

    def new_id(self) -> str:
        """Return a new UUID, the same in a replay."""
        ...

    @property
    def random(self) -> random.Random:
        """A generator of random numbers that are the same in a replay; each access returns a new generator."""
        ...


Work: TypeAlias = Callable[[Context], Awaitable[T]] | tuple[Callable[..., Awaitable[T]], *tuple[object, ...]]
"""What `gather` runs at once with others: a coroutine function of a context, alone or with its further arguments."""


class Agent(Protocol):
    """A coroutine over a context, with its definition. It fails by raising, and touches the world through effects."""

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """Name, description, links, limits and policies; an agent in code has no `kind`."""
        ...

    @property
    def revision(self) -> str:
        """The SHA-256 of its definition as hex; for an agent in code, the version that its author declared."""
        ...

    @property
    def kind(self) -> execution_pb2.AgentKind.ValueType:
        """The kind of agent."""
        ...

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools it may call, besides the agents that its definition links."""
        ...

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Answer an input. Raises RunError, or any other exception, to fail."""
        ...


class Models(Protocol):
    """Models by name."""

    def get(self, name: str) -> Model:
        """Return the model with this name: aliases are followed, empty means the default model. Raises KeyError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolver:
    """What names in definitions stand for, as of the start of a run, which keeps its resolver to its end."""

    agents: Mapping[str, Agent]
    tools: Mapping[str, Tool]
    functions: Mapping[str, Function]
    """The operator's pure functions."""
    models: Models

    def model(self, name: str) -> Model | None:
        """Return a model, following aliases, or None; default: the server's default model."""
        try:
            return self.models.get(name)
        except KeyError:
            return None
