"""A run of a conversation that was handed over in an earlier run: it starts with the member that spoke last."""

from typing import Final

from bough.v1 import agent_pb2
from tests.durability.prefixes.scenario import Scenario, Team
from tests.durability.prefixes.scenario_tools import asks, looking, said
from tests.support.composite_agents import swarm
from tests.support.teams import call, llm


def _staying() -> agent_pb2.AgentDefinition:
    definition = swarm("desk", "triage", "refunds")
    definition.swarm.next_run_starts_with = agent_pb2.NEXT_RUN_START_LAST_SPEAKER
    return definition


STAYING: Final = Scenario(
    name="a conversation that stays",
    root="desk",
    has_past=True,
    turns={
        "triage": [asks(call("transfer_to_agent", agent_name="refunds"))],
        "refunds": [asks(call("look", what="receipt"), call("call_clerk", message="Pay.")), said("Paid back.")],
        "clerk": [asks(call("look", what="till")), said("Paid.")],
    },
    team=lambda world: Team(
        definitions=[
            _staying(),
            llm("triage"),
            llm("refunds", links=["clerk"], tools=["look"]),
            llm("clerk", tools=["look"]),
        ],
        tools=[looking(world)],
    ),
)
