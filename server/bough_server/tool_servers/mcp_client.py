"""Connections to tool servers that speak MCP; the only module that uses the client of the `mcp` package."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import httpx2
import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.exceptions import MCPError

from bough.v1 import message_pb2
from bough_server.distribution import version
from bough_server.errors import RunError
from bough_server.tool_servers.child_process import ChildCommand, run_child
from bough_server.tool_servers.config import ToolServerSection
from bough_server.tool_servers.connection import (
    MAX_LIST_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAGES,
    MAX_TOOLS,
    Emit,
    ListedTool,
    NotSent,
    OutcomeUnknown,
    ServerCall,
    Unreachable,
)
from bough_server.tool_servers.http_transport import BROKEN, NOT_SENT, REFUSED, build_client
from bough_server.tool_servers.mcp_results import to_listed_tool, to_parts
from bough_server.tool_servers.tokens import describe_file_error, read_token, read_variable

KEY_META: Final = "bough.dev/idempotency-key"
"""The member of `_meta` that has the key of a call, the same for every attempt."""

_LOST: Final = (types.CONNECTION_CLOSED, BROKEN, types.PARSE_ERROR)
_LONGEST_MESSAGE: Final = 500
_ADDRESS: Final = re.compile(r"https?://\S+")

_FIRST_LISTEN_DELAY: Final = 1.0
_LONGEST_LISTEN_DELAY: Final = 30.0
"""Seconds before a stream of changes that has ended is opened again; they double."""

Transport: TypeAlias = AbstractAsyncContextManager[Any]
"""What the package's client connects by: its streams, when it is entered."""


async def connect_to_mcp(
    name: str, section: ToolServerSection, *, variables: Mapping[str, str], folder: Path
) -> "McpConnection":
    """Open a connection to a tool server; `variables` are those of the environment that its section names.

    Raises Unreachable.
    """
    mcp = section.mcp
    assert mcp is not None, "the section says how a server of MCP is reached"
    if mcp.command:
        child = ChildCommand(
            server=name,
            command=mcp.command,
            args=mcp.args,
            cwd=mcp.cwd or folder,
            env={each: variables[each] for each in mcp.variables if each in variables},
        )
        lost = asyncio.Event()
        return await McpConnection(run_child(child, lost), lost, mode=mcp.protocol).open()
    headers = {header: read_variable(variable, variables) for header, variable in mcp.headers_env.items()}
    if token := read_token(mcp, variables):
        headers["Authorization"] = f"Bearer {token}"
    try:
        client = build_client(headers, mcp.tls, connect_timeout=section.connect_timeout)
    except OSError as error:
        raise describe_file_error(error) from None
    return await McpConnection(_run_http(mcp.url, client), asyncio.Event(), mode=mcp.protocol).open()


@asynccontextmanager
async def _run_http(url: str, http_client: httpx2.AsyncClient) -> AsyncIterator[Any]:
    async with (
        http_client,
        streamable_http_client(url, http_client=http_client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class McpConnection:
    """A client of the package, hosted by a separate task: a connection that breaks cancels the task that hosts it."""

    def __init__(self, transport: Transport, lost: asyncio.Event, *, mode: str) -> None:
        """`lost` is set by a transport that ends without an error."""
        self._transport, self._lost, self._mode = transport, lost, mode
        self._client: Client | None = None
        self._changed, self._closing = asyncio.Event(), asyncio.Event()
        self._host: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def open(self) -> "McpConnection":
        """Connect. Raises Unreachable."""
        ready = asyncio.Event()
        self._host = asyncio.get_running_loop().create_task(self._hold(ready), name="mcp-connection")
        waiting = asyncio.get_running_loop().create_task(ready.wait())
        try:
            await asyncio.wait({self._host, waiting}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            waiting.cancel()
        if self._client is None:
            raise Unreachable(_explain(self._host))
        self._listener = asyncio.get_running_loop().create_task(self._listen(), name="mcp-listen")
        return self

    async def _hold(self, ready: asyncio.Event) -> None:
        client = Client(
            self._transport,
            mode=self._mode,
            client_info=types.Implementation(name="bough", version=version()),
            message_handler=self._on_message,
            cache=None,  # a list that is read again must not be the one before
        )
        try:
            async with client:
                # The package would match the patterns of a schema by `re`, which may take for ever.
                client.session.validate_tool_result = _accept_result  # type: ignore[method-assign]
                self._client = client
                ready.set()
                await self._closing.wait()
        finally:
            self._client = None

    async def _on_message(self, message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._changed.set()

    async def _listen(self) -> None:
        """Note changes of the list that a server of 2026-07-28 reports, until the connection is lost."""
        delay = _FIRST_LISTEN_DELAY
        while (client := self._client) is not None:
            is_open = False
            try:
                async with client.listen(tools_list_changed=True) as subscription:
                    is_open, delay = True, _FIRST_LISTEN_DELAY
                    async for _ in subscription:
                        self._changed.set()
            except ListenNotSupportedError:
                return
            except (SubscriptionLost, MCPError, TimeoutError) as error:
                if not is_open and not (isinstance(error, MCPError) and error.code in (*_LOST, NOT_SENT)):
                    return  # it does not report changes
            if is_open:
                self._changed.set()  # a stream that ended may mean that the server was restarted
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_LISTEN_DELAY)

    @property
    def _is_lost(self) -> bool:
        return self._lost.is_set() or self._client is None

    async def wait_for_change(self) -> bool:
        """See ToolConnection."""
        if self._host is None or self._is_lost:
            return False
        loop = asyncio.get_running_loop()
        waiting = {loop.create_task(self._changed.wait()), loop.create_task(self._lost.wait())}
        try:
            await asyncio.wait({self._host, *waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        self._changed.clear()
        return not self._is_lost

    async def close(self) -> None:
        """See ToolConnection."""
        self._closing.set()
        tasks = {task for task in (self._host, self._listener) if task is not None}
        if self._listener is not None:
            self._listener.cancel()
        if not tasks:
            return
        if self._client is None and self._host is not None:
            self._host.cancel()  # it is still connecting
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # mark it as retrieved: how a connection ends concerns no one any more

    async def list_tools(self) -> Sequence[ListedTool]:
        """See ToolConnection."""
        found: list[ListedTool] = []
        size, pages, cursor = 0, 0, None
        while pages == 0 or cursor:
            client = self._client
            if client is None:
                raise Unreachable("The connection was lost.")
            try:
                page = await client.list_tools(cursor=cursor)
            except asyncio.CancelledError:
                if self._is_lost:
                    raise Unreachable("The connection was lost.") from None
                raise
            except Exception as error:  # of the package, and of what a server answers
                raise Unreachable(f"Its tools cannot be listed: {_describe(error)}.") from None
            found += map(to_listed_tool, page.tools)
            size += sum(len(tool.input_schema_json) + len(tool.description) for tool in found[-len(page.tools) :])
            pages, cursor = pages + 1, page.next_cursor
            if len(found) > MAX_TOOLS or size > MAX_LIST_BYTES or (pages >= MAX_PAGES and cursor):
                raise Unreachable(
                    f"Its list of tools is too long: more than {MAX_TOOLS:,} tools, {MAX_PAGES:,} pages or "
                    f"{MAX_LIST_BYTES // 1024**2} MiB."
                )
        return found

    async def call(self, call: ServerCall, emit: Emit, *, timeout: float) -> Sequence[message_pb2.Part]:
        """See ToolConnection."""
        client = self._client
        if client is None or self._is_lost:
            raise NotSent("the connection was lost")

        async def report(progress: float, total: float | None, message: str | None) -> None:
            if message:
                await emit(f"{message}\n")

        try:
            result = await client.session.call_tool(
                call.tool,
                call.arguments,
                progress_callback=report,
                meta=cast("types.RequestParamsMeta", {KEY_META: call.idempotency_key}),
                allow_input_required=True,
            )
        except MCPError as error:
            raise self._translate(error) from None
        except asyncio.CancelledError:
            if self._is_lost:
                raise OutcomeUnknown("the connection was lost") from None
            raise
        except (ValueError, RuntimeError) as error:  # a result that the package cannot read
            raise RunError(f"The tool server answered with no valid result: {_describe(error)}.") from None
        if isinstance(result, types.InputRequiredResult):
            raise RunError("The tool asks for further input, which tools cannot do here: give it all as arguments.")
        return to_parts(result)

    def _translate(self, error: MCPError) -> Exception:
        if error.code == NOT_SENT:
            self._changed.set()  # the owner reads the list again, and so finds out when the server is back
            return NotSent(error.message)
        if error.code == REFUSED:
            self._changed.set()
            return NotSent(f"it refused the request ({error.message})")
        if error.code in _LOST:
            return OutcomeUnknown(_describe(error))
        if error.message == "Session terminated":  # a server of 2025-11-25 that was restarted
            self._lost.set()
            return NotSent("it has been restarted")
        return RunError(_describe(error))


async def _accept_result(name: str, result: types.CallToolResult) -> None:
    """Accept any structured content; see McpConnection._hold."""


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MCPError):  # some are the package's own, about what is at the address
        text = _ADDRESS.sub("its address", text)
    return text[:_LONGEST_MESSAGE].rstrip(".") or type(error).__name__


def _explain(host: "asyncio.Task[None]") -> str:
    """Return why a connection could not be made, in a sentence."""
    error = None if host.cancelled() or not host.done() else host.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        name = Path(str(error.filename)).name
        return f"Its program cannot be started: {name!r} does not exist."
    if isinstance(error, OSError):
        return f"It cannot be started or reached: {error.strerror or type(error).__name__}."
    if isinstance(error, MCPError) and error.code == types.CONNECTION_CLOSED:
        return "It ended the connection before it spoke MCP."
    return f"It cannot be connected to: {_describe(error)}." if isinstance(error, Exception) else "It ended at once."
