"""python -m tests.durability.torture --kills 50 --clients 16: a server that is killed while its clients take turns.

It is killed at random moments, also while it starts, now and then told to stop in between, and started again on the
same port and file. Every client has to see every sequence of its runs exactly once and in order, and the right answers;
nothing may be stuck, and nothing that had ended may run again. Evaluations beside them have to end with their whole
result, each case judged once. The last line counts what went wrong; the exit code is 1
if anything did.

With --store postgres the database is a PostgreSQL that is restarted at random moments, in order or by a crash. Then
there can be --servers as well: each call of a client goes to another one than the call before, and some servers are
stopped by SIGSTOP for longer than their lease lasts.
"""

import argparse
import asyncio
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket
from typing import Final

from bough_server.settings import Settings
from tests.durability.torture_charges import pay
from tests.durability.torture_clients import Client, Faults, read_everywhere
from tests.durability.torture_evaluations import Evaluator
from tests.durability.torture_faults import (
    Moment,
    Restart,
    Start,
    end_server,
    moments,
    restart_database,
    restarts,
    serving_again,
    stops,
)
from tests.durability.torture_judge import Evidence, judge
from tests.durability.torture_team import Mind, write_team
from tests.support.model_server import serving_model
from tests.support.postgres import Cluster, own_cluster, programs
from tests.support.processes import Serving, starting

_WORD_SECONDS: Final = 0.01

_EVALUATORS: Final = 2
"""How many callers evaluate sets, beside the clients that take turns."""

_ENTRY: Final = re.compile(r"^(?=\d{4}-\d\d-\d\dT)", re.MULTILINE)
"""Where an entry of a server's log begins."""

_OF_THE_DATABASE: Final = ("write given up", "read failed")
"""Entries that have the stack of the database's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How it went."""

    runs: int
    evaluations: int
    kills: int
    faults: Faults

    def __str__(self) -> str:
        counts = self.faults.counts
        return (
            f"runs={self.runs} kills={self.kills} duplicates={counts['duplicates']} lost={counts['lost']} "
            f"stuck={counts['stuck']} evaluations={self.evaluations} unfinished={counts['unfinished']} "
            f"overcharged={counts['overcharged']} uncharged={counts['uncharged']}"
        )


async def torture(
    folder: Path, *, kills: int, turns: int, seed: int, servers: int = 1, database: Cluster | None = None
) -> Report:
    """Lets so many clients take turns at once while their servers are killed so many times, and judges it."""
    faults = Faults()
    when = [*moments(seed, kills, servers=servers)]
    evidence = await torment(
        folder,
        faults,
        turns=turns,
        when=when,
        servers=servers,
        database=database,
        restarting=restarts(seed),
        seed=seed,
        evaluators=_EVALUATORS,
    )
    drains, pauses = stops(when)
    longest = max(turn.seconds for turn in evidence.turns)
    print(f"drains={drains} stops={pauses} database_restarts={evidence.restarts} longest_turn={longest:.1f}s")
    runs = await judge(evidence, faults)
    return Report(runs=runs, evaluations=len(evidence.evaluations), kills=kills, faults=faults)


async def torment(
    folder: Path,
    faults: Faults,
    *,
    turns: int,
    when: Sequence[Moment],
    servers: int = 1,
    database: Cluster | None = None,
    restarting: Iterable[Restart] = (),
    seed: int = 0,
    is_cold: bool = True,
    evaluators: int = 0,
) -> Evidence:
    """Ends servers at these moments, dealt out to them, under clients that take so many turns at once, and evaluate.

    The database is SQLite without a cluster of PostgreSQL, which is restarted. What clients notice is a fault. Servers
    that are not `is_cold` start within milliseconds, and so are hardly ever hit while they start.
    """
    mind, effects, over, is_read = Mind(), folder / "effects.jsonl", asyncio.Event(), asyncio.Event()
    effects.touch()
    async with serving_model(mind, delta_interval=_WORD_SECONDS) as model:
        config = write_team(folder, model.base_url, "bough.db" if database is None else database.url("postgres"))
        await pay(Settings.load(config).storage.url)
        addresses = _free_addresses(servers)
        clients = [Client(addresses, number, faults, seed=seed) for number in range(turns)]
        evaluating = [Evaluator(addresses, number, faults, seed=seed) for number in range(evaluators)]
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(client.take_turns(over)) for client in clients]
            callers += [group.create_task(evaluator.evaluate(over)) for evaluator in evaluating]
            ended = [asyncio.Event() for _ in addresses]
            for number, address in enumerate(addresses):
                start = partial(_starting, config, address, name=f"serve-{number}", effects=effects, is_cold=is_cold)
                group.create_task(_serve(start, when[number::servers], faults, ended=ended[number], until=is_read))
            restarted = group.create_task(_restart(database, restarting, over))
            for each in ended:
                await each.wait()
            over.set()
            await asyncio.wait([*callers, restarted])
            seen = [turn for client in clients for turn in client.turns]
            await read_everywhere(addresses, seen, faults)
            for evaluator in evaluating:
                await evaluator.check()
            is_read.set()
    _check_logs(folder, faults, has_restarts=database is not None)
    return Evidence(
        config=config,
        turns=seen,
        evaluations=[each for evaluator in evaluating for each in evaluator.evaluations],
        asked=mind.asked,
        effects=effects,
        restarts=restarted.result(),
    )


def _starting(
    config: Path, address: str, *, name: str, effects: Path, is_cold: bool
) -> AbstractAsyncContextManager[Serving]:
    return starting(
        config,
        arguments=("--port", address.rpartition(":")[2]),
        environment={"TORTURE_EFFECTS": str(effects)},
        is_cold=is_cold,
        name=name,
    )


async def _serve(
    start: Start, when: Sequence[Moment], faults: Faults, *, ended: asyncio.Event, until: asyncio.Event
) -> None:
    """Starts one server after the other, ends each at its moment, and lets the last one serve."""
    for moment in when:
        await end_server(start, moment, faults)
    ended.set()
    async with serving_again(start):
        await until.wait()


async def _restart(database: Cluster | None, when: Iterable[Restart], over: asyncio.Event) -> int:
    return 0 if database is None else await restart_database(database, when, over)


def _check_logs(folder: Path, faults: Faults, *, has_restarts: bool) -> None:
    """A server logs no stack but that of a database that is not there."""
    for log in folder.glob("serve-*.stderr"):
        for entry in _ENTRY.split(log.read_text(encoding="utf-8")):
            if "Traceback" in entry and not (has_restarts and any(each in entry for each in _OF_THE_DATABASE)):
                faults.add("lost", f"{log.name} has a traceback: {entry[:2000]}")


def _free_addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        probes = [stack.enter_context(closing(socket())) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def main(argv: Sequence[str] | None = None) -> int:
    """Tortures as the command line says; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=16, help="how many at once")
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--servers", type=int, default=1, help="how many at once, on PostgreSQL")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; any where none is given")
    parser.add_argument("--folder", type=Path, default=None, help="where everything stays that is left behind")
    arguments = parser.parse_args(argv)
    if arguments.servers > 1 and arguments.store == "sqlite":
        parser.error("a SQLite file has one server: use --store postgres")
    if arguments.store == "postgres" and programs() is None:
        parser.error("there is no initdb: install PostgreSQL (Debian's package postgresql)")
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed={seed}", flush=True)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    with own_cluster(keep_in=folder) if arguments.store == "postgres" else nullcontext() as database:
        work = torture(
            folder,
            kills=arguments.kills,
            turns=arguments.clients,
            seed=seed,
            servers=arguments.servers,
            database=database,
        )
        report = asyncio.run(work)
    for fault in report.faults.said:
        print(fault)
    if report.faults.said:
        print(f"the logs of the servers and the database are in {folder}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    print(report)
    return 1 if report.faults.said else 0


if __name__ == "__main__":
    sys.exit(main())
