"""An agent and a tool that say what a request which they sent now would carry."""

import json

from opentelemetry import propagate

from bough_server import Context, Message, agent, tool


@tool
async def headers() -> dict[str, str]:
    """Returns the headers that an instrumented HTTP client would send."""
    return _carried()


@agent(description="Shows its headers and those of its tool.", tools=["headers"])
async def sender(ctx: Context, input: Message) -> str:
    """Answers with both, as JSON."""
    return json.dumps({"agent": _carried(), "tool": await ctx.call_tool("headers")})


def _carried() -> dict[str, str]:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
