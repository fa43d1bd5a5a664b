"""Runs of agents in code: models and tools in lanes, errors that are caught, failures that end their callers."""

from contextlib import suppress
from typing import Final

from bough.v1 import agent_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.messages import text_of
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Agent, Context
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import ABORT, asks, failing, looking, meeting, said, waiting
from tests.support.teams import call, llm


def _agents(world: World) -> list[Agent]:
    async def fail() -> str:
        world.call("step fail")
        raise ValueError("no luck")

    @agent(description="Does several things at once.", agents=["helper", "failing", "strict"], tools=["look"])
    async def lead(ctx: Context, input: message_pb2.Message) -> str:
        async def think(own: Context) -> str:
            heard = await own.model(ModelRequest(messages=own.history(), agent="lead"))
            calls = [part.tool_call for part in heard.message.parts if part.HasField("tool_call")]
            await own.tools(calls[1:])
            await own.sleep(0)
            done = await own.tools(calls[:1])
            return "".join(part.text for part in done[0].result.parts)

        async def suffer(own: Context) -> str:
            with suppress(RunError):
                await own.step("fail", fail)
            with suppress(RunError):
                await own.dispatch("failing", "go", key="mine")
            return (await own.dispatch("helper", "go")).parts[0].text

        parts = await ctx.gather(think, suffer)
        with suppress(RunError):
            await ctx.dispatch("absent", "go")
        try:
            await ctx.dispatch("strict", "go")
        except RunError as error:
            parts.append(error.message)
        return ", ".join([*parts, ctx.new_id()[:0]])

    @agent(
        description="Fails with its children.",
        agents=[agent_pb2.AgentLink(agent="failing", on_failure=ABORT), "waiter"],
    )
    async def strict(ctx: Context, input: message_pb2.Message) -> str:
        async def lose(own: Context) -> str:
            await own.step("meet", meet)
            return (await own.dispatch("failing", "go")).parts[0].text

        async def meet() -> str:
            world.call("step meet")
            await world.until_arrived("wait")
            return "meet"

        with suppress(RunError):
            await ctx.gather(lose, lambda own: own.dispatch("waiter", "go"))
        return "as if nothing had happened"

    return [lead, strict]


CODED: Final = Scenario(
    name="code that does much at once",
    turns={
        "lead": [asks(call("look", what="leaf"), call("look", what="nothing"))],
        "helper": [asks(call("look", what="bark")), said("Red.")],
        "failing": [failing()],
        "waiter": [asks(call("wait")), said("never")],
    },
    team=lambda world: Team(
        definitions=[llm("helper", tools=["look"]), llm("failing"), llm("waiter", tools=["wait"])],
        code_agents=_agents(world),
        tools=[looking(world), waiting(world)],
    ),
)


def _noting(world: World) -> Tool:
    @tool
    async def note(name: str, ctx: ToolContext) -> list[str]:
        """Notes a name."""
        world.call(f"note {name}", ctx.idempotency_key)
        ctx.state["names"] = [*ctx.state.get("names", []), name]
        return [name]

    return note


def _callers(world: World) -> list[Agent]:
    @agent(
        description="Calls tools itself.",
        agents=["helper", "strict"],
        tools=["look", agent_pb2.ToolLink(name="note", max_calls_per_run=4)],
    )
    async def lead(ctx: Context, input: str) -> str:
        ctx.state["names"] = ["before"]
        said = [await ctx.call_tool("look", what="root"), await attempt(ctx, "nothing")]
        heard = await ctx.model(lambda: ModelRequest(messages=ctx.history(), tools=ctx.offers(), agent="lead"))
        await ctx.call_tool("note", name="between")
        await ctx.tools([part.tool_call for part in heard.message.parts if part.HasField("tool_call")])
        said += await ctx.map(work, ["leaf", "nothing", "bark"])
        with suppress(RunError):
            await ctx.call_tool("note", name="one too many")
        with suppress(RunError):
            await ctx.call_tool("wash")
        said.append(str(ctx.state["names"]))
        with suppress(RunError):
            await ctx.dispatch("strict", "go")
        return ", ".join(map(str, said))

    async def attempt(ctx: Context, what: str) -> str:
        try:
            return str(await ctx.call_tool("look", what=what))
        except RunError as error:
            return error.message

    async def work(ctx: Context, what: str) -> str:
        looked = await attempt(ctx, what)
        noted = await ctx.call_tool("note", name=what) if what != "nothing" else "no note"
        return f"{looked} {noted} {text_of(await ctx.dispatch('helper', what))} {ctx.state['names']}"

    return [lead, _strict_caller()]


def _strict_caller() -> Agent:
    @agent(
        description="Fails while it calls.",
        agents=[agent_pb2.AgentLink(agent="failing", on_failure=ABORT)],
        tools=["wait", "meet"],
    )
    async def strict(ctx: Context, input: str) -> str:
        async def lose(ctx: Context) -> None:
            await ctx.call_tool("meet")
            await ctx.dispatch("failing", "go")

        async def wait(ctx: Context) -> None:
            await ctx.call_tool("wait")

        await ctx.gather(lose, wait)
        return "as if nothing had happened"

    return strict


CALLING: Final = Scenario(
    name="code that calls tools",
    turns={
        "lead": [asks(call("look", what="stem"), call("note", name="model"))],
        "helper": [asks(call("look", what="twig")), said("Red.")],
        "failing": [failing()],
    },
    team=lambda world: Team(
        definitions=[llm("helper", tools=["look"]), llm("failing")],
        code_agents=_callers(world),
        tools=[looking(world), _noting(world), waiting(world), meeting(world)],
    ),
)
