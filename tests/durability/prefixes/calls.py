"""Runs of agents that call tools and each other, and of which nothing is ended from outside."""

from typing import Final

from bough.v1 import agent_pb2, policy_pb2
from tests.durability.prefixes.scenario import Scenario, Team
from tests.durability.prefixes.scenario_tools import asks, failing, looking, said
from tests.support.teams import call, llm

PLAIN: Final = Scenario(
    name="plain",
    turns={"lead": [{**said("Hello to you."), "reasoning": "Hm hm."}]},
    team=lambda _: Team(definitions=[llm("lead")]),
    policy=policy_pb2.RunPolicy(deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())),
    has_past=True,
)

TOOLS: Final = Scenario(
    name="tools in parallel",
    has_past=True,
    turns={
        "lead": [
            asks(*(call("look", what=what) for what in ("leaf", "nothing", "bark")), call("unknown"), text="I look."),
            asks(call("look", what="root"), {"name": "look", "arguments_json": "{"}),
            said("All is red."),
        ]
    },
    team=lambda world: Team(definitions=[llm("lead", tools=["look"])], tools=[looking(world)]),
)

SUB_AGENTS: Final = Scenario(
    name="sub-agents in parallel, one failing",
    turns={
        "lead": [
            asks(*(call(f"call_{name}", message="go") for name in ("good", "bad", "plain")), text="Go."),
            said("Two of three."),
        ],
        "good": [asks(call("look", what="leaf")), said("The leaf is red.")],
        "bad": [asks(call("look", what="bark")), failing()],
        "plain": [said("I know it.")],
    },
    team=lambda world: Team(
        definitions=[
            llm("lead", links=["good", "bad", "plain"]),
            llm("good", tools=["look"]),
            llm("bad", tools=["look"]),
            llm("plain"),
        ],
        tools=[looking(world)],
    ),
)

DEEP: Final = Scenario(
    name="depth 3",
    turns={
        "lead": [asks(call("call_a", message="down")), said("Back.")],
        "a": [asks(call("call_b", message="down")), said("Back from b.")],
        "b": [asks(call("call_c", message="down")), said("Back from c.")],
        "c": [asks(call("look", what="root")), said("It is red.")],
    },
    team=lambda world: Team(
        definitions=[llm("lead", links=["a"]), llm("a", links=["b"]), llm("b", links=["c"]), llm("c", tools=["look"])],
        tools=[looking(world)],
    ),
)


RETRYING: Final = Scenario(
    name="a model retry",
    turns={
        "lead": [
            {**asks(call("look", what="leaf"), text="One two three."), **failing(reason="TRANSPORT", times=2)},
            said("Red."),
        ]
    },
    team=lambda world: Team(definitions=[llm("lead", tools=["look"])], tools=[looking(world)]),
)

BOUNDED: Final = Scenario(
    name="limits, empty answers and a final answer",
    turns={
        "lead": [
            asks(*(call("look", what=what) for what in ("leaf", "bark", "root")), call("call_child", message="go")),
            asks(call("call_child", message="once more"), call("stranger"), call("call_absent", message="go")),
            asks(call("final_answer", answer=""), call("look", what="moss")),
            said(""),
            asks(call("final_answer", answer="It is red."), call("call_child", message="too late")),
        ],
        "child": [asks(call("look", what="moss"), call("look", what="lichen")), said("never")],
    },
    team=lambda world: Team(
        definitions=[
            llm(
                "lead",
                links=[agent_pb2.AgentLink(agent="child", limits=policy_pb2.Limits(model_calls=1))],
                tools=[agent_pb2.ToolLink(name="look", max_calls_per_run=2)],
                final_answer_tool=True,
                parallel_tools=False,
            ),
            llm("child", tools=["look"]),
        ],
        tools=[looking(world)],
    ),
    policy=policy_pb2.RunPolicy(limits=policy_pb2.Limits(tool_calls=9, model_calls=9)),
)
