"""Recorded runs that are cut and finished again: after which events, how many at once, and how long each may take."""

import asyncio
import gc
import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bough.v1 import event_pb2
from bough_server.log import events
from tests.durability.prefixes.recovery import Finished, recover

T = TypeVar("T")
Check = Callable[[Finished, Sequence[event_pb2.AgentEvent]], None]
"""Asserts how a run ended that went on from a prefix."""

AT_ONCE = 4
"""How many harnesses stand at the same time."""

PATIENCE = 30.0
"""Seconds after which a run is stuck."""

_IN_FLIGHT = {events.LLM_STARTED, *events.DELTA_KINDS}

_PLAIN = {
    ("agent.run.started", "in flight"),
    ("in flight", "in flight"),
    ("in flight", "agent.llm.completed"),
    ("agent.llm.completed", "agent.step.completed"),
    ("agent.llm.completed", "agent.tool.started"),
    ("agent.tool.started", "agent.tool.started"),
    ("agent.tool.started", "agent.tool.completed"),
    ("agent.tool.started", "agent.sub_agent.started"),
    ("agent.sub_agent.started", "in flight"),
    ("agent.sub_agent.completed", "agent.tool.completed"),
    ("agent.tool.completed", "agent.tool.completed"),
    ("agent.tool.completed", "agent.step.completed"),
    ("agent.step.completed", "in flight"),
    ("agent.step.completed", "agent.sub_agent.completed"),
    ("agent.step.completed", "agent.run.completed"),
    ("agent.run.completed", ""),
}
"""Neighbours that sixteen to thirty-six of some forty scenarios have."""

_PLAIN_SHARE = 0.3
"""How many of them each run is cut between."""


def cuts(log: Sequence[event_pb2.AgentEvent], *, whole_grid: bool) -> list[int]:
    """Return the sequences after which a log is cut: once for each pair of kinds of neighbouring events.

    Inside an attempt of a model call, all its events count as one kind: a recovery repeats the attempt from its start,
    wherever in it the log ends. Of the pairs that most runs have, each run is cut at some. What is drawn is always the
    same for a run. The whole grid has all places.
    """
    if whole_grid:
        return [event.sequence for event in log]
    kinds = ["in flight" if events.kind_of(event) in _IN_FLIGHT else events.name_of(event) for event in log]
    places: dict[tuple[str, str], list[int]] = {}
    for event, kind, following in zip(log, kinds, [*kinds[1:], ""], strict=True):
        places.setdefault((kind, following), []).append(event.sequence)
    chance = random.Random(" ".join(kinds))
    plain = sorted(_PLAIN.intersection(places))
    left_out = set(chance.sample(plain, int(len(plain) * (1 - _PLAIN_SHARE))))
    return sorted(chance.choice(equal) for pair, equal in places.items() if pair not in left_out)


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
