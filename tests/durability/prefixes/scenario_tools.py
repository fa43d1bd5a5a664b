"""What several scenarios use: turns that say what they cost, and tools that count their calls."""

from typing import Final

from bough.v1 import policy_pb2
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.durability.prefixes.scenario import World
from tests.support.teams import calls

ABORT: Final = policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT
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


def meeting(world: World) -> Tool:
    """A tool that answers as soon as the waiting one has begun."""

    @tool
    async def meet(ctx: ToolContext) -> str:
        """Waits until the other one waits."""
        world.call("meet", ctx.idempotency_key)
        await world.until_arrived("wait")
        return "they wait"

    return meet
