"""Runs of which a part, or all, is ended from outside: by a sibling's failure, a caller, a child's own time."""

from typing import Final

from google.protobuf.duration_pb2 import Duration

from bough.v1 import agent_pb2, policy_pb2
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import ABORT, asks, failing, looking, meeting, said, waiting
from tests.support.teams import call, llm

ABORTING: Final = Scenario(
    name="continue and abort",
    turns={
        "lead": [asks(call("call_mid", message="go"), call("look", what="leaf")), said("Without mid.")],
        "mid": [asks(call("call_loser", message="go"), call("call_waiter", message="go")), said("never")],
        "loser": [asks(call("meet")), failing()],
        "waiter": [asks(call("wait"), call("look", what="bark")), said("never")],
    },
    team=lambda world: Team(
        definitions=[
            llm("lead", links=["mid"], tools=["look"]),
            llm("mid", links=[agent_pb2.AgentLink(agent="loser", on_failure=ABORT), "waiter"]),
            llm("loser", tools=["meet"]),
            llm("waiter", tools=["wait", "look"]),
        ],
        tools=[looking(world), meeting(world), waiting(world)],
    ),
)


def _last(world: World) -> Tool:
    @tool
    async def last(ctx: ToolContext) -> str:
        """Waits after the other one."""
        world.call("last", ctx.idempotency_key)
        if world.is_patient:
            await world.until_arrived("wait")
            world.arrive("last")
            await world.for_ever()
        return "it was not long"

    return last


CANCELLED: Final = Scenario(
    name="a cancel",
    turns={
        "lead": [
            asks(call("call_quick", message="go"), call("call_slow", message="go"), call("wait"), text="Go."),
            said("All are back."),
        ],
        "quick": [asks(call("look", what="leaf")), said("Red.")],
        "slow": [asks(call("last")), said("It was not long.")],
    },
    team=lambda world: Team(
        definitions=[
            llm("lead", links=["quick", "slow"], tools=["wait"]),
            llm("quick", tools=["look"]),
            llm("slow", tools=["last"]),
        ],
        tools=[looking(world), waiting(world), _last(world)],
    ),
    cancelled_at="last",
)


def _lingering(world: World) -> Tool:
    @tool
    async def linger(ctx: ToolContext) -> str:
        """Takes longer than there is."""
        world.call("linger", ctx.idempotency_key)
        world.clock.advance(100)
        await world.for_ever()
        return "never"

    return linger


OVERTIME: Final = Scenario(
    name="a child whose own time is up",
    turns={
        "lead": [asks(call("call_slow", message="go"), call("look", what="leaf")), said("Without the slow one.")],
        "slow": [asks(call("look", what="bark")), asks(call("call_below", message="go"), text="Now."), said("never")],
        "below": [asks(call("linger")), said("never")],
    },
    team=lambda world: Team(
        definitions=[
            llm(
                "lead",
                tools=["look"],
                links=[agent_pb2.AgentLink(agent="slow", limits=policy_pb2.Limits(wall_duration=Duration(seconds=60)))],
            ),
            llm("slow", links=["below"], tools=["look"]),
            llm("below", tools=["linger"]),
        ],
        tools=[looking(world), _lingering(world)],
    ),
)
