"""The waiting case: memory and delay of many turns that wait for their model at once, beside as many bare calls."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk_team import write_project
from bench.figures import Aim, CaseResult, Figure
from bench.programs import Program, asked
from bench.servers import bough_server, model_server, until_open
from bench.waiting_calls import SCENARIO, spread
from bench.waiting_turns import WaitingTurns

TURNS: Final = 1_000
"""As many as the `openai` client opens connections to one address."""

MODEL_SECONDS: Final = 2
ROUNDS: Final = 3
WARM: Final = 16
"""Turns that wait already, or have ended, when counting begins: what is loaded once belongs to no turn."""

FLOOR: Final = "bare openai, raw stream"
Spread = Mapping[str, float]
Hold = Callable[[int], Awaitable[None]]


async def measure(folder: Path, *, turns: int = TURNS, rounds: int = ROUNDS) -> CaseResult:
    """Runs the case in an empty folder."""
    memory = await _memory(folder, turns)
    ours, floor = await _delays(folder, turns, rounds)
    failed = sum(int(told["failed"]) for told in [*ours, *floor])
    figures = [
        memory,
        *(
            Figure(
                case="waiting",
                what=f"{turns:,} turns at once, model {MODEL_SECONDS} s: {name} of the delay",
                unit="ms",
                rounds=[(told[name] - MODEL_SECONDS) * 1000 for told in ours],
                floor=FLOOR,
                floor_rounds=[(told[name] - MODEL_SECONDS) * 1000 for told in floor],
            )
            for name in ("p50", "p99")
        ),
        Figure(
            case="waiting",
            what=f"CPU of a turn of one call, {turns:,} at once",
            unit="ms",
            rounds=[told["cpu"] * 1000 for told in ours],
            floor=FLOOR,
            floor_rounds=[told["cpu"] * 1000 for told in floor],
        ),
        Figure(case="waiting", what="failed turns", unit="turns", rounds=[failed], aim=Aim("at most", 0, "median")),
    ]
    return CaseResult(figures=figures, failures=[f"{failed} turns or bare calls failed."] if failed else [])


async def _memory(folder: Path, turns: int) -> Figure:
    """What one more turn that waits takes, in kilobytes, and one more bare call."""
    async with model_server(folder, scenario="slow-start") as base_url:
        config = write_project(_made(folder / "held"), base_url=base_url)
        async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
            client = WaitingTurns(channel)
            ours = await _grown(server, base_url, turns, client.hold)
            await client.let_go()
            await until_open(base_url, 0)
        async with asked(folder, "waiting_floor", base_url) as program:

            async def hold(count: int) -> None:
                await program.ask("hold", count)

            floor = await _grown(program, base_url, turns, hold)
    return Figure(
        case="waiting",
        what=f"memory of a waiting turn, of {turns:,}",
        unit="kB",
        rounds=[ours],
        floor=FLOOR,
        floor_rounds=[floor],
    )


async def _grown(program: Program, base_url: str, turns: int, hold: Hold) -> float:
    await hold(WARM)
    await until_open(base_url, WARM)
    before = program.resident_megabytes()
    await hold(turns - WARM)
    await until_open(base_url, turns)
    return (program.resident_megabytes() - before) * 1000 / (turns - WARM)


async def _delays(folder: Path, turns: int, rounds: int) -> tuple[Sequence[Spread], Sequence[Spread]]:
    """How long turns took, and bare calls, round by round in turns."""
    ours: list[Spread] = []
    floor: list[Spread] = []
    async with model_server(folder, scenario=SCENARIO, delay_ms=MODEL_SECONDS * 1000) as base_url:
        config = write_project(_made(folder / "timed"), base_url=base_url)
        async with (
            bough_server(folder, config) as server,
            aio.insecure_channel(server.address) as channel,
            asked(folder, "waiting_floor", base_url) as program,
        ):
            client = WaitingTurns(channel)
            await client.run(WARM)
            await program.ask("run", WARM)

            async def run(count: int) -> Spread:
                return spread(await client.run(count))

            for _ in range(rounds):
                floor.append(await _with_cpu(program, turns, partial(program.ask, "run")))
                ours.append(await _with_cpu(server, turns, run))
    return ours, floor


async def _with_cpu(program: Program, turns: int, run: Callable[[int], Awaitable[Spread]]) -> Spread:
    """What a round told, and the CPU seconds that a turn of it took in the program's process."""
    start = program.cpu_seconds()
    told = await run(turns)
    return {**told, "cpu": (program.cpu_seconds() - start) / turns}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
