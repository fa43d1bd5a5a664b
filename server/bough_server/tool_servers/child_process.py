"""A child process that speaks MCP on its standard input and output: started, read, and ended with its whole group.

The transport of the `mcp` package is not used: it reads lines of any length into memory, and passes the child's
standard error to a file.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from bough_server.clock import loop_time
from bough_server.plain_text import one_line
from bough_server.tool_servers.connection import MAX_MESSAGE_BYTES

Received: TypeAlias = SessionMessage | Exception
Streams: TypeAlias = tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]
"""What the package's client reads from and writes to."""

END_SECONDS: Final = 2.0
"""How long a child may take to end when its standard input is closed, and again after SIGTERM."""
_POLL_SECONDS: Final = 0.02
_EXIT_POLL_SECONDS: Final = 0.5

_LONGEST_LINE: Final = 2_000
_MOST_LINES: Final = 100
_LINES_SECONDS: Final = 10.0
"""How many lines of a child's standard error are logged in so many seconds."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCommand:
    """A program to start: `env` is the whole of its environment."""

    server: str
    command: str
    args: Sequence[str]
    cwd: Path
    env: Mapping[str, str]


@asynccontextmanager
async def run_child(child: ChildCommand, lost: asyncio.Event) -> AsyncIterator[Streams]:
    """Start a child and yield the streams of its messages; end it and its process group when the context exits.

    When the child ends, or takes and sends no more, `lost` is set and the streams end. Raises OSError if it cannot be
    started.
    """
    process = await asyncio.create_subprocess_exec(
        child.command,
        *child.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=child.cwd,
        env=dict(child.env),
        start_new_session=True,
        limit=MAX_MESSAGE_BYTES,
    )
    incoming, received = anyio.create_memory_object_stream[Received](0)
    sent, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    pipes = _Pipes(child.server, process, incoming, lost)
    loop = asyncio.get_running_loop()
    tasks = {
        loop.create_task(pipes.read()),
        loop.create_task(pipes.write(outgoing)),
        loop.create_task(pipes.log_errors()),
        loop.create_task(pipes.close_after_exit()),
    }
    try:
        yield received, sent
    finally:
        received.close()
        sent.close()
        # In a task that nothing cancels: a child must not outlive its server.
        ending = loop.create_task(_end(process, tasks))
        await asyncio.shield(ending)


async def _end(process: asyncio.subprocess.Process, tasks: set[asyncio.Task[None]]) -> None:
    try:
        if process.stdin is not None:
            process.stdin.close()
        if not await _is_over(process):
            _signal_group(process, signal.SIGTERM)
            if not await _is_over(process):
                _signal_group(process, signal.SIGKILL)
                await _is_over(process)
        _signal_group(process, signal.SIGKILL)  # what it has started, and has not ended itself
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # Its pipes, which a process that it has started may still hold.
        process._transport.close()  # type: ignore[attr-defined]


async def _is_over(process: asyncio.subprocess.Process) -> bool:
    """Return whether a process ends within END_SECONDS; `process.wait()` would wait for its pipes as well."""
    deadline = loop_time() + END_SECONDS
    while process.returncode is None and loop_time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)
    return process.returncode is not None


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class _Pipes:
    """The pipes of a child, each with a task."""

    def __init__(
        self,
        server: str,
        process: asyncio.subprocess.Process,
        incoming: MemoryObjectSendStream[Received],
        lost: asyncio.Event,
    ) -> None:
        self._server, self._process, self._incoming, self._lost = server, process, incoming, lost

    def _end(self) -> None:
        self._lost.set()
        self._incoming.close()

    async def read(self) -> None:
        """Pass the child's messages on until its standard output ends, or a message is too long."""
        assert self._process.stdout is not None, "the child is started with pipes"
        try:
            while line := await self._process.stdout.readline():
                if (message := self._parse(line)) is not None:
                    await self._incoming.send(message)
        except ValueError:  # longer than the limit
            size = MAX_MESSAGE_BYTES // 1024**2
            _log.warning("tool server sent a message that is too long", server=self._server, limit_mib=size)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # no one reads any more
        finally:
            self._end()

    def _parse(self, line: bytes) -> SessionMessage | None:
        """Return a message; for one that is invalid but has an id, an error for who waits for that."""
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            if line.strip():
                text = one_line(line[:_LONGEST_LINE].decode(errors="replace"))
                _log.warning("tool server wrote something that is no message", server=self._server, line=text[:200])
        try:
            request_id = json.loads(line).get("id")
        except (ValueError, AttributeError, RecursionError):
            return None
        if not isinstance(request_id, int | str) or isinstance(request_id, bool):
            return None
        error = ErrorData(
            code=INTERNAL_ERROR, message="the answer is not valid: it breaks the rules of MCP or of Unicode"
        )
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error))

    async def write(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        """Pass messages to the child until it takes no more."""
        assert self._process.stdin is not None, "the child is started with pipes"
        with outgoing:
            async for sent in outgoing:
                data = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    self._process.stdin.write(f"{data}\n".encode())
                    await self._process.stdin.drain()
                except (ConnectionError, RuntimeError):
                    self._end()
                    return

    async def close_after_exit(self) -> None:
        """End the stream once the child has exited: a process that it started may keep its pipes open."""
        while self._process.returncode is None:  # noqa: ASYNC110 # process.wait() would wait for its pipes as well
            await asyncio.sleep(_EXIT_POLL_SECONDS)
        await asyncio.sleep(_EXIT_POLL_SECONDS)  # what it wrote last is still being read
        _log.info("tool server has exited", server=self._server, code=self._process.returncode)
        self._end()

    async def log_errors(self) -> None:
        """Log the lines of the child's standard error, cut and no more than so many in a time."""
        assert self._process.stderr is not None, "the child is started with pipes"
        began, logged = loop_time(), 0
        while data := await self._process.stderr.read(64 * 1024):
            if loop_time() - began > _LINES_SECONDS:
                began, logged = loop_time(), 0
            for line in data.decode(errors="replace").splitlines():
                logged += 1
                if logged <= _MOST_LINES and line.strip():
                    _log.info("tool server", server=self._server, stderr=one_line(line[:_LONGEST_LINE]))
                elif logged == _MOST_LINES + 1:
                    _log.warning("tool server writes more than is logged", server=self._server)
