"""Recorded runs that are cut and finished again: after which events, how many at once, and how long each may take."""

import asyncio
import gc
import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bough.v1 import event_pb2
from bough_server import events
from tests.durability.prefixes.recovery import Finished, recover

T = TypeVar("T")
Check = Callable[[Finished, Sequence[event_pb2.AgentEvent]], None]
"""Asserts how a run ended that went on from a prefix."""

AT_ONCE = 4
"""How many harnesses stand at the same time."""

PATIENCE = 30.0
"""Seconds after which a run is stuck."""

_IN_FLIGHT = {events.LLM_STARTED, *events.DELTA_KINDS}


def cuts(log: Sequence[event_pb2.AgentEvent], *, whole_grid: bool) -> list[int]:
    """Return the sequences after which a log is cut: once for each pair of kinds of neighbouring events.

    Inside an attempt of a model call, all its events count as one kind: a recovery repeats the attempt from its start,
    wherever in it the log ends. Which of several equal places is drawn is always the same. The whole grid has them all.
    """
    if whole_grid:
        return [event.sequence for event in log]
    kinds = ["in flight" if events.kind_of(event) in _IN_FLIGHT else events.name_of(event) for event in log]
    places: dict[tuple[str, str], list[int]] = {}
    for event, kind, following in zip(log, kinds, [*kinds[1:], ""], strict=True):
        places.setdefault((kind, following), []).append(event.sequence)
    chance = random.Random(len(log))
    return sorted(chance.choice(equal) for equal in places.values())


def run_in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run in a new event loop, and assert that no task was left behind with an error that nothing reads."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        result = await work
        gc.collect()
        return result

    result = asyncio.run(watched())
    assert complaints == []
    return result


async def finish(broken: Finished, through: int, folder: Path, check: Check) -> Finished:
    """Finish a run that was cut off after a sequence, and check how it ended."""
    prefix = broken.log[:through]
    try:
        async with asyncio.timeout(PATIENCE):
            finished = await recover(broken, through, folder)
        check(finished, prefix)
    except Exception as error:
        error.add_note(f"cut after {through}, {events.name_of(prefix[-1])}")
        raise
    return finished


async def finish_each(whole: Finished, cuts: Collection[int], folder: Path, check: Check) -> None:
    """Finish a run once for each cut, and check how each ended. Raises ExceptionGroup with all that did not."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(through: int) -> None:
        async with places:
            await finish(whole, through, folder / str(through), check)

    ended = await asyncio.gather(*map(one, cuts), return_exceptions=True)
    failures = [error for error in ended if isinstance(error, Exception)]
    if failures:
        raise ExceptionGroup(f"of {len(cuts)} prefixes", failures)
