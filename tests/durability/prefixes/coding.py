"""Runs of agents in code: models and tools in lanes, errors that are caught, failures that end their callers."""

from contextlib import suppress
from typing import Final

from bough.v1 import agent_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Agent, Context
from tests.durability.prefixes.props import ABORT, asks, failing, looking, said, waiting
from tests.durability.prefixes.scenario import Scenario, Team, World
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
            await ctx.dispatch("nobody", "go")
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
