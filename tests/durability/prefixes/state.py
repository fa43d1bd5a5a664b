"""Runs that keep values: of tools, of models, of code in lanes, of agents whose time is up or who fail."""

import json
from contextlib import suppress
from typing import Final

from bough.v1 import agent_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.runtime.agent import Agent, Context
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import asks, failing, looking, said
from tests.support.teams import call, llm


def _adding(world: World) -> Tool:
    @tool
    async def add(amount: int, ctx: ToolContext) -> str:
        """Adds to the number that is kept, and fails with 13."""
        world.call(f"add {amount}", ctx.idempotency_key)
        ctx.state["n"] = ctx.state.get("n", 0) + amount
        if amount == 13:
            raise ValueError("bad luck")
        return f"{ctx.state['n']}"

    return add


def _agents(world: World) -> list[Agent]:
    async def count(name: str) -> str:
        world.call(f"step {name}")
        return name

    @agent(description="Keeps much at once.", agents=["adder", "failing", "noter"], name="lead")
    async def lead(ctx: Context, input: message_pb2.Message) -> str:
        ctx.state["n"] = ctx.state.get("n", 0) + 1

        async def lane(own: Context, name: str, child: str) -> None:
            own.state["last"] = name
            await own.step(name, lambda: count(name))
            with suppress(RunError):
                await own.dispatch(child, "go")
            own.state["seen"] = [*own.state.get("seen", []), name, own.state["n"]]

        await ctx.gather(
            lambda own: lane(own, "left", "adder"),
            lambda own: lane(own, "middle", "failing"),
            lambda own: lane(own, "right", "noter"),
        )
        del ctx.state["last"]
        await ctx.now()
        return json.dumps(dict(ctx.state))

    @agent(description="Notes in lanes of its own.")
    async def noter(ctx: Context, input: message_pb2.Message) -> str:
        async def note(own: Context, number: int) -> None:
            own.state["note"] = number
            await own.sleep(0)
            own.state[f"note{number}"] = own.state["note"]

        await ctx.gather(lambda own: note(own, 1), lambda own: note(own, 2))
        return str(ctx.state["note"])

    return [lead, noter]


def _definitions() -> list[agent_pb2.AgentDefinition]:
    adder = llm("adder", tools=["add", "set_state", "get_state"])
    adder.output_key = "answer"
    return [adder, llm("failing", tools=["add", "look"])]


KEEPING: Final = Scenario(
    name="values that are kept",
    has_past=True,
    turns={
        "adder": [
            asks(call("add", amount=2), call("set_state", key="color", value="red"), call("add", amount=13)),
            asks(call("add", amount=4), call("add", amount=8), call("get_state", key="color")),
            said("Added."),
        ],
        "failing": [asks(call("add", amount=16), call("look", what="leaf")), failing()],
    },
    team=lambda world: Team(
        definitions=_definitions(), tools=[_adding(world), looking(world)], code_agents=_agents(world)
    ),
)
