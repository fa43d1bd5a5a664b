"""The recorded runs: one for each way in which a run can be under way when its server dies."""

import json
from typing import Final

from google.protobuf.duration_pb2 import Duration

from bough.v1 import agent_pb2, input_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Agent
from bough_server.runtime.context import Context
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.support.teams import call, calls, llm

ABORT: Final = policy_pb2.ON_SUB_AGENT_FAILURE_ABORT
USED: Final = {"usage": {"input_tokens": 7, "output_tokens": 3}}


def said(text: str) -> dict[str, object]:
    """A turn that says a text, and what it uses."""
    return {"text": text, **USED}


def asks(*made: dict[str, object], **fields: object) -> dict[str, object]:
    """A turn that calls, and what it uses."""
    return calls(*made, **USED, **fields)


def failing(**fault: object) -> dict[str, object]:
    """A turn that fails in the middle."""
    error = {"reason": "UNAVAILABLE", "after_chunks": 1, "usage": {"input_tokens": 2}, **fault}
    return {"text": "This much", "error": error, **USED}


def looking(world: World) -> Tool:
    """A tool that answers at once."""

    @tool
    async def look(what: str, ctx: ToolContext) -> str:
        """Looks something up."""
        world.call(f"look {what}", ctx.idempotency_key)
        if what == "nothing":
            raise ValueError("there is nothing")
        return f"{what} is red"

    return look


def waiting(world: World) -> Tool:
    """A tool that says that it has begun, and then waits to be cancelled."""

    @tool
    async def wait(ctx: ToolContext) -> str:
        """Waits."""
        world.call("wait", ctx.idempotency_key)
        world.arrive("wait")
        if world.is_patient:
            await world.for_ever()
        return "it was not long"

    return wait


PLAIN: Final = Scenario(
    name="plain", turns={"lead": [said("Hello to you.")]}, team=lambda _: Team(definitions=[llm("lead")])
)

TOOLS: Final = Scenario(
    name="tools in parallel",
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


def _meeting(world: World) -> Tool:
    @tool
    async def meet(ctx: ToolContext) -> str:
        """Waits until the sibling waits."""
        world.call("meet", ctx.idempotency_key)
        await world.until_arrived("wait")
        return "they wait"

    return meet


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
        tools=[looking(world), _meeting(world), waiting(world)],
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


def _paying(world: World) -> Tool:
    @tool(approval=True)
    async def pay(amount: int, ctx: ToolContext) -> str:
        """Pays."""
        world.call(f"pay {amount}", ctx.idempotency_key)
        return f"paid {amount}"

    return pay


def _judge(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    amount = json.loads(request.call.arguments_json)["amount"]
    approval = input_pb2.Approval(approved=amount < 100, note="" if amount < 100 else "too much")
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
        tools=[looking(world), _paying(world)],
    ),
    answer=_judge,
)


@tool(execution="client")
def scan(page: int) -> str:
    """Scans a page at the client's."""
    raise AssertionError("the client runs it")


def _scanned(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    page = json.loads(request.call.arguments_json)["page"]
    result = message_pb2.ToolResult(parts=[message_pb2.Part(text=f"page {page} is red")])
    return input_pb2.InputAnswer(tool_result=result)


CLIENT_SIDE: Final = Scenario(
    name="a client-side tool",
    turns={
        "lead": [asks(call("scan", page=1), call("look", what="leaf"), call("scan", page=2)), said("Scanned.")],
    },
    team=lambda world: Team(definitions=[llm("lead", tools=["scan", "look"])], tools=[looking(world), scan]),
    answer=_scanned,
)

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


def _last(world: World) -> Tool:
    @tool
    async def last(ctx: ToolContext) -> str:
        """Waits after the other one."""
        world.call("last", ctx.idempotency_key)
        await world.until_arrived("wait")
        world.arrive("last")
        if world.is_patient:
            await world.for_ever()
        return "it was not long"

    return last


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

SCENARIOS: Final = (
    PLAIN,
    TOOLS,
    SUB_AGENTS,
    DEEP,
    ABORTING,
    RETRYING,
    APPROVING,
    CLIENT_SIDE,
    CANCELLED,
    ASKING,
    OVERTIME,
)
