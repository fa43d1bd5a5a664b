"""Run a tool once, and decide whether a call of it needs an approval."""

import asyncio
import copy
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import structlog
from pydantic import ValidationError

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError, text_of_error
from bough_server.matching.schemas import value_path
from bough_server.observability.logs import get_code_stack
from bough_server.tasks import AbandonedTasks, is_collected
from bough_server.tools.arguments import bad_arguments, parse_arguments
from bough_server.tools.output import Excerpt, result_parts
from bough_server.tools.threads import ThreadLimit, pull
from bough_server.tools.tool import Tool, ToolContext

Emit: TypeAlias = Callable[[str], Awaitable[None]]
"""Receives each piece of text that a tool streams; the tool continues when it returns."""

THREADS: Final = ThreadLimit(64)
"""Thread pool for all tools of this process; no thread is started before the first plain function runs."""

LONGEST_CALL: Final = 86_400.0
"""Seconds that a call of a tool server may take if nothing else says."""

CANCEL_SECONDS: Final = 0.75
"""Seconds that a cancelled tool may take to end; after that it is abandoned."""

MAX_OUTPUT_BYTES: Final = 1024 * 1024
"""The most bytes of text that a call of a tool server may stream."""

_LONGEST_MESSAGE: Final = 2_000
_log = structlog.get_logger(__name__)


class _EmitFailed(Exception):
    """Carries an exception of `emit` past the handling of the tool's own exceptions."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


async def execute(
    tool: Tool,
    *,
    arguments_json: str,
    context: ToolContext,
    emit: Emit,
    timeout: float | None = None,
    elapsed: float = 0.0,
    abandoned: AbandonedTasks | None = None,
) -> list[message_pb2.Part]:
    """Run a tool and return its result as parts.

    `timeout` is in seconds and overrides the tool's own; `elapsed` seconds of it have passed already. On timeout or
    cancellation an async tool is cancelled and a generator closed; one that ignores that for CANCEL_SECONDS is added to
    `abandoned`, and what it still does is dropped. The thread of a plain function cannot be killed: it continues, and
    its late result is dropped. A generator's text goes to `emit` piece by piece. An async one continues only when
    `emit` returns; a plain one may be up to 16 pieces ahead.

    Raises RunError: BAD_ARGUMENTS before the tool runs, TOOL_TIMEOUT, TOOL_FAILED with "Type: message" in one line, or
    OUTPUT_TOO_LARGE. Exceptions of `emit` are raised unchanged.
    """
    arguments = parse_arguments(arguments_json, tool.input_schema_json)
    seconds = tool.timeout if timeout is None else timeout
    if tool.remote is not None:  # it ends its calls itself: what runs is not in this process
        left = max(0.0, (seconds or LONGEST_CALL) - elapsed)
        return await tool.remote(arguments, context, bound_output(emit), timeout=left)
    # In a separate task: a tool that ignores its cancellation must not keep its caller waiting.
    call = _ToolCall(tool, emit)
    task = asyncio.get_running_loop().create_task(call.run(arguments, context), name=f"tool:{tool.name}")
    try:
        await asyncio.wait({task}, timeout=None if seconds is None else max(0.0, seconds - elapsed))
    finally:
        if not task.done():
            await call.end(task, abandoned)
    if call.is_over:
        raise build_timeout_error(tool.name, seconds or 0.0)
    try:
        return task.result()
    except _EmitFailed as failed:
        raise failed.error from failed.error.__cause__


def build_timeout_error(name: str, seconds: float) -> RunError:
    """Return the error of a call that has not ended within its timeout."""
    return RunError(f"The tool {name} did not end within {seconds:g} s.", reason=error_pb2.ERROR_REASON_TOOL_TIMEOUT)


def bound_output(emit: Emit) -> Emit:
    """Return what passes at most MAX_OUTPUT_BYTES of text on, and then once that more was left out."""
    left = MAX_OUTPUT_BYTES

    async def emit_within_bound(text: str) -> None:
        nonlocal left
        if left < 0 or not text:
            return
        data = text.encode("utf-8", "replace")  # protobuf strings cannot hold lone surrogates
        kept, left = data[:left].decode(errors="ignore"), left - len(data)
        await emit(kept if left >= 0 else f"{kept}\n[further output was left out]\n")

    return emit_within_bound


class _ToolCall:
    """One call of a tool, in its own task."""

    def __init__(self, tool: Tool, emit: Emit) -> None:
        self._tool = tool
        self._emit = emit
        self.is_over = False
        """True if its caller no longer waits for it, because of its timeout or a cancellation."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> list[message_pb2.Part]:
        """Run the tool. Raises RunError for every exception of its code, whatever its class.

        asyncio would let a KeyboardInterrupt or a SystemExit end the event loop.
        """
        task = asyncio.current_task()
        try:
            given = _convert_arguments(self._tool, arguments, context)
            return await _collect_result(await _call_function(self._tool.function, given), self._emit_text)
        except (_EmitFailed, RunError):
            raise
        except BaseException as error:
            if is_collected(error, task):
                raise
            if self.is_over:
                raise asyncio.CancelledError from error
            # Without a request to cancel this task, a CancelledError is the tool's own.
            raise _failure(self._tool, error) from None

    async def end(self, task: "asyncio.Task[list[message_pb2.Part]]", abandoned: AbandonedTasks | None) -> None:
        """Cancel the tool, and abandon it if it ignores that."""
        self.is_over = True
        task.add_done_callback(_retrieve)
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        finally:
            if not task.done():
                _log.warning("tool ignores its cancellation", tool=self._tool.name)
                if abandoned is not None:
                    abandoned.add(task)

    async def _emit_text(self, text: str) -> None:
        if self.is_over:
            raise asyncio.CancelledError  # a tool that ignored its cancellation streams nothing more
        if not text:
            return
        try:
            await self._emit(text.encode("utf-8", "replace").decode())  # protobuf strings cannot hold lone surrogates
        except Exception as error:
            raise _EmitFailed(error) from error


def _retrieve(task: "asyncio.Task[list[message_pb2.Part]]") -> None:
    if not task.cancelled():
        task.exception()  # mark it as retrieved: no one waits for it, and asyncio would log it


def _convert_arguments(tool: Tool, arguments: dict[str, Any], context: ToolContext) -> dict[str, Any]:
    if tool.arguments is not None:
        try:
            arguments = tool.arguments.convert(arguments)
        except ValidationError as error:
            raise bad_arguments([f"{value_path(each['loc'])}: {each['msg']}" for each in error.errors()]) from None
    if tool.context_parameter:
        arguments[tool.context_parameter] = context
    return arguments


async def _call_function(function: Callable[..., Any], arguments: dict[str, Any]) -> object:
    """Call the function: in a thread, unless the call only creates a coroutine or generator."""
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_kind(function) for is_kind in kinds):
        return function(**arguments)
    return await THREADS.run(lambda: function(**arguments))


async def _collect_result(value: object, emit: Emit) -> list[message_pb2.Part]:
    if isinstance(value, AsyncGenerator):
        return [(await _collect_stream(value, emit)).part()]
    if isinstance(value, Generator):
        streamed, returned = await pull(value, emit, THREADS)
        return result_parts(returned) if returned is not None else [streamed.part()]
    return result_parts(await value if inspect.isawaitable(value) else value)


async def _collect_stream(generator: AsyncGenerator[object, None], emit: Emit) -> Excerpt:
    streamed = Excerpt()
    async with aclosing(generator):
        async for piece in generator:
            if not isinstance(piece, str):
                raise TypeError(f"a streaming tool must yield str, and this one yielded a {type(piece).__name__}")
            streamed.add(piece)
            await emit(piece)
    return streamed


def _failure(tool: Tool, error: BaseException) -> RunError:
    """Log a tool's exception with its stack, and return the error that the model sees: one line without the stack."""
    _log.warning("tool failed", tool=tool.name, exc_info=get_code_stack(error))
    detail = " ".join(text_of_error(error).split())
    message = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
    return RunError(message[:_LONGEST_MESSAGE], reason=error_pb2.ERROR_REASON_TOOL_FAILED)


def needs_approval(tool: Tool, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call with these arguments, as JSON values, must be approved.

    If the predicate raises or returns no bool, that is logged and the call must be approved. It receives a copy of the
    arguments, so it cannot change those of the call.
    """
    if isinstance(tool.approval, bool):
        return tool.approval
    try:
        decision: object = tool.approval(copy.deepcopy(dict(arguments)))
    except BaseException as error:  # whatever its class: the predicate must not end the server
        stack = get_code_stack(error)
        _log.warning("approval predicate failed: approval is required", tool=tool.name, exc_info=stack)
        return True
    if isinstance(decision, bool):
        return decision
    if inspect.iscoroutine(decision):
        decision.close()  # otherwise Python warns that it was never awaited
    returned = type(decision).__name__
    _log.warning("approval predicate returned no bool: approval is required", tool=tool.name, returned=returned)
    return True
