"""Runs that ask people and clients: approvals, tools of the client's, questions of code."""

import json
from dataclasses import replace
from typing import Final

from bough.v1 import input_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.runtime.agent import Agent, Context
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import asks, looking, said
from tests.support.teams import call, llm


def paying(world: World) -> Tool:
    """A tool that has to be approved."""

    @tool(approval=True)
    async def pay(amount: int, ctx: ToolContext) -> str:
        """Pays."""
        world.call(f"pay {amount}", ctx.idempotency_key)
        return f"paid {amount}"

    return pay


def approve_or_refuse(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    """Approve small amounts, one of them edited."""
    amount = json.loads(request.call.arguments_json)["amount"]
    approval = input_pb2.ApprovalDecision(approved=amount < 100, note="" if amount < 100 else "too much")
    if amount == 7:
        approval.arguments_json = '{"amount": 8}'
    return input_pb2.InputAnswer(approval=approval)


APPROVING: Final = Scenario(
    name="an approval",
    turns={
        "lead": [
            asks(call("pay", amount=7), call("look", what="leaf"), call("call_clerk", message="pay"), text="I pay."),
            said("Paid."),
        ],
        "clerk": [asks(call("pay", amount=5), call("pay", amount=500)), said("One was refused.")],
    },
    team=lambda world: Team(
        definitions=[llm("lead", links=["clerk"], tools=["pay", "look"]), llm("clerk", tools=["pay"])],
        tools=[looking(world), paying(world)],
    ),
    answer=approve_or_refuse,
)


@tool(execution="client")
def scan(page: int) -> str:
    """Scans a page at the client's."""
    raise AssertionError("the client runs it")


def _scanned(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    page = json.loads(request.call.arguments_json)["page"]
    outcome = message_pb2.ToolOutcome(parts=[message_pb2.Part(text=f"page {page} is red")])
    return input_pb2.InputAnswer(tool_outcome=outcome)


CLIENT_SIDE: Final = Scenario(
    name="a client-side tool",
    turns={
        "lead": [asks(call("scan", page=1), call("look", what="leaf"), call("scan", page=2)), said("Scanned.")],
    },
    team=lambda world: Team(definitions=[llm("lead", tools=["scan", "look"])], tools=[looking(world), scan]),
    answer=_scanned,
)


def _asking(world: World) -> list[Agent]:
    async def count(name: str) -> str:
        world.call(f"step {name}")
        return name

    @agent(description="Asks many things at once.", agents=["asker"], name="lead")
    async def lead(ctx: Context, input: message_pb2.Message) -> str:
        first = await ctx.step("first", lambda: count("first"))
        await ctx.sleep(0)

        async def lane(own: Context, color: str) -> str:
            mine = await own.step(color, lambda: count(color))
            reply = await own.ask(f"Is it {color}?", schema={"type": "boolean"})
            await own.sleep(0)
            return f"{mine}: {reply}"

        async def ask_below(own: Context) -> str:
            return (await own.dispatch("asker", "go")).parts[0].text

        replies = await ctx.gather(lambda own: lane(own, "red"), lambda own: lane(own, "green"), ask_below)
        last = await ctx.step("last", lambda: count("last"))
        return f"{first}, {', '.join(replies)}, {last}"

    @agent(description="Asks one thing.", name="asker")
    async def asker(ctx: Context, input: message_pb2.Message) -> str:
        before = await ctx.now()
        name = await ctx.ask("Who are you?")
        after = await ctx.now()
        return f"{name} {after >= before}"

    return [lead, asker]


def _reply(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    replies = {"Is it red?": True, "Is it green?": False, "Who are you?": "Anne"}
    return input_pb2.InputAnswer(value_json=json.dumps(replies[request.prompt]))


ASKING: Final = Scenario(
    name="questions of code in lanes", team=lambda world: Team(code_agents=_asking(world)), answer=_reply
)


def _precious(world: World) -> Tool:
    @tool(on_recovery="ask")
    async def mend(what: str, ctx: ToolContext) -> str:
        """Mends something that may not be safe to do twice."""
        world.call(f"mend {what}", ctx.idempotency_key)
        return f"{what} is mended"

    return mend


RECOVERING: Final = Scenario(
    name="tools that ask after a crash",
    turns={
        "lead": [asks(call("mend", what="roof"), call("call_clerk", message="go")), said("All is mended.")],
        "clerk": [asks(call("mend", what="door"), call("look", what="leaf")), said("Mended.")],
    },
    team=lambda world: Team(
        definitions=[llm("lead", links=["clerk"], tools=["mend"]), llm("clerk", tools=["mend", "look"])],
        tools=[_precious(world), looking(world)],
    ),
    answer=lambda _: input_pb2.InputAnswer(approval=input_pb2.ApprovalDecision(approved=True)),
)


def _paying_by_code(world: World) -> list[Agent]:
    @agent(description="Calls tools that ask.", tools=["pay", "scan", "mend", "look"])
    async def lead(ctx: Context, input: str) -> str:
        async def pay(ctx: Context, amount: int) -> str:
            try:
                return str(await ctx.call_tool("pay", amount=amount))
            except RunError as error:
                return error.message

        async def scanned(ctx: Context, page: int) -> str:
            return f"{await ctx.call_tool('look', what=f'page {page}')}: {await ctx.call_tool('scan', page=page)}"

        async def mended(ctx: Context) -> str:
            return str(await ctx.call_tool("mend", what="roof"))

        first = await pay(ctx, 5)
        paid = await ctx.map(pay, [7, 500])
        rest = await ctx.gather((scanned, 1), mended, (scanned, 2))
        return ", ".join([first, *paid, *rest, await mended(ctx)])

    return [lead]


def _decide(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    if request.kind == input_pb2.INPUT_KIND_RECOVERY:
        return input_pb2.InputAnswer(approval=input_pb2.ApprovalDecision(approved=True))
    return approve_or_refuse(request) if request.call.name == "pay" else _scanned(request)


PAYING_BY_CODE: Final = Scenario(
    name="calls by code that ask",
    team=lambda world: Team(
        code_agents=_paying_by_code(world), tools=[paying(world), scan, _precious(world), looking(world)]
    ),
    answer=_decide,
)

DISMISSED: Final = replace(APPROVING, name="a cancel of a run that waits", cancelled_at="its questions")
DISMISSED_BY_CODE: Final = replace(PAYING_BY_CODE, name="a cancel of calls by code", cancelled_at="its questions")
