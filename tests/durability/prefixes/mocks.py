"""Runs of a case of an evaluation: mocks answer tools that must not run twice, that ask, and that the client runs."""

from dataclasses import replace
from typing import Final

from bough.v1 import message_pb2
from bough_server.agents.function import agent
from bough_server.runs.admission import EvaluationRun
from bough_server.runtime.agent import Agent, Context
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.questions import approve_or_refuse, paying, scan
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import asks, looking, said
from tests.support.teams import call, llm
from tests.support.tool_mocks import case_of, failing, mock, returning


def _fetching(world: World) -> list[Tool]:
    @tool(on_recovery="fail")
    async def fetch(what: str, ctx: ToolContext) -> str:
        """Fetches something once."""
        world.call(f"fetch {what}", ctx.idempotency_key)
        return "never"

    @tool(on_recovery="ask")
    async def mend(what: str, ctx: ToolContext) -> str:
        """Mends something that may not be safe to do twice."""
        world.call(f"mend {what}", ctx.idempotency_key)
        return "never"

    return [fetch, mend]


def _gathering() -> list[Agent]:
    @agent(description="Fetches at once.", tools=["fetch"], name="coder")
    async def coder(ctx: Context, input: message_pb2.Message) -> str:
        async def fetched(ctx: Context, what: str) -> str:
            return str(await ctx.call_tool("fetch", what=what))

        return ", ".join(await ctx.map(fetched, ["a", "b", "c"]))

    return [coder]


_CASE: Final[EvaluationRun] = case_of(
    mock("fetch", {"child": True}, agent="clerk"),
    mock("fetch", {"leaf": 1.50}, what="leaf"),
    mock("fetch", "text"),
    failing("mend", "It cannot be mended.", message_pb2.Part(text="Half.")),
    returning("scan", message_pb2.Part(text="a page"), message_pb2.Part(data_json="[1]")),
    mock("pay", None),
)

MOCKED: Final = Scenario(
    name="mocks",
    turns={
        "lead": [
            asks(
                call("fetch", what="leaf"), call("look", what="moss"), call("scan", page=1), call("mend", what="roof")
            ),
            asks(call("pay", amount=7), call("call_clerk", message="go"), call("call_coder", message="go")),
            said("Done."),
        ],
        "clerk": [asks(call("fetch", what="leaf"), call("pay", amount=500)), said("Fetched.")],
    },
    team=lambda world: Team(
        definitions=[
            llm("lead", links=["clerk", "coder"], tools=["fetch", "look", "scan", "mend", "pay"]),
            llm("clerk", tools=["fetch", "pay"]),
        ],
        code_agents=_gathering(),
        tools=[*_fetching(world), looking(world), scan, paying(world)],
    ),
    answer=approve_or_refuse,
    case=_CASE,
)

assert _CASE.mocks is not None
STRICTLY_MOCKED: Final = replace(MOCKED, name="strict mocks", case=case_of(*_CASE.mocks.tools, strict=True))
