"""Running a tool once: results, streams, failures, timeouts and cancellation."""

import asyncio
import contextvars
import gc
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.tasks import AbandonedTasks
from bough_server.tools.execution import CANCEL_SECONDS, execute
from bough_server.tools.tool import Tool, ToolContext, tool

Part = message_pb2.Part
LANE: contextvars.ContextVar[str] = contextvars.ContextVar("lane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    run_id: str = "run"
    session_id: str = "session"
    tenant_id: str = "tenant"
    user_id: str = "user"
    invocation_id: str = "invocation"
    agent: str = "lead"
    call_id: str = "call"
    idempotency_key: str = "key"


class Stream:
    """Takes what a tool streams; can hold a piece back, or fail."""

    def __init__(self, *, failure: Exception | None = None) -> None:
        self.pieces: list[str] = []
        self.first = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._failure = failure

    async def __call__(self, text: str) -> None:
        self.pieces.append(text)
        self.first.set()
        await self.go_on.wait()
        if self._failure is not None:
            raise self._failure


async def run(
    made: Tool, arguments_json: str = "{}", *, stream: Stream | None = None, timeout: float | None = None
) -> list[message_pb2.Part]:
    return await execute(made, arguments_json=arguments_json, context=Call(), emit=stream or Stream(), timeout=timeout)


async def failure(made: Tool, arguments_json: str = "{}", *, timeout: float | None = None) -> RunError:
    with pytest.raises(RunError) as failed:
        await run(made, arguments_json, timeout=timeout)
    return failed.value


async def test_a_plain_function_runs_in_a_thread_with_the_callers_context() -> None:
    @tool
    def where() -> dict[str, object]:
        """Tells where it runs."""
        return {"lane": LANE.get(), "is_main": threading.current_thread() is threading.main_thread()}

    LANE.set("left")
    assert await run(where) == [Part(data_json='{"lane":"left","is_main":false}')]


async def test_an_async_function_is_awaited_with_its_arguments_and_context() -> None:
    @tool
    async def greet(name: str, ctx: ToolContext, times: int = 2) -> str:
        """Greets."""
        return f"{ctx.agent}: {name * times}"

    assert await run(greet, '{"name": "ho"}') == [Part(text="lead: hoho")]


async def test_arguments_reach_the_function_in_its_own_types() -> None:
    from datetime import date

    @tool
    async def year(day: date) -> int:
        """Tells the year."""
        return day.year

    assert await run(year, '{"day": "2026-01-31"}') == [Part(data_json="2026")]
    refused = await failure(year, '{"day": "soon"}')
    assert refused.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert refused.message.startswith("The arguments do not fit: day: ")


async def test_bad_arguments_are_refused_before_the_tool_runs() -> None:
    ran: list[str] = []

    @tool
    def note(topic: str) -> None:
        """Notes."""
        ran.append(topic)

    refused = await failure(note, '{"topic": 1}')
    assert (refused.reason, refused.message) == (
        error_pb2.ERROR_REASON_BAD_ARGUMENTS,
        "The arguments do not fit: topic: 1 is not of type 'string'.",
    )
    assert ran == []


async def test_an_async_generator_streams_its_text_and_gives_it_joined() -> None:
    @tool
    async def count(to: int) -> AsyncIterator[str]:
        """Counts."""
        for number in range(to):
            yield f"{number} "
            yield ""

    stream = Stream()
    assert await run(count, '{"to": 3}', stream=stream) == [Part(text="0 1 2 ")]
    assert stream.pieces == ["0 ", "1 ", "2 "]


async def test_a_plain_generator_runs_in_one_thread_and_its_return_value_is_the_result() -> None:
    threads: set[int] = set()

    @tool
    def count(to: int) -> Iterator[str]:
        """Counts."""
        for number in range(to):
            threads.add(threading.get_ident())
            yield f"{number} "
        return {"last": to - 1}

    stream = Stream()
    assert await run(count, '{"to": 100}', stream=stream) == [Part(data_json='{"last":99}')]
    assert "".join(stream.pieces) == "".join(f"{number} " for number in range(100))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_plain_generator_without_a_return_value_gives_its_text() -> None:
    @tool
    def say() -> Iterator[str]:
        """Speaks."""
        yield "a"
        yield "b"

    assert await run(say) == [Part(text="ab")]


async def test_a_plain_generator_is_only_a_few_pieces_ahead_of_its_reader() -> None:
    made = 0

    @tool
    def pour() -> Iterator[str]:
        """Pours."""
        nonlocal made
        for _ in range(10_000):
            made += 1
            yield "x"

    stream = Stream()
    stream.go_on.clear()
    running = asyncio.create_task(run(pour, stream=stream))
    await stream.first.wait()
    assert made < 100
    stream.go_on.set()
    assert await running == [Part(text="x" * 10_000)]


async def test_an_async_generator_waits_for_its_reader() -> None:
    made: list[int] = []

    @tool
    async def pour() -> AsyncIterator[str]:
        """Pours."""
        for number in range(3):
            made.append(number)
            yield str(number)

    stream = Stream()
    stream.go_on.clear()
    running = asyncio.create_task(run(pour, stream=stream))
    await stream.first.wait()
    assert made == [0]
    stream.go_on.set()
    assert await running == [Part(text="012")]


@pytest.mark.parametrize("is_async", [True, False])
async def test_what_a_generator_yields_must_be_text(is_async: bool) -> None:
    @tool
    async def eventually() -> AsyncIterator[int]:
        """Yields a number."""
        yield 1

    @tool
    def at_once() -> Iterator[int]:
        """Yields a number."""
        yield 1

    failed = await failure(eventually if is_async else at_once)
    assert (failed.reason, failed.message) == (
        error_pb2.ERROR_REASON_TOOL_FAILED,
        "TypeError: a streaming tool must yield str, and this one yielded a int",
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no\nsuch   note"), "ValueError: no such note"),
        (KeyError("a"), "KeyError: 'a'"),
        (RuntimeError(), "RuntimeError"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
        (ValueError("x" * 5_000), "ValueError: " + "x" * 1_988),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_a_tool_raises_is_one_line_without_a_stack(
    error: BaseException, message: str, is_async: bool
) -> None:
    @tool
    async def eventually() -> str:
        """Fails."""
        raise error

    @tool
    def at_once() -> str:
        """Fails."""
        raise error

    failed = await failure(eventually if is_async else at_once)
    assert (failed.reason, failed.message) == (error_pb2.ERROR_REASON_TOOL_FAILED, message)


async def test_a_stop_iteration_in_a_thread_does_not_hang() -> None:
    @tool
    def stop() -> str:
        """Fails."""
        return next(iter([]))

    assert (await failure(stop)).reason == error_pb2.ERROR_REASON_TOOL_FAILED


async def test_a_result_that_is_no_json_is_the_tools_failure() -> None:
    @tool
    async def lock() -> object:
        """Gives a lock."""
        return threading.Lock()

    failed = await failure(lock)
    assert failed.reason == error_pb2.ERROR_REASON_TOOL_FAILED
    assert failed.message.startswith("TypeError: a lock is neither text nor JSON")


async def test_an_async_tool_is_cancelled_at_its_timeout() -> None:
    was_cancelled = asyncio.Event()

    @tool(timeout=60)
    async def wait() -> str:
        """Waits."""
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()
        return "never"

    failed = await failure(wait, timeout=0.01)
    assert (failed.reason, failed.message) == (
        error_pb2.ERROR_REASON_TOOL_TIMEOUT,
        "The tool wait did not end within 0.01 s.",
    )
    assert was_cancelled.is_set()


async def test_a_plain_tools_late_result_is_dropped() -> None:
    go_on = threading.Event()

    @tool(timeout=0.01)
    def wait() -> str:
        """Waits."""
        go_on.wait()
        return "late"

    failed = await failure(wait)
    go_on.set()
    assert failed.reason == error_pb2.ERROR_REASON_TOOL_TIMEOUT


async def test_a_tool_cannot_refuse_its_timeout() -> None:
    @tool
    async def stubborn() -> str:
        """Waits."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "anyway"
        return "never"

    assert (await failure(stubborn, timeout=0.01)).reason == error_pb2.ERROR_REASON_TOOL_TIMEOUT


async def test_cancelling_stops_an_async_generator_and_runs_its_end() -> None:
    ended = asyncio.Event()

    @tool
    async def pour() -> AsyncIterator[str]:
        """Pours."""
        try:
            yield "x"
        finally:
            ended.set()

    stream = Stream()
    stream.go_on.clear()
    running = asyncio.create_task(run(pour, stream=stream))
    await stream.first.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_cancelling_closes_a_plain_generator_in_its_thread() -> None:
    ended = threading.Event()

    @tool
    def pour() -> Iterator[str]:
        """Pours."""
        try:
            while True:
                yield "x"
        finally:
            ended.set()

    stream = Stream()
    stream.go_on.clear()
    running = asyncio.create_task(run(pour, stream=stream))
    await stream.first.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 10)


async def test_cancelling_does_not_wait_for_a_plain_function() -> None:
    begun, go_on = threading.Event(), threading.Event()

    @tool
    def wait() -> str:
        """Waits."""
        begun.set()
        go_on.wait()
        return "late"

    running = asyncio.create_task(run(wait))
    await asyncio.to_thread(begun.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go_on.set()


@pytest.mark.parametrize("is_async", [True, False])
async def test_what_the_stream_raises_is_not_the_tools_failure(is_async: bool) -> None:
    @tool
    async def eventually() -> AsyncIterator[str]:
        """Pours."""
        yield "x"

    @tool
    def at_once() -> Iterator[str]:
        """Pours."""
        yield "x"

    with pytest.raises(LookupError, match="the log is gone"):
        await run(eventually if is_async else at_once, stream=Stream(failure=LookupError("the log is gone")))


async def test_more_calls_than_threads_all_end() -> None:
    @tool
    def double(number: int) -> int:
        """Doubles."""
        return number * 2

    results = await asyncio.gather(*(run(double, f'{{"number": {number}}}') for number in range(200)))
    assert results == [[Part(data_json=str(number * 2))] for number in range(200)]


async def test_a_tool_without_hints_read_takes_its_values_as_they_are() -> None:
    bare = Tool(name="bare", description="", input_schema_json='{"type": "object"}', function=lambda a: sys.intern(a))
    assert await run(bare, '{"a": "x"}') == [Part(text="x")]


async def test_a_tool_that_swallows_its_cancellation_ends_with_its_timeout_and_stays_referenced() -> None:
    go_on, said, abandoned = asyncio.Event(), Stream(), AbandonedTasks()

    @tool
    async def stubborn() -> AsyncIterator[str]:
        """Never ends."""
        yield "before"
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await go_on.wait()
        yield "after"

    with pytest.raises(RunError) as failed:
        await execute(stubborn, arguments_json="{}", context=Call(), emit=said, timeout=0.01, abandoned=abandoned)
    assert failed.value.reason == error_pb2.ERROR_REASON_TOOL_TIMEOUT
    gc.collect()
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "tool:stubborn"]
    assert len(abandoned) == 1
    go_on.set()
    await asyncio.wait({task})
    assert said.pieces == ["before"]
    assert len(abandoned) == 0


async def test_a_cancelled_call_of_a_tool_that_swallows_it_is_abandoned() -> None:
    started, abandoned = asyncio.Event(), AbandonedTasks()

    @tool
    async def stubborn() -> str:
        """Ends late."""
        with suppress(asyncio.CancelledError):
            started.set()
            await asyncio.Event().wait()
        await asyncio.sleep(CANCEL_SECONDS * 2)
        return "late"

    calling = execute(stubborn, arguments_json="{}", context=Call(), emit=Stream(), abandoned=abandoned)
    running = asyncio.create_task(calling)
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(abandoned) == 1
    while len(abandoned):
        await asyncio.wait({task for task in asyncio.all_tasks() if task.get_name() == "tool:stubborn"})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
async def test_a_number_that_json_does_not_have_is_the_tools_failure(number: float) -> None:
    @tool
    async def measure() -> dict[str, float]:
        """Measures."""
        return {"size": number}

    @tool
    async def part() -> message_pb2.Part:
        """Makes its own JSON."""
        return Part(data_json=json.dumps([number]))

    @tool
    async def text() -> dict[str, str]:
        """Speaks of it."""
        return {"size": "NaN or Infinity"}

    for made in (measure, part):
        failed = await failure(made)
        assert failed.reason == error_pb2.ERROR_REASON_TOOL_FAILED
        assert failed.message == f"TypeError: {json.dumps(number)} is not JSON; return null or a text instead"
    assert await run(text) == [Part(data_json='{"size":"NaN or Infinity"}')]
