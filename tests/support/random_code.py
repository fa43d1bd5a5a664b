"""Random agents in code for properties: nested lanes, children with little time, steps that take time; no models."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from bough.v1 import agent_pb2, message_pb2, policy_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.clock import Clock
from bough_server.errors import RunError
from bough_server.runtime.agent import Context
from tests.support.held_clock import HeldClock

KINDS = ("now", "step", "sleep", "dispatch", "dispatch", "gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One thing that code does: an effect, lanes at once, or a child with so many seconds; 0 for no bound."""

    kind: str
    seconds: int = 0
    aborts: bool = False
    is_caught: bool = True
    """Whether the code goes on where it fails."""
    child: "Code | None" = None
    lanes: "Sequence[Sequence[Act]]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """An agent: what it does in order, and whether it fails then."""

    name: str
    acts: Sequence[Act] = ()
    fails: bool = False

    def everybody(self) -> "Iterator[Code]":
        """It and all that it may call."""
        yield self
        yield from _called(self.acts)


def _called(acts: Sequence[Act]) -> Iterator[Code]:
    for act in acts:
        if act.child is not None:
            yield from act.child.everybody()
        for lane in act.lanes:
            yield from _called(lane)


@dataclass(slots=True)
class Maker:
    """Makes agents of random numbers, at most so many."""

    numbers: random.Random
    left: int = 12
    made: int = field(default=0)

    def code(self, depth: int) -> Code:
        """An agent that may call others so many levels deep."""
        name = f"a{self.made}"
        self.made += 1
        return Code(name=name, acts=self._acts(depth, lanes=2), fails=self.numbers.random() < 0.15)

    def _acts(self, depth: int, *, lanes: int) -> Sequence[Act]:
        return [self._act(depth, lanes) for _ in range(self.numbers.randint(1, 3))]

    def _act(self, depth: int, lanes: int) -> Act:
        kind = self.numbers.choice(KINDS)
        if kind == "dispatch" and depth and self.made < self.left:
            return Act(
                kind=kind,
                seconds=self.numbers.choice([0, 1, 1, 2, 3]),
                aborts=self.numbers.random() < 0.2,
                is_caught=self.numbers.random() < 0.8,
                child=self.code(depth - 1),
            )
        if kind == "gather" and lanes:
            count = self.numbers.randint(1, 3)
            is_caught = self.numbers.random() < 0.7
            return Act(kind=kind, is_caught=is_caught, lanes=[self._acts(depth, lanes=lanes - 1) for _ in range(count)])
        return Act(kind=kind if kind in ("now", "sleep") else "step", seconds=self.numbers.choice([0, 1, 1, 2, 5]))


def agent_of(code: Code, clock: Clock) -> FunctionAgent:
    """The agent."""
    links = [_link(act) for act in _dispatches(code.acts)]

    @agent(name=code.name, description="Does what it does.", agents=links)
    async def perform(ctx: Context, input: message_pb2.Message) -> str:
        await _perform(ctx, code.acts, clock)
        if code.fails:
            raise ValueError("as it was to")
        return f"{code.name} is done"

    return perform


def _dispatches(acts: Sequence[Act]) -> Iterator[Act]:
    for act in acts:
        if act.child is not None:
            yield act
        for lane in act.lanes:
            yield from _dispatches(lane)


def _link(act: Act) -> agent_pb2.AgentLink:
    assert act.child is not None
    link = agent_pb2.AgentLink(agent=act.child.name)
    if act.seconds:
        link.limits.wall_duration.FromSeconds(act.seconds)
    if act.aborts:
        link.on_failure = policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT
    return link


async def _perform(ctx: Context, acts: Sequence[Act], clock: Clock) -> None:
    for act in acts:
        with suppress(*([RunError, ValueError] if act.is_caught else [])):
            await _do(ctx, act, clock)


async def _do(ctx: Context, act: Act, clock: Clock) -> None:
    if act.kind == "now":
        await ctx.now()
    elif act.kind == "sleep":
        await ctx.sleep(act.seconds)
    elif act.kind == "step":
        await ctx.step("work", lambda: clock.sleep(act.seconds))
    elif act.child is not None:
        await ctx.dispatch(act.child.name, "go")
    else:
        await ctx.gather(*(lambda lane, acts=acts: _perform(lane, acts, clock) for acts in act.lanes))


@asynccontextmanager
async def passing_time(clock: HeldClock, numbers: random.Random) -> AsyncIterator[None]:
    """Let the time of a clock pass while other tasks work: sleepers wake after some turns of the event loop."""

    async def go_on() -> None:
        while True:
            await clock.next_sleep()
            for _ in range(numbers.randint(1, 30)):
                await asyncio.sleep(0)
            clock.advance(await clock.next_sleep())

    going = asyncio.ensure_future(go_on())
    try:
        yield
    finally:
        going.cancel()
        await asyncio.wait({going})
