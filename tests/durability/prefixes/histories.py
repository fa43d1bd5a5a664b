"""A run of agents that see more than their models take: one leaves out, two summarize, and one of those fails at it."""

from typing import Final

from bough.v1 import agent_pb2
from tests.durability.prefixes.scenario import Scenario, Team
from tests.durability.prefixes.scenario_tools import asks, failing, looking, said
from tests.support.teams import call, llm

_LONG: Final = "word " * 80
_LOST: Final = {"reason": "TRANSPORT", "usage": {"input_tokens": 2}}


def _with(definition: agent_pb2.AgentDefinition, **overflow: object) -> agent_pb2.AgentDefinition:
    definition.history.CopyFrom(agent_pb2.HistoryPolicy(**overflow))  # type: ignore[arg-type]
    return definition


def _summarize(max_tokens: int) -> agent_pb2.Summarization:
    return agent_pb2.Summarization(max_tokens=max_tokens, keep_recent_exchanges=1, model="another")


REMEMBERING: Final = Scenario(
    name="histories that are too long",
    has_past=True,
    turns={
        "lead": [
            asks(*(call(f"call_{name}", message=_LONG) for name in ("short", "wide", "vain")), text="I ask."),
            asks(call("look", what="leaf")),
            said(f"All is red. {_LONG}"),
        ],
        "lead.summary": [said("It was about red.")],
        "short": [said("The leaf is red.")],
        "wide": [asks(call("look", what="bark")), said("The bark is red.")],
        "wide.summary": [{**said("They asked for bark."), "error": {**_LOST, "after_chunks": 1, "times": 1}}],
        "vain": [said("I know nothing.")],
        "vain.summary": [failing()],
    },
    team=lambda world: Team(
        definitions=[
            _with(llm("lead", links=["short", "wide", "vain"], tools=["look"]), summarize=_summarize(700)),
            _with(llm("short"), sliding_window=agent_pb2.SlidingWindow(max_tokens=300, reserve_tokens=50)),
            _with(llm("wide", tools=["look"]), summarize=_summarize(330)),
            _with(llm("vain"), summarize=_summarize(250)),
        ],
        tools=[looking(world)],
    ),
)
