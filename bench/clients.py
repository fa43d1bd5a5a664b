"""The clients case: the desk's turn followed by the client of each language, and rejoined after a restart."""

import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from bench.desk_team import QUESTION, write_project
from bench.figures import CaseResult, Figure
from bench.programs import cpu_seconds_of
from bench.servers import bough_server, model_server
from tests.contract.driver_process import DriverProcess, driving
from tests.contract.languages import COMMANDS, LANGUAGES, why_missing
from tests.support.cutting_proxy import proxying
from tests.support.model_scenarios import TEXT
from tests.support.processes import serving

ROUNDS: Final = 5
RESTARTS: Final = 3
WATCHED: Final = 20
"""How often a finished turn is followed in one round: a single one is over in milliseconds."""

PACE_MS: Final = 10
_BEFORE_KILL: Final = 40

Line = Mapping[str, object]


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    figures: list[Figure] = []
    failures: list[str] = []
    for language in LANGUAGES:
        if reason := why_missing(language):
            print(f"not measured: {reason}", file=sys.stderr)
            continue
        place = folder / language
        place.mkdir()
        async with model_server(place) as base_url, model_server(place, delta_interval_ms=PACE_MS) as paced:
            config = write_project(place, base_url=base_url, paced_base_url=paced)
            figures += await _followed(language, place, config, failures)
            figures.append(await _rejoined(language, place, config, failures))
    return CaseResult(figures=figures, failures=failures)


async def _followed(language: str, folder: Path, config: Path, failures: list[str]) -> Sequence[Figure]:
    """Turns as they happen, then a finished one again and again; the first round of each is not counted."""
    first, speed, cpu = list[float](), list[float](), list[float]()
    async with bough_server(folder, config) as server, _driver(language, server.address, folder) as driver:
        for number in range(ROUNDS + 1):
            start, used = time.perf_counter(), cpu_seconds_of(driver.pid)
            printed = driver.perform(_run("lead"))
            events = [(await anext(printed))["event"]]
            reached = time.perf_counter() - start
            events += [one["event"] async for one in printed if "event" in one]
            failures += _fault(language, events)
            turn = (cpu_seconds_of(driver.pid) - used) * 1000
            watch = _watch(events[0]["runId"], collect=True)
            start = time.perf_counter()
            for _ in range(WATCHED):
                failures += _collected_fault(language, [one async for one in driver.perform(watch)])
            watched = len(events) * WATCHED / (time.perf_counter() - start)
            if number:
                first.append(reached * 1000)
                speed.append(watched)
                cpu.append(turn)
    return [
        Figure(case="clients", what=f"{language}: time to the first event of a turn", unit="ms", rounds=first),
        Figure(case="clients", what=f"{language}: events of a finished turn, collected", unit="1/s", rounds=speed),
        Figure(
            case="clients", what=f"{language}: CPU of the client for a turn, printed as JSON", unit="ms", rounds=cpu
        ),
    ]


async def _rejoined(language: str, folder: Path, config: Path, failures: list[str]) -> Figure:
    """From the moment that a killed server serves again to the next event that the client delivers."""
    took = []
    async with proxying("") as proxy, _driver(language, proxy.address, folder) as driver:
        for _ in range(RESTARTS):
            async with serving(config, is_cold=True) as server:
                proxy.target = server.address
                printed = driver.perform(_run("paced_lead"))
                events = [(await anext(printed))["event"] for _ in range(_BEFORE_KILL)]
                server.send(signal.SIGKILL)
                await server.end()
            async with serving(config, is_cold=True) as server:
                proxy.target, back = server.address, time.perf_counter()
                last = 0.0
                async for one in printed:
                    if "event" in one:
                        events.append(one["event"])
                        # What was on its way when the server died comes first.
                        if "runResumed" in one["event"]:
                            last = time.perf_counter()
                took.append((last - back) * 1000)
            failures += _fault(language, events)
    what = f"{language}: next event after a killed server serves again"
    return Figure(case="clients", what=what, unit="ms", rounds=took)


@asynccontextmanager
async def _driver(language: str, address: str, folder: Path) -> AsyncIterator[DriverProcess]:
    async with driving(COMMANDS[language](), address, folder / "driver.stderr") as driver:
        yield driver


def _run(agent: str) -> Line:
    deltas = {"passthrough": {}}
    request = {"agent": agent, "input": {"parts": [{"text": QUESTION}]}, "policy": {"deltas": deltas}}
    return {"call": "AgentService.Run", "request": request}


def _watch(run_id: str, *, collect: bool) -> Line:
    return {"call": "AgentService.WatchRun", "request": {"runId": run_id}, "collect": collect}


def _fault(language: str, events: Sequence[Mapping[str, Any]]) -> list[str]:
    sequences = [int(event["sequence"]) for event in events]
    if sequences != list(range(1, len(events) + 1)):
        return [f"{language}: the sequences are not each there once: {sequences}"]
    if "runCompleted" not in events[-1]:
        return [f"{language}: the last event is not the end of the run: {events[-1]}"]
    return []


def _collected_fault(language: str, printed: Sequence[Mapping[str, Any]]) -> list[str]:
    if printed[0].get("answer", {}).get("text") != TEXT:
        return [f"{language}: a finished turn was collected as {printed}"]
    return []
