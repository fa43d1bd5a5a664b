"""Runs whose definitions name the operator's code and functions, for the suite that holds of every kind of agent."""

from typing import Final

from bough.v1 import agent_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.functions import Function, Snapshot, condition, input_builder, rewriter
from bough_server.messages import text_of
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Agent, Context
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import asks, looking, said
from tests.support.composite_agents import composite, sequence
from tests.support.teams import call, llm

BLIND: Final = agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_NONE)


def _link(name: str, template: str = "", *, function: str = "", is_blind: bool = True) -> agent_pb2.AgentLink:
    """A link whose input is built."""
    builder = agent_pb2.InputBuilder(function=function) if function else agent_pb2.InputBuilder(template=template)
    return agent_pb2.AgentLink(agent=name, input=builder, history=BLIND if is_blind else None)


def _working(world: World) -> Agent:
    @agent(version="7", tools=["look"])
    async def worker(ctx: Context, input: message_pb2.Message) -> str:
        """Looks something up and asks everybody about it, two at once."""

        async def think() -> str:
            world.call("step think")
            return "think"

        asked = await ctx.model(lambda: ModelRequest(messages=ctx.history(), instruction="", tools=ctx.offers()))
        found = await ctx.tools([part.tool_call for part in asked.message.parts if part.HasField("tool_call")])
        ctx.state["found"] = text_of(message_pb2.Message(parts=found[0].result.parts))
        await ctx.step("think", think)
        first, second = (link.agent for link in ctx.definition.sub_agents)
        answers = await ctx.gather(
            lambda lane: lane.dispatch(first, "One."), lambda lane: lane.dispatch(second, "Two.")
        )
        return f"{ctx.definition.name}: {' '.join(map(text_of, answers))}"

    return worker


def _counting(world: World) -> Agent:
    @agent
    async def counts(ctx: Context, input: message_pb2.Message) -> str:
        """Counts its rounds in the state."""

        async def count() -> str:
            world.call("step count")
            return "count"

        await ctx.step("count", count)
        ctx.state["count"] = ctx.state.get("count", 0) + 1
        ctx.state["review"] = {"done": ctx.state["count"] == 2}
        return f"{text_of(input)} Round {ctx.state['count']}."

    return counts


@condition
def twice(snapshot: Snapshot) -> bool:
    """Whether there were two rounds."""
    return bool(snapshot.iteration == 1 and snapshot.state["count"] == 2)


@input_builder
def in_short(snapshot: Snapshot) -> str:
    """The agent that asks, and how many messages there are."""
    return f"{snapshot.agent} after {len(snapshot.history)}"


@rewriter
def tagged(message: message_pb2.Message) -> list[message_pb2.Message]:
    """Names its author in a tag."""
    said = text_of(message)
    tag = message_pb2.Part(text=f"<{message.author}>{said}</{message.author}>")
    return [message_pb2.Message(parts=[tag])] if said else []


@rewriter
def refusing(message: message_pb2.Message) -> list[message_pb2.Message]:
    """Raises for every input."""
    raise ValueError(message.author)


FUNCTIONS: Final[tuple[Function, ...]] = (twice, in_short, tagged)

FUNCTION: Final = Scenario(
    name="function",
    turns={
        "top": [asks(call("call_lead", message="go")), said("It came back.")],
        "lead": [asks(call("look", what="leaf"))],
        "a": [asks(call("look", what="bark")), said("The bark is red.")],
        "b": [said("I see.")],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            composite(
                "lead",
                [_link("a", "{{message}} {{state.found}}"), _link("b", function="in_short", is_blind=False)],
                function=agent_pb2.FunctionAgent(function="worker"),
            ),
            llm("a", tools=["look"]),
            llm("b", history_rewriter="tagged"),
        ],
        code_agents=[_working(world)],
        tools=[looking(world)],
        functions=FUNCTIONS,
    ),
    root="top",
)


def _writer(name: str) -> agent_pb2.AgentDefinition:
    writer = llm(name)
    writer.llm.instruction = f"You are {name}, after {{{{state.count?}}}} rounds."
    writer.output_key = "draft"
    return writer


def _until(**condition: str) -> agent_pb2.AgentDefinition:
    links = [_link("a", "Improve {{state.draft?}} of {{user}}."), _link("counts", "{{history}}")]
    until = agent_pb2.LoopUntil(**condition)
    return composite("lead", links, loop=agent_pb2.LoopAgent(max_iterations=5, until=until))


UNTIL: Final = Scenario(
    name="loop until a condition",
    turns={"a": [said("A draft.")]},
    team=lambda world: Team(
        definitions=[_until(predicate="twice"), _writer("a")],
        code_agents=[_counting(world)],
        functions=FUNCTIONS,
    ),
)

UNTIL_TRUE: Final = Scenario(
    name="loop until a value is true",
    turns={"a": [said("A draft.")], "b": [said("Done.")]},
    team=lambda world: Team(
        definitions=[
            sequence("s", "lead", _link("b", function="in_short")),
            _until(state_path="review.done"),
            _writer("a"),
            llm("b"),
        ],
        code_agents=[_counting(world)],
        functions=FUNCTIONS,
    ),
    root="s",
)


def _lost(name: str) -> agent_pb2.AgentDefinition:
    lost = llm(name)
    lost.llm.instruction = "You know {{state.nothing}}."
    return lost


NOTHING: Final = Scenario(
    name="names of nothing",
    turns={
        "lead": [
            asks(call("look", what="leaf"), text="I look."),
            asks(call("call_a", message="go"), call("call_b", message="go"), call("call_c", message="go")),
            said("None of them knows."),
        ],
    },
    team=lambda world: Team(
        definitions=[
            llm("lead", links=["a", _link("b", "{{state.nothing}}"), "c"], tools=["look"]),
            _lost("a"),
            llm("b"),
            llm("c", history_rewriter="refusing"),
        ],
        tools=[looking(world)],
        functions=[refusing],
    ),
)

NAMED_KINDS: Final = (FUNCTION, UNTIL, UNTIL_TRUE, NOTHING)
"""Those that name what is not in a definition."""
