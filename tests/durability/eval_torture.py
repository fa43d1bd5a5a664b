"""python -m tests.durability.eval_torture --cases 200 --kills 10: a server that is killed while it evaluates a set.

Two clients follow the evaluation, and rejoin it after every kill. Both have to see the same log, gapless; every turn of
every case has to run exactly once, and the verdict has to be that all cases passed. The last line counts what went
wrong; the exit code is 1 if anything did.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from signal import SIGKILL
from socket import socket
from typing import Final

from bough import AsyncClient, Rejoining
from bough.v1 import eval_set_pb2
from tests.durability.torture_evaluations import Outcome, Progress, made_set, passing_trials, runs_of
from tests.durability.torture_team import EVALUATED
from tests.support.processes import starting

PATIENCE: Final = 300.0
"""Seconds that the whole evaluation may take, kills included, before it counts as stuck."""

_REJOINING: Final = Rejoining(first_delay=0.02, longest_delay=0.3, timeout=PATIENCE, connect_timeout=PATIENCE)
_REQUEST: Final = "the-evaluation"
_LATEST_SECONDS: Final = 0.3
"""How long after the progress that it waits for a kill comes at most."""


async def torment(folder: Path, *, cases: int, kills: int, seed: int) -> Outcome:
    """Evaluate a set on a server that is killed so many times, spread over the evaluation."""
    chance = random.Random(seed)
    port = _free_port()
    address = f"127.0.0.1:{port}"
    start = partial(starting, write_team(folder), arguments=("--port", str(port)))
    seen = [Progress(), Progress()]
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        clients = [group.create_task(_follow(address, made_set(cases), each)) for each in seen]
        for kill in range(kills):
            async with start() as server:
                await server.serves()
                await seen[0].until_scored(cases * (kill + 1) // (kills + 2))
                await asyncio.sleep(chance.uniform(0, _LATEST_SECONDS))
                server.send(SIGKILL)
                await server.end()
        async with start() as server:
            await server.serves()
            await asyncio.gather(*clients)
            async with AsyncClient(address, timeout=PATIENCE) as client:
                runs = await runs_of(client, seen[0].events[0].evaluation_id)
    return Outcome(logs=[each.events for each in seen], runs=runs, server_said=server.said)


async def _follow(address: str, made: eval_set_pb2.EvalSet, progress: Progress) -> None:
    async with AsyncClient(address, timeout=PATIENCE, rejoining=_REJOINING) as client:
        await progress.follow(client, made, request_id=_REQUEST)


def write_team(folder: Path) -> Path:
    """Write a configuration with the agent; return its path."""
    config = folder / "bough.yaml"
    storage = {"url": "bough.db", "durability": "process"}
    config.write_text(json.dumps({"storage": storage, "python": [EVALUATED]}), encoding="utf-8")
    return config


def _free_port() -> int:
    with closing(socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Torment as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; any if none is given")
    arguments = parser.parse_args(argv)
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="eval-torture-") as folder:
        outcome = asyncio.run(torment(Path(folder), cases=arguments.cases, kills=arguments.kills, seed=seed))
    faults = outcome.faults(passing_trials(arguments.cases))
    for fault in faults:
        print(fault)
    print(f"events={len(outcome.logs[0])} runs={len(outcome.runs)} kills={arguments.kills} faults={len(faults)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
