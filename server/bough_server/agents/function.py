"""Agents that are Python coroutines over a context, under their own name or a definition's."""

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, cast, overload

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2
from bough_server import ids
from bough_server.agents.definition import revision
from bough_server.agents.llm import answer_mistakes, json_value
from bough_server.errors import RunError
from bough_server.messages import text_of
from bough_server.runtime.agent import Agent, Context, Outcome

Answer: TypeAlias = Outcome | message_pb2.Message | str
MessageCode: TypeAlias = Callable[[Context, message_pb2.Message], Awaitable[Answer]]
TextCode: TypeAlias = Callable[[Context, str], Awaitable[Answer]]
Code: TypeAlias = MessageCode | TextCode
"""What `@agent` takes: its input is a text if its parameter is annotated `str`, else a Message."""


class FunctionAgent:
    """A named coroutine, whose answer is an Outcome, a Message or a text."""

    kind = execution_pb2.AGENT_KIND_FUNCTION

    def __init__(
        self, code: Code, definition: agent_pb2.AgentDefinition, tool_links: Sequence[agent_pb2.ToolLink], version: str
    ) -> None:
        self._code = _accept_message(code)
        self.definition = definition
        self.tool_links = tool_links
        self.revision = version

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Run the code. Raises its exceptions, and RunError INVALID_OUTPUT for an answer of another type."""
        answer = await self._code(ctx, input)
        if isinstance(answer, str):
            answer = message_pb2.Message(parts=[message_pb2.Part(text=answer)])
        if isinstance(answer, message_pb2.Message):
            answer = Outcome(output=answer)
        if isinstance(answer, Outcome):
            _check_output(_describe_agent(self.definition.name, ctx), answer.output)
            return answer
        raise RunError(
            f"The agent {_describe_agent(self.definition.name, ctx)} returned {type(answer).__name__}; "
            "return a str, a Message or an Outcome.",
            reason=error_pb2.ERROR_REASON_INVALID_OUTPUT,
        )


class DefinedFunctionAgent:
    """An agent in code that runs with a definition's name, links, limits and history; the tools are those of the code.

    Whether the code exists is checked when a run starts.
    """

    kind = execution_pb2.AGENT_KIND_FUNCTION

    def __init__(self, definition: agent_pb2.AgentDefinition, find: Callable[[str], Agent]) -> None:
        self.definition = definition
        self.revision = revision(definition)
        self._find = find

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools of the code. Raises KeyError if the code does not exist."""
        return self._find(self.definition.function.function).tool_links

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Run the code, with the definition in its context.

        Raises its exceptions, and RunError INVALID_OUTPUT for an answer that does not match the definition's schema.
        """
        outcome = await self._find(self.definition.function.function).run(ctx, input)
        schema = self.definition.output_schema_json
        # With an action the output is that of an exit, a break or a transfer, which need not match any schema.
        if not schema or outcome.action is not None:
            return outcome
        return replace(outcome, output=_check_schema(self.definition.name, outcome.output, schema))


def _accept_message(code: Code) -> MessageCode:
    """Wrap code that takes str so that it accepts a Message."""
    annotation = [*inspect.signature(code).parameters.values()][1].annotation
    if annotation not in (str, "str"):  # a text: postponed evaluation
        return cast(MessageCode, code)
    of_text = cast(TextCode, code)

    async def run(ctx: Context, input: message_pb2.Message) -> Answer:
        return await of_text(ctx, _require_text(ctx, input))

    return run


def _require_text(ctx: Context, input: message_pb2.Message) -> str:
    others = {part.WhichOneof("content") or "nothing" for part in input.parts} - {"text"}
    if others:
        raise RunError(
            f"The agent {ctx.definition.name!r} takes text alone, and its input has a part of {min(others)}. Annotate "
            "its input as Message to take any.",
            reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
        )
    return text_of(input)


def _describe_agent(code: str, ctx: Context) -> str:
    """Return the running agent's name and, if a definition runs its code under another name, that of the code."""
    name = ctx.definition.name
    return repr(name) if name == code else f"{name!r}, whose code is {code!r},"


def _check_output(name: str, output: message_pb2.Message) -> None:
    """Raise RunError INVALID_OUTPUT for tool calls and results, which only models are shown, and for malformed JSON."""
    problem = ""
    for part in output.parts:
        if part.WhichOneof("content") in ("tool_call", "tool_result"):
            problem = "with a call or a result in it; give text, JSON or files"
        elif part.HasField("data_json"):
            try:
                json_value(part.data_json)
            except (ValueError, RecursionError) as error:
                problem = f"with a `data_json` which is not JSON ({error})"
    if problem:
        raise RunError(f"The agent {name} answered {problem}.", reason=error_pb2.ERROR_REASON_INVALID_OUTPUT)


def _check_schema(name: str, output: message_pb2.Message, schema_json: str) -> message_pb2.Message:
    """Return an answer that matches the schema as a single JSON part. Raises RunError INVALID_OUTPUT."""
    text = text_of(output)
    if mistakes := answer_mistakes(text, schema_json):
        raise RunError(
            f"The answer of the agent {name!r} does not fit its output schema: {mistakes}.",
            reason=error_pb2.ERROR_REASON_INVALID_OUTPUT,
        )
    return message_pb2.Message(parts=[message_pb2.Part(data_json=text)])


@overload
def agent(code: Code, /) -> FunctionAgent: ...


@overload
def agent(
    *,
    name: str = "",
    description: str = "",
    version: str = "1",
    agents: Sequence[str | agent_pb2.AgentLink] = (),
    tools: Sequence[str | agent_pb2.ToolLink] = (),
) -> Callable[[Code], FunctionAgent]: ...


def agent(
    code: Code | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    version: str = "1",
    agents: Sequence[str | agent_pb2.AgentLink] = (),
    tools: Sequence[str | agent_pb2.ToolLink] = (),
) -> FunctionAgent | Callable[[Code], FunctionAgent]:
    """Make a coroutine `async def name(ctx, input)` an agent that runs, definitions and models can name.

    Its input is a Message, or a text if the parameter is annotated `str`. The description is its docstring's first
    paragraph if none is given. `agents` and `tools` are what it may call. `version` changes when its effects do.

    Raises TypeError.
    """

    def make(code: Code) -> FunctionAgent:
        summary = description or (inspect.getdoc(code) or "").split("\n\n")[0].replace("\n", " ")
        own_name = name or code.__name__
        is_coroutine = inspect.iscoroutinefunction(code)
        if not is_coroutine or len(inspect.signature(code).parameters) != 2:
            raise TypeError(f"The agent {own_name!r} must be `async def {own_name}(ctx, input)`.")
        if not re.fullmatch(ids.AGENT_NAME, own_name):
            raise TypeError(
                f"{own_name!r} is not a valid agent name: use a letter followed by up to 58 letters, digits, '_' or "
                "'-'."
            )
        if not summary:
            raise TypeError(f"The agent {own_name!r} needs a description or a docstring: models choose by it.")
        definition = agent_pb2.AgentDefinition(name=own_name, description=summary)
        definition.sub_agents.extend(
            agent_pb2.AgentLink(agent=link) if isinstance(link, str) else link for link in agents
        )
        links = [agent_pb2.ToolLink(name=link) if isinstance(link, str) else link for link in tools]
        return FunctionAgent(code, definition, links, version)

    return make if code is None else make(code)
