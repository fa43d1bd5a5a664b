"""A run whose tools, client and agents in code bring files."""

from typing import Final

from bough.v1 import input_pb2, message_pb2
from bough_server import file_part
from bough_server.agents.function import agent
from bough_server.runtime.agent import Agent, Context
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import asks, said
from tests.support.teams import call, llm

_PHOTO: Final = bytes(range(256)) * 400


def _snapping(world: World) -> Tool:
    @tool
    async def snap(of: str, ctx: ToolContext) -> list[message_pb2.Part]:
        """Takes a photo."""
        world.call(f"snap {of}", ctx.idempotency_key)
        return [message_pb2.Part(text=of), file_part(of.encode() + _PHOTO, "image/png")]

    return snap


@tool(execution="client")
def pick() -> str:
    """Picks a file at the client's."""
    raise AssertionError("the client runs it")


def _picked(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    outcome = message_pb2.ToolOutcome(parts=[file_part(b"picked" + _PHOTO, "image/png")])
    return input_pb2.InputAnswer(tool_outcome=outcome)


@agent(description="Paints.", agents=["critic"], name="painter")
async def _painter(ctx: Context, input: message_pb2.Message) -> message_pb2.Message:
    sketch = message_pb2.Message(parts=[message_pb2.Part(text="Look."), file_part(b"sketch" + _PHOTO, "image/png")])
    verdict = await ctx.dispatch("critic", sketch)
    size = len(await ctx.read_file(sketch.parts[1].blob))
    text = f"{verdict.parts[0].text} {size} bytes"
    return message_pb2.Message(parts=[message_pb2.Part(text=text), file_part(b"painted" + _PHOTO, "image/png")])


_CODE: Final[list[Agent]] = [_painter]

PICTURES: Final = Scenario(
    name="files of tools, a client and code",
    has_past=True,
    turns={
        "lead": [
            asks(call("snap", of="leaf"), call("snap", of="root"), text="I take photos."),
            asks(call("pick")),
            asks(call("call_painter", message="Paint.")),
            said("Here they are."),
        ],
        "critic": [said("Fine.")],
    },
    team=lambda world: Team(
        definitions=[llm("lead", links=["painter"], tools=["snap", "pick"]), llm("critic")],
        tools=[_snapping(world), pick],
        code_agents=_CODE,
    ),
    answer=_picked,
)
