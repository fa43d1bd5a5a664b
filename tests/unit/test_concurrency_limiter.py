"""Places in the bounds of subtrees: who runs at once, who waits, and in which order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import event_pb2, policy_pb2
from bough_server.engine.concurrency import ConcurrencyLimiter
from bough_server.engine.limits import Budget
from bough_server.engine.scheduler import Scheduler


def run_of(concurrency: int) -> Budget:
    return Budget(policy_pb2.Limits(concurrency=concurrency), owner="the run", place="`here`", depth=0)


def below(above: Budget, concurrency: int) -> Budget:
    return Budget(policy_pb2.Limits(concurrency=concurrency), owner="a", place="`here`", depth=1, above=above)


class Crowd:
    """Effects that take places, and what the tasks of their run would see."""

    def __init__(self) -> None:
        self.quiet = 0
        self.tasks = Scheduler("run", self._quiet)
        self.slots = ConcurrencyLimiter(self.tasks)
        self.inside: list[str] = []
        self.entered: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._all: dict[str, asyncio.Task[None]] = {}
        self.tasks.rest()  # the coroutine that runs the root waits for them

    def _quiet(self) -> None:
        self.quiet += 1

    def come(self, key: str, budget: Budget) -> None:
        self._leave[key] = asyncio.Event()
        self._all[key] = self.tasks.spawn(key, self._be(key, budget))

    async def _be(self, key: str, budget: Budget) -> None:
        async with self.slots.hold_slot(key, budget):
            self.inside.append(key)
            self.entered.append(key)
            try:
                await self._leave[key].wait()
            finally:
                self.inside.remove(key)

    async def go(self, key: str) -> None:
        self._leave[key].set()
        await self.settle()

    async def cancel(self, key: str) -> None:
        self._all[key].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        self.tasks.close()
        await self.tasks.stop("")


@asynccontextmanager
async def crowd_of() -> AsyncIterator[Crowd]:
    crowd = Crowd()
    try:
        yield crowd
    finally:
        await crowd.leave()


async def test_further_effects_wait_in_the_order_in_which_they_came() -> None:
    run = run_of(2)
    async with crowd_of() as crowd:
        for key in "abcd":
            crowd.come(key, run)
        await crowd.settle()
        assert crowd.inside == ["a", "b"]
        assert crowd.slots.has_waiting
        await crowd.go("b")
        assert crowd.inside == ["a", "c"]
        await crowd.go("a")
        assert crowd.inside == ["c", "d"]
        assert not crowd.slots.has_waiting


async def test_bounds_of_several_levels_hold_and_who_waits_for_one_holds_no_other() -> None:
    run = run_of(2)
    async with crowd_of() as crowd:
        child = below(run, 1)
        for key in ("child1", "child2"):
            crowd.come(key, child)
        crowd.come("other", run)
        await crowd.settle()
        assert crowd.inside == ["child1", "other"]
        crowd.come("last", run)
        await crowd.go("child1")
        assert crowd.inside == ["other", "child2"], "the first that waited, although the last fits as well"
        await crowd.go("other")
        assert crowd.inside == ["child2", "last"]


async def test_who_is_cancelled_while_waiting_leaves_the_row() -> None:
    run = run_of(1)
    async with crowd_of() as crowd:
        for key in "abc":
            crowd.come(key, run)
        await crowd.settle()
        await crowd.cancel("b")
        await crowd.cancel("a")
        assert crowd.entered == ["a", "c"]


async def test_who_is_cancelled_at_the_moment_of_getting_a_place_gives_it_on() -> None:
    run = run_of(1)
    async with crowd_of() as crowd:
        for key in "abc":
            crowd.come(key, run)
        await crowd.settle()
        end = event_pb2.AgentEvent(effect_key="a", tool_failed=event_pb2.ToolFailed())
        crowd.slots.release_slots([end])
        await crowd.cancel("b")
        assert crowd.entered == ["a", "c"]
        await crowd.go("c")
        for key in "de":
            crowd.come(key, run)
        await crowd.settle()
        assert crowd.inside == ["a", "d"], "one place is free again, and one only"


async def test_an_effect_that_was_ended_holds_no_place_whatever_its_code_still_does() -> None:
    run = run_of(1)
    async with crowd_of() as crowd:
        crowd.come("a", run)
        crowd.come("b", run)
        await crowd.settle()
        crowd.slots.release_slots([event_pb2.AgentEvent(effect_key="a", tool_started=event_pb2.ToolStarted())])
        assert crowd.slots.has_waiting
        crowd.slots.release_slots([event_pb2.AgentEvent(effect_key="a", llm_failed=event_pb2.LlmFailed())])
        await crowd.settle()
        assert crowd.inside == ["a", "b"]
        await crowd.go("a")
        crowd.come("c", run)
        await crowd.settle()
        assert crowd.inside == ["b"], "the place that it gave up is not given up again"
        await crowd.go("b")
        assert crowd.inside == ["c"]


async def test_no_call_is_admitted_while_calls_are_held_back() -> None:
    run = run_of(1)
    async with crowd_of() as crowd:
        crowd.come("a", run)
        crowd.come("b", run)
        await crowd.settle()
        crowd.slots.hold()
        await crowd.go("a")
        crowd.come("c", run)
        await crowd.settle()
        assert crowd.inside == []
        assert crowd.quiet, "who waits does not keep a run awake"


bounds = st.integers(1, 3)
comings = st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 9)), min_size=1, max_size=12)


@given(st.tuples(bounds, bounds, bounds), comings)
def test_places_are_never_too_many_and_all_come_in(
    concurrency: tuple[int, int, int], comings: list[tuple[int, int | None]]
) -> None:
    asyncio.run(come_and_go(concurrency, comings))


async def come_and_go(concurrency: tuple[int, int, int], comings: list[tuple[int, int | None]]) -> None:
    """Effects come to a run, two below it and one below that; after some of them one that is inside goes."""
    run = run_of(concurrency[0])
    budgets = [run, below(run, concurrency[1]), below(run, concurrency[2])]
    budgets.append(below(budgets[1], 1))
    whose: dict[str, Budget] = {}
    async with crowd_of() as crowd:
        for number, (place, leaving) in enumerate(comings):
            key = str(number)
            whose[key] = budgets[place]
            crowd.come(key, whose[key])
            await crowd.settle()
            if crowd.inside and leaving is not None:
                await crowd.go(crowd.inside[leaving % len(crowd.inside)])
            for budget in budgets:
                inside = [one for one in crowd.inside if budget in whose[one].chain()]
                assert len(inside) <= (budget.concurrency or 0)
        while crowd.inside:
            await crowd.go(crowd.inside[0])
        assert sorted(crowd.entered) == sorted(whose)
        assert not crowd.slots.has_waiting
