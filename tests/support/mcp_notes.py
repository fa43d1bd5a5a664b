"""A tool server of the `mcp` package, run as a program: notes are lines of a file. With a port it serves HTTP.

Usage: python mcp_notes.py FILE [PORT]
"""

import os
import sys
from asyncio import sleep
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent, ToolAnnotations

FILE = Path(sys.argv[1])
server = MCPServer("notes")


def write(ctx: Context, text: str) -> None:
    """Add a line with the key of the call."""
    meta = dict(ctx.request_context.meta or {})
    with FILE.open("a", encoding="utf-8") as file:
        file.write(f"{text} {meta.get('bough.dev/idempotency-key', '')}\n")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def count() -> int:
    """Counts the notes."""
    return len(FILE.read_text(encoding="utf-8").splitlines()) if FILE.exists() else 0


@server.tool()
def add(text: str, ctx: Context) -> str:
    """Adds a note."""
    write(ctx, text)
    return f"added {text}"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def add_and_die(text: str, ctx: Context) -> str:
    """Adds a note; the first time, the server dies before it answers."""
    write(ctx, text)
    if count() == 1:
        os._exit(3)
    return f"added {text}"


@server.tool()
async def wait(seconds: float, ctx: Context) -> str:
    """Waits, and says so."""
    await ctx.report_progress(1, 2, "half way")
    await sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no ink")


@server.tool()
def draw() -> CallToolResult:
    """Draws."""
    return CallToolResult(
        content=[
            TextContent(text="a dot"),
            ImageContent(data="iVBORw0KGgo=", mime_type="image/png"),
            ResourceLink(uri="https://pictures.example/dot", name="dot", mime_type="image/png"),
        ],
    )


@server.tool()
async def learn(name: str, ctx: Context) -> str:
    """Learns a further tool."""
    server.add_tool(lambda: "new", name=name, description="Is new.")
    await ctx.notify_tools_changed()
    return "learned"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
