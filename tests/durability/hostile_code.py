"""Agents, tools and functions that do to their server what code can do, short of killing its process."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import NoReturn

from bough_server import Context, Message, Part, Snapshot, agent, condition, input_builder, rewriter, tool


class Bare(BaseException):
    """An exception that no `except Exception` catches."""


KINDS: Mapping[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (KeyboardInterrupt, SystemExit, GeneratorExit, Bare, asyncio.CancelledError, MemoryError, ValueError)
}


def _fail(kind: str) -> NoReturn:
    raise KINDS[kind]("hostile")


@tool
async def raise_async(kind: str) -> str:
    """Fails."""
    await asyncio.sleep(0)
    _fail(kind)


@tool
def raise_plain(kind: str) -> str:
    """Fails in a thread."""
    _fail(kind)


@tool
def raise_generator(kind: str) -> Iterator[str]:
    """Fails between two pieces."""
    yield "one"
    _fail(kind)


@tool
async def raise_stream(kind: str) -> AsyncIterator[str]:
    """Fails between two pieces."""
    yield "one"
    _fail(kind)


@tool(approval=lambda arguments: _fail(str(arguments["kind"])))
def undecided(kind: str) -> str:
    """Cannot decide whether it must be approved."""
    return kind


@tool(timeout=0.1)
async def swallow(kind: str) -> str:
    """Ignores its cancellation for two seconds, and then some more."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.2)
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                raise
    return kind


@tool
async def stray(kind: str) -> str:
    """Leaves a task behind that fails after it has returned."""

    async def later() -> None:
        await asyncio.sleep(0.01)
        _fail(kind)

    asyncio.get_running_loop().create_task(later())
    asyncio.get_running_loop().call_later(0.02, _fail, kind)
    await asyncio.sleep(0.05)
    return "left"


@tool
async def not_json(kind: str) -> dict[str, float]:
    """Returns what JSON cannot hold."""
    return {kind: float("nan")}


@tool
async def block(kind: str) -> str:
    """Blocks the event loop for a while."""
    time.sleep(float(os.environ.get("HOSTILE_BLOCK", "1.5")))  # noqa: ASYNC251 # that is the point
    return kind


TOOLS = tuple(one.name for one in (raise_async, raise_plain, raise_generator, raise_stream, swallow, stray, not_json))


@agent(description="Raises.")
async def raiser(ctx: Context, input: Message) -> str:
    """Fails as it is told."""
    await ctx.now()
    _fail(input.parts[0].text)


@agent(description="Raises in a step, in a lane and in a child, and goes on.", agents=["raiser"])
async def survivor(ctx: Context, input: Message) -> str:
    """Answers after everything that it does has failed."""
    kind = input.parts[0].text

    async def work() -> None:
        await asyncio.sleep(0)
        _fail(kind)

    failed = 0
    for attempt in (
        lambda: ctx.step("work", work),
        lambda: ctx.step("number", _nan),
        lambda: ctx.dispatch("raiser", kind),
    ):
        try:
            await attempt()
        except Exception:
            failed += 1
    return f"{failed} failed"


async def _nan() -> float:
    return float("nan")


@agent(description="Answers what is no JSON.")
async def unspeakable(ctx: Context, input: Message) -> Message:
    """Answers NaN."""
    return Message(parts=[Part(data_json=json.dumps(float("nan")))])


@agent(description="Ignores its cancellation.")
async def immortal(ctx: Context, input: Message) -> str:
    """Never ends by itself within its run; it does within the minute."""
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.5)
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                raise
    return "at last"


@agent(description="Blocks the event loop until it is told not to.")
async def blocker(ctx: Context, input: Message) -> str:
    """Blocks as its input says: in Python, in a call of C, or in one that keeps the interpreter's lock."""
    how = input.parts[0].text if "HOSTILE_PEACE" not in os.environ else ""
    await ctx.sleep(0.3)
    print(f"blocking by {how}", file=sys.stderr, flush=True)
    if how == "sleep":
        time.sleep(3600)  # noqa: ASYNC251
    while how == "python":
        pass
    return "never"


@agent(description="Kills its server.")
async def killer(ctx: Context, input: Message) -> str:
    """Ends the process, once its first effect is recorded."""
    await ctx.sleep(0.3)
    os._exit(9)


@agent(description="Cancels every task of its server.")
async def canceller(ctx: Context, input: Message) -> str:
    """As code does that ends what it has started, and all else with it."""
    await ctx.sleep(0.3)
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(3600)
    return "never"


@agent(description="Takes a slow step.")
async def innocent(ctx: Context, input: Message) -> str:
    """Makes progress after a moment, if its server lives that long."""
    await ctx.step("work", lambda: asyncio.sleep(1.5))
    return "done"


@condition
def hostile_condition(snapshot: Snapshot) -> bool:
    """Fails as the run was told."""
    _fail(snapshot.user.parts[0].text)


@input_builder
def hostile_builder(snapshot: Snapshot) -> str:
    """Fails as the run was told."""
    _fail(snapshot.user.parts[0].text)


@rewriter
def hostile_rewriter(message: Message) -> list[Message]:
    """Fails with the first exception that nothing catches."""
    _fail("KeyboardInterrupt")
