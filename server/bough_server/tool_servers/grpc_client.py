"""Connections to tool servers that serve `bough.v1.ToolService`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import grpc
from grpc import aio

from bough.v1 import error_pb2, message_pb2, tool_pb2, tool_service_pb2, tool_service_pb2_grpc
from bough_server.errors import RunError
from bough_server.observability.tracing import inject_context
from bough_server.tool_servers.config import GrpcSection
from bough_server.tool_servers.connection import (
    LIST_SECONDS,
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
from bough_server.tool_servers.tokens import describe_file_error, read_token

_PAGE_SIZE: Final = 500
_LONGEST_MESSAGE: Final = 500

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A repetition is for the rule of the tool to decide.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 30_000),
)
_UNKNOWN: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.CANCELLED,
)
"""Statuses after which it is not known whether the tool ran."""

_CREDENTIALS: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def connect_to_service(section: GrpcSection, variables: Mapping[str, str]) -> "ServiceConnection":
    """Open a connection. Raises Unreachable."""
    token = read_token(section, variables)
    channel = _open_channel(section)
    connection = ServiceConnection(channel, [("authorization", f"Bearer {token}")] if token else [])
    try:
        await channel.channel_ready()
    except BaseException:
        await connection.close()
        raise
    return connection


def _open_channel(section: GrpcSection) -> aio.Channel:
    if section.tls is None:
        return aio.insecure_channel(section.address, options=_OPTIONS)
    try:
        files = [_read(path) for path in (section.tls.ca_file, section.tls.key_file, section.tls.cert_file)]
    except OSError as error:
        raise describe_file_error(error) from None
    name = (("grpc.ssl_target_name_override", section.server_name),) if section.server_name else ()
    return aio.secure_channel(section.address, grpc.ssl_channel_credentials(*files), options=(*_OPTIONS, *name))


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


class ServiceConnection:
    """A channel, which connects again by itself: the connection is as good as lost only when it is closed."""

    def __init__(self, channel: aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel, self._metadata = channel, metadata
        self._stub: tool_service_pb2_grpc.ToolServiceAsyncStub = tool_service_pb2_grpc.ToolServiceStub(channel)
        self._changed = asyncio.Event()

    async def wait_for_change(self) -> bool:
        """See ToolConnection."""
        watching = asyncio.get_running_loop().create_task(self._wait_for_reconnect())
        changed = asyncio.get_running_loop().create_task(self._changed.wait())
        try:
            await asyncio.wait({watching, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            changed.cancel()
        self._changed.clear()
        return True

    async def _wait_for_reconnect(self) -> None:
        """Wait until the channel was disconnected and has connected again."""
        state = self._channel.get_state(try_to_connect=True)
        while state is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def close(self) -> None:
        """See ToolConnection."""
        await self._channel.close()

    async def list_tools(self) -> Sequence[ListedTool]:
        """See ToolConnection."""
        found: list[ListedTool] = []
        size, pages, token = 0, 0, ""
        while pages == 0 or token:
            request = tool_service_pb2.DescribeToolsRequest(page_size=_PAGE_SIZE, page_token=token)
            try:
                page = await self._stub.DescribeTools(request, metadata=self._metadata, timeout=LIST_SECONDS)
            except aio.AioRpcError as error:
                raise Unreachable(f"Its tools cannot be listed: {_describe(error)}.") from None
            found += map(_to_listed_tool, page.tools)
            size, pages, token = size + page.ByteSize(), pages + 1, page.next_page_token
            if len(found) > MAX_TOOLS or size > MAX_LIST_BYTES or (pages >= MAX_PAGES and token):
                raise Unreachable(
                    f"Its list of tools is too long: more than {MAX_TOOLS:,} tools, {MAX_PAGES:,} pages or "
                    f"{MAX_LIST_BYTES // 1024**2} MiB."
                )
        return found

    async def call(self, call: ServerCall, emit: Emit, *, timeout: float) -> Sequence[message_pb2.Part]:
        """See ToolConnection."""
        if self._channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
            self._changed.set()  # the list is read again, which shows whether the server is back
            raise NotSent("it is not connected")
        metadata = [*self._metadata, *inject_context().items()]
        stream = self._stub.CallTool(_build_request(call), metadata=metadata, timeout=timeout)
        try:
            async for response in stream:
                if response.WhichOneof("event") == "output":
                    await emit(response.output)
                elif response.WhichOneof("event") == "outcome":
                    return _to_parts(response.outcome)
        except aio.AioRpcError as error:
            _raise_failure(error)
        finally:
            stream.cancel()
        raise OutcomeUnknown("the stream ended without an outcome")


def _build_request(call: ServerCall) -> tool_service_pb2.CallToolRequest:
    return tool_service_pb2.CallToolRequest(
        call=message_pb2.ToolCall(call_id=call.call_id, name=call.tool, arguments_json=json.dumps(call.arguments)),
        idempotency_key=call.idempotency_key,
        attempt=call.attempt,
        run_id=call.run_id,
        session_id=call.session_id,
        user_id=call.user_id,
        agent=call.agent,
        invocation_id=call.invocation_id,
    )


def _to_parts(outcome: message_pb2.ToolOutcome) -> Sequence[message_pb2.Part]:
    if outcome.HasField("failure"):
        failure = outcome.failure
        raise RunError(
            failure.message or "The tool failed, and did not say why.",
            retryable=failure.retryable,
            details_json=failure.details_json,
        )
    return list(outcome.parts)


def _raise_failure(error: aio.AioRpcError) -> NoReturn:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise RunError("The tool did not end in time.", reason=error_pb2.ERROR_REASON_TOOL_TIMEOUT) from None
    if error.code() in _UNKNOWN:
        raise OutcomeUnknown(_describe(error)) from None
    if error.code() in _CREDENTIALS:
        raise NotSent(f"it refused the request ({_describe(error)})") from None
    raise RunError(f"The tool server refused the call: {_describe(error)}.") from None


def _describe(error: aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNAVAILABLE:  # its details are gRPC's, with the address
        return "UNAVAILABLE"
    text = " ".join((error.details() or "").split())[:_LONGEST_MESSAGE].rstrip(".")
    return f"{error.code().name}: {text}" if text else str(error.code().name)


def _to_listed_tool(tool: tool_pb2.ToolDefinition) -> ListedTool:
    return ListedTool(
        name=tool.name,
        description=tool.description,
        input_schema_json=tool.input_schema_json,
        output_schema_json=tool.output_schema_json,
        hints=tool.hints,
        timeout=tool.timeout.ToNanoseconds() / 1e9 if tool.HasField("timeout") else None,
        on_recovery=tool.on_recovery,
        requires_approval=tool.requires_approval,
    )
