"""`bough tools`: list and show tools, call those of tool servers, and lock what was reviewed."""

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.commands import command
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import JsonOption, Target, target_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from bough.v1 import message_pb2, tool_pb2
    from bough_server.settings import Settings
    from bough_server.tool_servers.servers import ToolServers

tools = typer.Typer(help="List, show, call and lock tools.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The tool's name, as definitions have it.")]


@command(tools, "list")
def list_tools(
    context: typer.Context,
    server: Annotated[
        str, typer.Option("--server", metavar="S", help="Only the tools of this tool server.  [default: all tools]")
    ] = "",
    json: JsonOption = False,
) -> None:
    """List the tools that definitions may name, with where they run and what they do.

    Tool servers that cannot be reached, and tools that are not offered, are named on standard error.
    """
    finish(_list_tools(target_of(context), server, json=json))


@command(tools)
def show(context: typer.Context, name: NameArgument, json: JsonOption = False) -> None:
    """Show what a tool does, its rules and its schemas."""
    finish(_show(target_of(context), name, json=json))


@command(tools)
def call(
    context: typer.Context,
    name: NameArgument,
    arguments: Annotated[
        str, typer.Argument(metavar="JSON", help="The arguments as one JSON object.  [default: none]")
    ] = "{}",
) -> None:
    """Call a tool of a tool server that bough.yaml declares, from this machine and outside of any run.

    Prints its result. What it sends meanwhile goes to standard error. The exit code is 1 if it fails.
    """
    finish(_call(target_of(context), name, arguments))


@command(tools)
def lock(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing: print what differs, and exit with 1 if anything does.")
    ] = False,
) -> None:
    """Write the tools of all tool servers to tools.lock.json, beside bough.yaml, for review.

    With this file a server offers no tool that is not in it, or that differs from it.
    """
    finish(_lock(target_of(context), is_check=check))


async def _list_tools(target: Target, server: str, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import print_table
    from bough_server.cli.render.tables import tools_table

    async with connect(target, is_reading=True) as connection:
        servers = [each async for each in connection.client.catalog.list_tool_servers()]
        found = [tool async for tool in connection.client.catalog.list_tools(server=server)]
    print_table(found, tools_table, json=json)
    for each in servers:
        if server in ("", each.name):
            for line in describe_problems(each):
                print_stderr(line)
    return ExitCode.YES


def describe_problems(server: "tool_pb2.ToolServerInfo") -> "Sequence[str]":
    """Return lines about what is wrong with a tool server and its tools."""
    lines = [f"{server.name}: {server.problem}"] if server.problem else []
    return [*lines, *(f"{server.name}: {each.name!r} is not offered: {each.reason}" for each in server.refused)]


async def _show(target: Target, name: str, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import json_text, print_line
    from bough_server.cli.render.tables import tool_lines
    from bough_server.documents.yaml import suggestion
    from bough_server.errors import ConfigurationError

    async with connect(target, is_reading=True) as connection:
        found = {tool.name: tool async for tool in connection.client.catalog.list_tools()}
    if name not in found:
        raise ConfigurationError(f"There is no tool {name!r}.{suggestion(name, found)}")
    for line in [json_text(found[name])] if json else tool_lines(found[name]):
        print_line(line)
    return ExitCode.YES


async def _call(target: Target, name: str, arguments_json: str) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.errors import RunError
    from bough_server.ids import new_uuid4
    from bough_server.settings import Settings
    from bough_server.tool_servers.connection import ServerCall
    from bough_server.tools.arguments import parse_arguments

    async def emit(text: str) -> None:
        print_stderr(text.rstrip("\n"))

    settings = Settings.load(target.config)
    async with _open(settings, is_locked=True) as servers:
        info = await _find(servers, name)
        try:
            arguments = parse_arguments(arguments_json, info.input_schema_json)
            made = ServerCall(tool=info.server_tool_name, arguments=arguments, idempotency_key=new_uuid4())
            parts = await servers.call(info.server, made, emit, timeout=info.timeout.ToNanoseconds() / 1e9)
        except RunError as error:
            print_stderr(f"{name}: {error.message}")
            return ExitCode.FAILED
        for part in parts:
            print_line(_text_of(part))
    return ExitCode.YES


async def _find(servers: "ToolServers", name: str) -> "tool_pb2.ToolInfo":
    """Return the tool with this name. Raises ConfigurationError."""
    from bough_server.documents.yaml import suggestion
    from bough_server.errors import ConfigurationError

    visible = servers.offers.servers
    meant = [each for each, offer in visible.items() if name.startswith(offer.section.prefix_of(each))]
    await servers.wait_until_settled(meant)
    found = servers.offers.tools_for(None)
    if name in found:
        return found[name]
    problems = [line for each in servers.describe(None) if each.name in meant for line in describe_problems(each)]
    hint = " ".join(problems) or f"{suggestion(name, found).strip()} Only tools of tool servers can be called."
    raise ConfigurationError(f"No tool server offers a tool {name!r}. {hint}".replace("  ", " "))


def _text_of(part: "message_pb2.Part") -> str:
    from bough_server.log.blobs import file_text

    if part.HasField("blob"):
        return part.blob.uri or file_text(part.blob)
    return part.text or part.data_json


@asynccontextmanager
async def _open(settings: "Settings", *, is_locked: bool) -> "AsyncIterator[ToolServers]":
    """Yield the tool servers of a configuration, and close them. Raises ConfigurationError if there are none."""
    from bough_server.agents.loading import load_python
    from bough_server.agents.registry import describe_owners
    from bough_server.errors import ConfigurationError
    from bough_server.observability.logs import configure_logging

    configure_logging("error", settings.log_format)  # the commands say themselves what is wrong
    if not settings.tool_servers:
        raise ConfigurationError("bough.yaml declares no tool servers: add `tool_servers`.")
    python = load_python(settings.python, settings.folder)
    taken = describe_owners(tool.name for tool in python.tools)
    servers = settings.build_tool_servers(taken, is_locked=is_locked)
    try:
        yield servers
    finally:
        await servers.close()


async def _lock(target: Target, *, is_check: bool) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import pluralize
    from bough_server.settings import Settings
    from bough_server.tool_servers.lock import LOCK_FILE, ToolLock, read_lock, write_lock

    settings = Settings.load(target.config)
    path = settings.folder / LOCK_FILE
    before = read_lock(path)
    found: Mapping[str, tool_pb2.ToolInfo] = {}
    async with _open(settings, is_locked=False) as servers:
        found = await _list_all(servers)
    changes = [*(before or ToolLock(tools={})).compare(found, settings.tool_servers)]
    for line in changes:
        print_line(line)
    if is_check:
        if changes:
            print_stderr(f"{pluralize(len(changes), 'tool')} differ: review them, then run `bough tools lock`.")
        return ExitCode.FAILED if changes else ExitCode.YES
    write_lock(path, found.values())
    print_stderr(f"{pluralize(len(found), 'tool')} in {path.name}: review it, and keep it in the repository.")
    return ExitCode.YES


async def _list_all(servers: "ToolServers") -> "Mapping[str, tool_pb2.ToolInfo]":
    """Return the tools of all servers as they describe them. Raises ConfigurationError if one cannot be listed."""
    from bough_server.errors import ConfigurationError

    await servers.wait_until_settled(servers.names)
    problems: list[str] = []
    for server in servers.describe(None):
        if not servers.offers.servers[server.name].is_listed:
            problems.append(f"{server.name}: {server.problem or 'It has not answered in time.'}")
        for refused in server.refused:
            print_stderr(f"{server.name}: {refused.name!r} is not offered: {refused.reason}")
    if problems:
        raise ConfigurationError("\n".join([*problems, "The tools of every server are needed."]))
    offers = servers.offers.servers.values()
    return {name: offer.own[name] for offer in offers for name in offer.tools}
