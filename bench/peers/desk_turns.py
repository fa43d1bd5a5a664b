"""Turns of the desk, some at once, checked and timed: the same for Bough, for floors and for peers.

Programs of peers import it: it needs the standard library only. They answer a line `run COUNT AT_ONCE` by `answer`.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from bench.desk_team import SPECIALISTS
from tests.support.model_scenarios import TEXT

STREAMED: Final = (1 + len(SPECIALISTS)) * len(TEXT)
"""The characters of a turn's texts, those of specialists included."""

TURN_SECONDS: Final = 300.0
"""For a turn, and for each of its model calls, connecting included: a busy machine fails no system."""


@dataclass(slots=True)
class Turn:
    """What a client sees of one turn."""

    start: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    """When the first text arrived; 0 before."""
    streamed: int = 0
    answer: str = ""

    def take(self, text: str) -> None:
        """Count a streamed text, of any agent."""
        if text and not self.first:
            self.first = time.perf_counter()
        self.streamed += len(text)

    def fault(self) -> str:
        """Return what is wrong with it; empty if nothing is."""
        if self.answer != TEXT:
            return f"The answer is {self.answer[:80]!r}."
        if self.streamed != STREAMED:
            return f"{self.streamed} characters were streamed instead of {STREAMED}."
        return ""


RunTurn = Callable[[Turn], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """Some turns: the median seconds of those that succeeded, and a sentence for each that failed."""

    p50: float
    first_p50: float
    """From the start to the first streamed text."""
    failures: list[str]


async def run(run_turn: RunTurn, count: int, at_once: int) -> Lap:
    """Run so many turns, `at_once` together."""
    turns: list[tuple[float, float]] = []
    failures: list[str] = []

    async def timed() -> None:
        turn = Turn()
        try:
            await run_turn(turn)
        except Exception as error:  # of any framework: it is a failed turn, and the others continue
            failures.append(f"{type(error).__name__}: {error}"[:300])
            return
        if fault := turn.fault():
            failures.append(fault)
        else:
            turns.append((time.perf_counter() - turn.start, turn.first - turn.start))

    for _ in range(count // at_once):
        await asyncio.gather(*(timed() for _ in range(at_once)))
    for failure in failures:
        print(failure, file=sys.stderr)
    seconds, first = zip(*turns, strict=True) if turns else ((0.0,), (0.0,))
    return Lap(p50=median(seconds), first_p50=median(first), failures=failures)


async def answer(run_turn: RunTurn, words: list[str]) -> dict[str, Any]:
    """Run what a line asks for; return its lap for JSON."""
    return asdict(await run(run_turn, int(words[1]), int(words[2])))
