"""python -m tests.durability.torture --kills 50 --clients 16: a server that is killed while its clients take turns.

It is killed at random moments, also while it starts, now and then told to stop in between, and started again on the
same port and file. Every client has to see every sequence of its runs exactly once and in order, and the right answers;
nothing may be stuck, and nothing that had ended may run again. The last line counts what went wrong; the exit code is 1
if anything did.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from socket import socket
from typing import Final

from tests.durability.torture_clients import Client, Faults
from tests.durability.torture_judge import Evidence, judge
from tests.durability.torture_team import Mind, write_team
from tests.support.model_server import serving_model
from tests.support.processes import Serving, starting

_WHILE_STARTING: Final = 0.2
"""How many of the kills hit a server that does not serve yet."""

_TOLD_TO_STOP: Final = 0.1
"""How many servers more are told to stop by SIGTERM, for each that is killed."""

_LONGEST_START: Final = 1.5
_SHORTEST_LIFE: Final = 0.3
_LONGEST_LIFE: Final = 2.5
_WORD_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When and how a server is ended: so many seconds after it began to start, or to serve."""

    while_starting: bool = False
    seconds: float
    signal: Signals = SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How it went."""

    runs: int
    kills: int
    faults: Faults

    def __str__(self) -> str:
        counts = self.faults.counts
        return (
            f"runs={self.runs} kills={self.kills} duplicates={counts['duplicates']} lost={counts['lost']} "
            f"stuck={counts['stuck']}"
        )


def moments(seed: int, kills: int) -> Iterator[Moment]:
    """Random moments. After a server that never served comes one that does: a run has to get on now and then."""
    chance, could_serve = random.Random(seed), True
    for _ in range(kills):
        if chance.random() < _TOLD_TO_STOP:
            could_serve = True
            yield Moment(seconds=chance.uniform(_SHORTEST_LIFE, _LONGEST_LIFE), signal=SIGTERM)
        if could_serve and chance.random() < _WHILE_STARTING:
            could_serve = False
            yield Moment(while_starting=True, seconds=chance.uniform(0, _LONGEST_START))
        else:
            could_serve = True
            yield Moment(seconds=chance.uniform(_SHORTEST_LIFE, _LONGEST_LIFE))


async def torture(folder: Path, *, kills: int, turns: int, seed: int) -> Report:
    """Lets so many clients take turns at once while their server is killed so many times, and judges it."""
    faults = Faults()
    evidence = await torment(folder, faults, turns=turns, when=[*moments(seed, kills)])
    return Report(runs=await judge(evidence, faults), kills=kills, faults=faults)


async def torment(folder: Path, faults: Faults, *, turns: int, when: Sequence[Moment]) -> Evidence:
    """Ends a server at these moments under clients that take so many turns at once; what they notice is a fault."""
    mind, effects, over = Mind(), folder / "effects.jsonl", asyncio.Event()
    effects.touch()
    async with serving_model(mind, delta_interval=_WORD_SECONDS) as model:
        config, port = write_team(folder, model.base_url), _free_port()
        start = partial(
            starting,
            config,
            arguments=("--port", str(port)),
            environment={"TORTURE_EFFECTS": str(effects)},
            is_cold=True,
        )
        clients = [Client(f"127.0.0.1:{port}", number, faults) for number in range(turns)]
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(client.take_turns(over)) for client in clients]
            for moment in when:
                async with start() as server:
                    await _end(server, moment, faults)
            over.set()
            async with start() as server:
                await server.serves()
                await asyncio.wait(callers)
    if "Traceback" in server.said:
        faults.add("lost", f"a server logged a traceback: {server.said.partition('Traceback')[2][:2000]}")
    seen = [turn for client in clients for turn in client.turns]
    return Evidence(config=config, turns=seen, asked=mind.asked, effects=effects)


async def _end(server: Serving, moment: Moment, faults: Faults) -> None:
    if not moment.while_starting:
        await server.serves()
    await asyncio.sleep(moment.seconds)
    server.send(moment.signal)
    code = await server.end()
    if code != (-SIGKILL if moment.signal == SIGKILL else 0):
        faults.add("lost", f"a server ended with {code}")


def _free_port() -> int:
    with closing(socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Tortures as the command line says; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=16, help="how many at once")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; any where none is given")
    parser.add_argument("--folder", type=Path, default=None, help="where everything stays that is left behind")
    arguments = parser.parse_args(argv)
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(torture(folder, kills=arguments.kills, turns=arguments.clients, seed=seed))
    for fault in report.faults.said:
        print(fault)
    print(report)
    return 1 if report.faults.said else 0


if __name__ == "__main__":
    sys.exit(main())
