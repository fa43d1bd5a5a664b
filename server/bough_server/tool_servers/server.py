"""One tool server: the task that connects to it, reads its list and reconnects, and the calls of its tools."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog

from bough.v1 import error_pb2, message_pb2, tool_pb2
from bough_server.clock import Clock, loop_time
from bough_server.errors import RunError, ToolOutcomeUnknown
from bough_server.ids import new_uuid4
from bough_server.threads import run_in_thread
from bough_server.tool_servers.config import ToolServerSection
from bough_server.tool_servers.connection import (
    LIST_SECONDS,
    Emit,
    ListedTool,
    NotSent,
    OutcomeUnknown,
    ServerCall,
    ToolConnection,
    Unreachable,
)
from bough_server.tool_servers.offers import ServerOffer, offer_tools

FIRST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 30.0
"""Seconds between attempts to connect: they double, and begin again after a connection that has lived for a minute."""
_STABLE_SECONDS: Final = 60.0

RELIST_SECONDS: Final = 300.0
"""After how many seconds a list is read again, if the server does not say that it has changed."""

CANCEL_SECONDS: Final = 0.75
"""Seconds that the cancellation of a call may take to be sent."""

Connect = Callable[[], Awaitable[ToolConnection]]
"""Opens a connection. Raises Unreachable."""

_log = structlog.get_logger(__name__)


class ToolServer:
    """A tool server, reached by one connection at a time, which all runs of this process share."""

    def __init__(
        self, name: str, section: ToolServerSection, connect: Connect, *, clock: Clock, on_list: Callable[[], None]
    ) -> None:
        self.name, self.section = name, section
        self._connect, self._clock, self._on_list = connect, clock, on_list
        self.state: tool_pb2.ToolServerState.ValueType = tool_pb2.TOOL_SERVER_STATE_CONNECTING
        self.problem = ""
        """Why it is not READY, or why its list could not be read again, in a sentence."""
        self.offer = ServerOffer(name=name, section=section, is_listed=False)
        """What it offers, of the list that was read last."""
        self.list_time_ns: int | None = None
        self._listed: Sequence[ListedTool] | None = None
        self._connection: ToolConnection | None = None
        self._connected = asyncio.Event()
        self._settled = asyncio.Event()
        self._hurry = asyncio.Event()
        self._slots = asyncio.Semaphore(section.max_concurrency)
        # Only to spread attempts: nothing of it is seen in a run.
        self._random = random.Random(new_uuid4())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect, in the background; a second call has no effect."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"tool-server:{self.name}")

    async def close(self) -> None:
        """End the connection, and a child process with it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def wait_until_settled(self) -> None:
        """Wait until its list has been read once, or the first attempt has failed."""
        await self._settled.wait()

    async def call(self, call: ServerCall, emit: Emit, *, timeout: float) -> Sequence[message_pb2.Part]:
        """Call a tool within a timeout, in seconds, and return its result.

        A request that did not reach the server is sent again until then. Waiting for one of the `max_concurrency` slots
        counts in no timeout. Raises RunError: TOOL_SERVER_UNAVAILABLE, TOOL_TIMEOUT, what the tool fails with, and
        ToolOutcomeUnknown.
        """
        self.start()
        async with self._slots:
            deadline, delay, why = loop_time() + timeout, FIRST_DELAY, ""
            while True:
                connection = await self._wait_for_connection(deadline, why)
                try:
                    return await self._call_on(connection, call, emit, deadline=deadline, timeout=timeout)
                except NotSent as refusal:
                    why = str(refusal)
                if loop_time() + delay >= deadline:
                    raise self._build_unavailable_error(why)
                await self._clock.sleep(self._jitter(delay))
                delay = min(2 * delay, LONGEST_DELAY)

    async def _wait_for_connection(self, deadline: float, why: str) -> ToolConnection:
        if self._connection is None:
            self._hurry.set()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    while self._connection is None:
                        await self._connected.wait()
        if self._connection is None:
            raise self._build_unavailable_error(why)
        return self._connection

    def _build_unavailable_error(self, why: str) -> RunError:
        reason = why or self.problem.rstrip(".") or "it has not answered yet"
        return RunError(
            f"The tool server {self.name!r} cannot be reached: {reason}.",
            reason=error_pb2.ERROR_REASON_TOOL_SERVER_UNAVAILABLE,
            retryable=True,
        )

    async def _call_on(
        self, connection: ToolConnection, call: ServerCall, emit: Emit, *, deadline: float, timeout: float
    ) -> Sequence[message_pb2.Part]:
        # In a separate task: a connection that breaks may cancel what uses it, which is no cancellation of the call.
        task = asyncio.get_running_loop().create_task(
            _collect(connection, call, emit, max(0.0, deadline - loop_time())), name=f"tool-call:{self.name}"
        )
        try:
            await asyncio.wait({task}, timeout=max(0.0, deadline - loop_time()))
            is_late = not task.done()
        finally:
            if not task.done():
                task.add_done_callback(_retrieve)
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if is_late:
            raise RunError(
                f"The tool server {self.name!r} did not answer within {timeout:g} s.",
                reason=error_pb2.ERROR_REASON_TOOL_TIMEOUT,
            )
        try:
            return task.result()
        except (OutcomeUnknown, asyncio.CancelledError) as unknown:
            raise ToolOutcomeUnknown(
                f"The connection to the tool server {self.name!r} was lost after the call had been sent"
                f"{f' ({unknown})' if str(unknown) else ''}: it is unknown whether it took effect."
            ) from None

    async def _run(self) -> None:
        delay = FIRST_DELAY
        while True:
            began = loop_time()
            try:
                await self._serve()
                problem = "The connection was lost."
            except Unreachable as error:
                problem = str(error)
            except Exception:  # nothing that a tool server does may end the task that owns it
                _log.exception("tool server failed", server=self.name)
                problem = "Its connection failed; the server's log has the details."
            self._set_problem(problem)
            if loop_time() - began >= _STABLE_SECONDS:
                delay = FIRST_DELAY
            await self._wait_before_next(self._jitter(delay))
            delay = min(2 * delay, LONGEST_DELAY)

    def _jitter(self, delay: float) -> float:
        return delay * (0.75 + self._random.random() / 2)

    async def _wait_before_next(self, delay: float) -> None:
        """Wait before the next attempt; a call that waits for a connection makes the first waits shorter."""
        self._hurry.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._hurry.wait()
                await self._clock.sleep(min(delay, FIRST_DELAY))

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("tool server is unavailable", server=self.name, problem=problem)
        self.state, self.problem = tool_pb2.TOOL_SERVER_STATE_UNAVAILABLE, problem
        self._settled.set()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[ToolConnection]:
        try:
            async with asyncio.timeout(self.section.connect_timeout):
                connection = await self._connect()
        except TimeoutError:
            raise Unreachable(f"It did not begin to speak within {self.section.connect_timeout:g} s.") from None
        try:
            yield connection
        finally:
            self._connection = None
            self._connected.clear()
            await connection.close()

    async def _serve(self) -> None:
        """Connect, and keep the list up to date until the connection is lost. Raises Unreachable."""
        async with self._open() as connection:
            await self._read_list(connection)
            self._connection = connection
            self._connected.set()
            delay = FIRST_DELAY
            while True:
                is_ready = self.state == tool_pb2.TOOL_SERVER_STATE_READY
                with suppress(TimeoutError):
                    async with asyncio.timeout(RELIST_SECONDS if is_ready else self._jitter(delay)):
                        if not await connection.wait_for_change():
                            return
                try:
                    await self._read_list(connection)
                    delay = FIRST_DELAY
                except Unreachable as error:  # the list before stays, and calls in flight may still be answered
                    self._set_problem(str(error))
                    delay = min(2 * delay, LONGEST_DELAY)

    async def _read_list(self, connection: ToolConnection) -> None:
        try:
            async with asyncio.timeout(LIST_SECONDS):
                listed = await connection.list_tools()
        except TimeoutError:
            raise Unreachable(f"Its list of tools did not end within {LIST_SECONDS:g} s.") from None
        if listed != self._listed:
            # In a thread: to check the schemas of thousands of tools takes seconds.
            self.offer = await run_in_thread(offer_tools, self.name, self.section, listed)
        self._listed, self.list_time_ns = listed, self._clock.now_ns()
        if self.state != tool_pb2.TOOL_SERVER_STATE_READY:
            _log.info("tool server is ready", server=self.name, tools=len(listed))
        self.state, self.problem = tool_pb2.TOOL_SERVER_STATE_READY, ""
        self._on_list()
        self._settled.set()


async def _collect(
    connection: ToolConnection, call: ServerCall, emit: Emit, timeout: float
) -> Sequence[message_pb2.Part]:
    return await connection.call(call, emit, timeout=timeout)


def _retrieve(task: "asyncio.Task[Sequence[message_pb2.Part]]") -> None:
    if not task.cancelled():
        task.exception()  # mark it as retrieved: no one waits for it, and asyncio would log it
