"""Serve tools to servers of Bough: a tool is an asynchronous function, with what it does and its schema.

tools = Tools()

@tools.tool(schema={"type": "object", "properties": {"text": {"type": "string"}}})
async def count(call: Call) -> object:
    '''Counts the words of a text.'''
    return {"words": len(call.arguments["text"].split())}

asyncio.run(tools.serve("127.0.0.1:7001"))
"""

import asyncio
import hmac
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
from grpc import aio

from bough.v1 import message_pb2, tool_pb2, tool_service_pb2
from bough.v1.tool_service_pb2_grpc import ToolServiceServicer, add_ToolServiceServicer_to_server

if TYPE_CHECKING:
    _Context: TypeAlias = aio.ServicerContext[tool_service_pb2.CallToolRequest, tool_service_pb2.CallToolResponse]

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""The most bytes of a call, and of its outcome."""

_PAGE_SIZE: Final = 100

_log = logging.getLogger(__name__)


class ToolFailed(Exception):
    """Raised by a tool that fails: the model reads the message, which must contain no secret."""

    def __init__(self, message: str, *, retryable: bool = False, details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.failure = message_pb2.ToolFailure(
            message=message, retryable=retryable, details_json=json.dumps(details) if details else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool, as it is passed to its function."""

    request: tool_service_pb2.CallToolRequest
    """Who calls: the run, the user, the agent; the key and the number of the attempt."""
    arguments: dict[str, Any]
    """The arguments as JSON values, which fit the tool's schema."""
    _outputs: "asyncio.Queue[str]" = field(repr=False)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of the call: pass it on to what the tool changes."""
        return self.request.idempotency_key

    async def output(self, text: str) -> None:
        """Show a piece of text while the tool runs."""
        await self._outputs.put(text)


Function: TypeAlias = Callable[[Call], Awaitable[object]]
"""A tool's code. It returns a text, a Part or a list of them, or any other JSON value."""


@dataclass(slots=True)
class _Execution:
    """A call that is carried out once for all attempts with its key."""

    task: "asyncio.Task[message_pb2.ToolOutcome]"
    outputs: "asyncio.Queue[str]"
    waiting: int = 0


class Tools:
    """The tools of a program.

    A call with the key of one that is running, or of one of the last `kept_outcomes`, gets the outcome of that. A call
    that none of its callers waits for any more is cancelled. Outcomes are kept in memory: a tool that must not take
    effect twice, also after a restart, passes the key on.
    """

    def __init__(self, *, kept_outcomes: int = 1_000) -> None:
        self._kept_outcomes = kept_outcomes
        self._functions: dict[str, Function] = {}
        self._definitions: dict[str, tool_pb2.ToolDefinition] = {}
        self._executions: OrderedDict[str, _Execution] = OrderedDict()

    def tool(
        self,
        *,
        schema: Mapping[str, object],
        name: str = "",
        description: str = "",
        output_schema: Mapping[str, object] | None = None,
        hints: tool_pb2.ToolHints | None = None,
        timeout: float | None = None,
        on_recovery: tool_pb2.ToolRecovery.ValueType = tool_pb2.TOOL_RECOVERY_UNSPECIFIED,
        requires_approval: bool = False,
    ) -> Callable[[Function], Function]:
        """Return a decorator that adds a tool; its name and description are those of the function by default.

        `schema` is that of the arguments, an object's; `timeout` is in seconds. Raises ValueError for a name that is
        taken, and for a tool without a description.
        """

        def add(function: Function) -> Function:
            own_name = name or getattr(function, "__name__", "")
            text = description or (getattr(function, "__doc__", None) or "").strip()
            if not text:
                raise ValueError(f"The tool {own_name!r} needs a description or a docstring: models choose by it.")
            if own_name in self._functions:
                raise ValueError(f"There are two tools named {own_name!r}; names must be unique.")
            definition = tool_pb2.ToolDefinition(
                name=own_name,
                description=text,
                input_schema_json=json.dumps(schema),
                output_schema_json=json.dumps(output_schema) if output_schema is not None else "",
                hints=hints,
                on_recovery=on_recovery,
                requires_approval=requires_approval,
            )
            if timeout is not None:
                definition.timeout.FromNanoseconds(round(timeout * 1e9))
            self._functions[own_name], self._definitions[own_name] = function, definition
            return function

        return add

    @asynccontextmanager
    async def open(
        self, address: str, *, token: str = "", credentials: grpc.ServerCredentials | None = None
    ) -> AsyncIterator[str]:
        """Serve while the context is open, and yield HOST:PORT; port 0 is any free one.

        With a token every call has to have it. `credentials` encrypt the connections.
        """
        server = aio.server(options=(("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)))
        add_ToolServiceServicer_to_server(_Servicer(self, token), server)
        host = address.rpartition(":")[0]
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        await server.start()
        try:
            yield f"{host}:{port}"
        finally:
            await server.stop(None)
            for execution in self._executions.values():
                execution.task.cancel()

    async def serve(self, address: str, *, token: str = "", credentials: grpc.ServerCredentials | None = None) -> None:
        """Serve until the task is cancelled; see `open`."""
        async with self.open(address, token=token, credentials=credentials):
            await asyncio.Event().wait()

    @property
    def definitions(self) -> Sequence[tool_pb2.ToolDefinition]:
        """The definitions of all tools, in the order in which they were added."""
        return list(self._definitions.values())

    def find(self, name: str) -> Function | None:
        """Return the function of a tool; None if there is no tool of that name."""
        return self._functions.get(name)

    def start(self, request: tool_service_pb2.CallToolRequest, function: Function) -> _Execution:
        """Return the execution of a call: the one that has its key, else a new one."""
        key = request.idempotency_key
        execution = self._executions.get(key) if key else None
        if execution is None:
            outputs: asyncio.Queue[str] = asyncio.Queue(maxsize=64)
            task = asyncio.get_running_loop().create_task(_run(function, request, outputs))
            execution = _Execution(task, outputs)
            if key:
                self._executions[key] = execution
                self._forget_oldest()
        execution.waiting += 1
        return execution

    def leave(self, request: tool_service_pb2.CallToolRequest, execution: _Execution) -> None:
        """Note that a caller has its outcome, or no longer waits; without any the call is cancelled and forgotten."""
        execution.waiting -= 1
        if not execution.waiting and not execution.task.done():
            execution.task.cancel()
            self._executions.pop(request.idempotency_key, None)

    def _forget_oldest(self) -> None:
        ended = [key for key, execution in self._executions.items() if execution.task.done()]
        for key in ended[: max(0, len(ended) - self._kept_outcomes)]:
            del self._executions[key]


async def _run(
    function: Function, request: tool_service_pb2.CallToolRequest, outputs: "asyncio.Queue[str]"
) -> message_pb2.ToolOutcome:
    """Call a tool's function, and return its outcome, whatever it raises."""
    try:
        arguments = json.loads(request.call.arguments_json or "{}")
        result = await function(Call(request=request, arguments=arguments, _outputs=outputs))
        return message_pb2.ToolOutcome(parts=_to_parts(result))
    except ToolFailed as failed:
        return message_pb2.ToolOutcome(failure=failed.failure)
    except Exception as error:
        _log.exception("tool %r failed", request.call.name)
        detail = " ".join(str(error).split())
        message = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
        return message_pb2.ToolOutcome(failure=message_pb2.ToolFailure(message=message[:2_000]))


def _to_parts(result: object) -> list[message_pb2.Part]:
    if isinstance(result, message_pb2.Part):
        return [result]
    if isinstance(result, list) and result and all(isinstance(each, message_pb2.Part) for each in result):
        return result
    if result is None or isinstance(result, str):
        return [message_pb2.Part(text=result or "")]
    return [message_pb2.Part(data_json=json.dumps(result, allow_nan=False))]


class _Servicer(ToolServiceServicer):
    """Serves the tools of a program."""

    def __init__(self, tools: Tools, token: str) -> None:
        self._tools, self._token = tools, token

    async def DescribeTools(
        self,
        request: tool_service_pb2.DescribeToolsRequest,
        context: "aio.ServicerContext[tool_service_pb2.DescribeToolsRequest, tool_service_pb2.DescribeToolsResponse]",
    ) -> tool_service_pb2.DescribeToolsResponse:
        """Return a page of definitions."""
        await self._check_token(context)
        size = min(request.page_size or _PAGE_SIZE, _PAGE_SIZE)
        start = int(request.page_token) if request.page_token.isdecimal() else 0
        every = self._tools.definitions
        following = str(start + size) if start + size < len(every) else ""
        return tool_service_pb2.DescribeToolsResponse(tools=every[start : start + size], next_page_token=following)

    async def CallTool(
        self, request: tool_service_pb2.CallToolRequest, context: "_Context"
    ) -> AsyncIterator[tool_service_pb2.CallToolResponse]:
        """Call a tool, or join the call that has the same key."""
        await self._check_token(context)
        function = self._tools.find(request.call.name)
        if function is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no tool {request.call.name!r}.")
        assert function is not None, "abort raises"
        execution = self._tools.start(request, function)
        try:
            async for text in _follow(execution):
                yield tool_service_pb2.CallToolResponse(output=text)
            yield tool_service_pb2.CallToolResponse(outcome=execution.task.result())
        finally:
            self._tools.leave(request, execution)

    async def _check_token(self, context: "aio.ServicerContext[Any, Any]") -> None:
        given = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "The call has no valid token.")


async def _follow(execution: _Execution) -> AsyncIterator[str]:
    """Yield what a call puts out, until it has ended. Callers of one key share its pieces."""
    while not execution.task.done() or not execution.outputs.empty():
        getting = asyncio.get_running_loop().create_task(execution.outputs.get())
        try:
            await asyncio.wait({getting, execution.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not getting.done():
                getting.cancel()
        if getting.done() and not getting.cancelled():
            yield getting.result()
