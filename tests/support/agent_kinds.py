"""One run for each kind of agent, for the suite that holds of all of them; it judges nothing."""

from typing import Final

from bough.v1 import agent_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Agent, Context, Outcome
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import asks, failing, looking, meeting, said, waiting
from tests.support.composite_agents import loop, parallel, plan_execute, sequence, supervisor, swarm
from tests.support.named_agent_kinds import NAMED_KINDS
from tests.support.teams import call, llm

BLIND: Final = agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_NONE)
"""Who sees only what it is told says the same in every round of a loop."""
CONTINUE: Final = policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE


def _to(name: str) -> agent_pb2.AgentLink:
    return agent_pb2.AgentLink(agent=name, link_mode=agent_pb2.LINK_MODE_TRANSFER)


SEQUENCE: Final = Scenario(
    name="sequence",
    turns={
        "a": [asks(call("look", what="leaf")), said("The leaf is red.")],
        "b": [failing()],
        "c": [asks(call("look", what="bark"), text="Let me see."), said("The bark is red.")],
    },
    team=lambda world: Team(
        definitions=[
            sequence("lead", "a", "inner"),
            sequence("inner", agent_pb2.AgentLink(agent="b", on_failure=CONTINUE), "c"),
            llm("a", tools=["look"]),
            llm("b"),
            llm("c", tools=["look"]),
        ],
        tools=[looking(world)],
    ),
)

EXIT: Final = Scenario(
    name="exit",
    turns={
        "top": [asks(call("call_lead", message="go")), said("It came back.")],
        "a": [said("Not yet.")],
        "b": [asks(call("look", what="leaf"), call("exit", final_answer="Enough."), text="I stop here.")],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            sequence("lead", "a", "b", "c"),
            llm("a"),
            llm("b", tools=["look", "exit"]),
            llm("c"),
        ],
        tools=[looking(world)],
    ),
    root="top",
)

LOOP: Final = Scenario(
    name="loop",
    turns={"a": [said("A draft.")], "b": [said("A critique.")]},
    team=lambda _: Team(
        definitions=[
            loop("lead", *(agent_pb2.AgentLink(agent=name, history=BLIND) for name in "ab"), rounds=3),
            llm("a"),
            llm("b"),
        ]
    ),
)

BREAK: Final = Scenario(
    name="break",
    turns={"a": [said("A draft.")], "b": [asks(call("break_loop"), text="Good.")], "c": [said("Done.")]},
    team=lambda _: Team(
        definitions=[
            sequence("lead", "rounds", "c"),
            loop("rounds", "a", "b", "never", rounds=9),
            llm("a"),
            llm("b", tools=["break_loop"]),
            llm("never"),
            llm("c"),
        ]
    ),
)

PARALLEL: Final = Scenario(
    name="parallel",
    turns={
        "a": [asks(call("look", what="leaf")), said("The leaf is red.")],
        "b": [said("I know nothing.")],
        "c": [asks(call("look", what="bark")), said("The bark is red.")],
        "d": [said("All is red.")],
    },
    team=lambda world: Team(
        definitions=[
            sequence("lead", "lanes", "d"),
            parallel("lanes", "a", "b", "c", max_concurrency=2),
            *(llm(name, tools=["look"]) for name in "ac"),
            *(llm(name) for name in "bd"),
        ],
        tools=[looking(world)],
    ),
)

FAIL_FAST: Final = Scenario(
    name="parallel that fails fast",
    turns={
        "top": [asks(call("call_lead", message="go")), said("They failed.")],
        "a": [asks(call("meet")), failing()],
        "b": [asks(call("wait")), said("never")],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            parallel("lead", "a", "b", fails_fast=True),
            llm("a", tools=["meet"]),
            llm("b", tools=["wait"]),
        ],
        tools=[meeting(world), waiting(world)],
    ),
    root="top",
)

TRANSFER: Final = Scenario(
    name="transfer",
    turns={
        "top": [asks(call("call_lead", message="go")), said("It came back.")],
        "lead": [asks(call("look", what="leaf"), call("transfer_to_agent", agent_name="a"), text="Over to a.")],
        "a": [asks(call("look", what="bark")), asks(call("transfer_to_agent", agent_name="b"))],
        "b": [said("All is red.")],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            llm("lead", links=[_to("a")], tools=["look"]),
            llm("a", links=[_to("b")], tools=["look"]),
            llm("b"),
        ],
        tools=[looking(world)],
    ),
    root="top",
)

SUPERVISOR: Final = Scenario(
    name="supervisor",
    turns={
        "top": [asks(call("call_lead", message="go")), said("It came back.")],
        "lead": [
            asks(call("look", what="leaf"), call("transfer_to_agent", agent_name="a"), text="First a."),
            asks(call("transfer_to_agent", agent_name="b")),
            asks(call("transfer_to_agent", agent_name="c")),
        ],
        "a": [asks(call("look", what="bark")), said("The bark is red.")],
        "b": [failing()],
        "c": [asks(call("exit", final_answer="All is red."))],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            supervisor("lead", "a", "b", "c", tools=["look"]),
            llm("a", tools=["look"]),
            llm("b"),
            llm("c", tools=["exit"]),
        ],
        tools=[looking(world)],
    ),
    root="top",
)


def _handing_on(world: World) -> Agent:
    @agent
    async def c(ctx: Context, input: message_pb2.Message) -> Outcome:
        """Hands over to who knows."""

        async def think() -> str:
            world.call("step think")
            return "think"

        await ctx.step("think", think)
        return Outcome.transfer("d", "What is red?")

    return c


SWARM: Final = Scenario(
    name="swarm",
    turns={
        "top": [asks(call("call_lead", message="go")), said("It came back.")],
        "a": [asks(call("look", what="leaf"), call("transfer_to_agent", agent_name="b"), text="First b.")],
        "b": [asks(call("look", what="bark")), asks(call("transfer_to_agent", agent_name="c"), text="Then c.")],
        "d": [asks(call("exit", final_answer="All is red."))],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            swarm("lead", "b", "a", "c", "d", entry="a"),
            *(llm(name, tools=["look"]) for name in "ab"),
            llm("d", tools=["exit"]),
        ],
        code_agents=[_handing_on(world)],
        tools=[looking(world)],
    ),
    root="top",
)

PLAN_EXECUTE: Final = Scenario(
    name="plan_execute",
    turns={
        "top": [asks(call("call_lead", message="go")), said("It came back.")],
        "planner": [said("Let me see."), asks(call("plan", steps=["s1", "s2"]))],
        "executor": [{"when": "no other: s1", **asks(call("look", what="bark"))}, said("It is red.")],
        "replanner": [
            {"when": "2. s2", **asks(call("respond", answer="All is red."), text="So.")},
            {"when": "Left of the plan:\n1. s2", **asks(call("plan", steps=["s2"]))},
        ],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            plan_execute(
                "lead",
                "planner",
                *(agent_pb2.AgentLink(agent=name, history=BLIND) for name in ("executor", "replanner")),
            ),
            *(llm(name) for name in ("planner", "replanner")),
            llm("executor", tools=["look"]),
        ],
        tools=[looking(world)],
    ),
    root="top",
)

KINDS: Final = (
    SEQUENCE,
    EXIT,
    LOOP,
    BREAK,
    PARALLEL,
    FAIL_FAST,
    TRANSFER,
    SUPERVISOR,
    SWARM,
    PLAN_EXECUTE,
    *NAMED_KINDS,
)
