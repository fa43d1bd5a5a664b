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
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGKILL
from socket import socket
from typing import Final

from bough import AsyncClient, Rejoining
from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, run_pb2
from tests.support.processes import starting

PATIENCE: Final = 300.0
"""Seconds that the whole evaluation may take, kills included, before it counts as stuck."""

_REJOINING: Final = Rejoining(first_delay=0.02, longest_delay=0.3, timeout=PATIENCE, connect_timeout=PATIENCE)
_REQUEST: Final = "the-evaluation"
_LATEST_SECONDS: Final = 0.3
"""How long after the progress that it waits for a kill comes at most."""

_AGENTS: Final = '''
import asyncio

from bough_server import Context, Message, agent


@agent(description="Takes a moment.")
async def worker(ctx: Context, input: Message) -> str:
    """Answers with its input and the number of the turn."""
    async def moment() -> None:
        await asyncio.sleep(0.01)

    await ctx.step("moment", moment)
    ctx.state["turns"] = ctx.state.get("turns", 0) + 1
    return f"{input.parts[0].text} {ctx.state['turns']}"
'''


@dataclass(slots=True)
class Progress:
    """What a client has seen of the evaluation."""

    events: list[evaluation_pb2.EvaluationEvent] = field(default_factory=list)
    scored: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: evaluation_pb2.EvaluationEvent) -> None:
        """Add the next event."""
        self.events.append(event)
        self.scored += event.HasField("case_trial_scored")
        self.more.set()

    async def until_scored(self, count: int) -> None:
        """Wait until so many runs of cases are judged."""
        while self.scored < count:
            self.more.clear()
            await self.more.wait()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What is left of an evaluation."""

    logs: Sequence[Sequence[evaluation_pb2.EvaluationEvent]]
    runs: Sequence[run_pb2.Run]
    server_said: str = ""

    def faults(self, cases: int) -> list[str]:
        """What is wrong with it, in words."""
        found = [*self._of_logs(cases), *self._of_runs(cases)]
        if "Traceback" in self.server_said:
            found.append(f"a server logged a traceback: {self.server_said.partition('Traceback')[2][:2000]}")
        return found

    def _of_logs(self, cases: int) -> list[str]:
        found = []
        for number, log in enumerate(self.logs):
            if [event.sequence for event in log] != list(range(1, len(log) + 1)):
                found.append(f"client {number} saw gaps or duplicates")
        first, *others = self.logs
        if any(list(other) != list(first) for other in others):
            found.append("the clients saw different logs")
        scored = Counter(
            event.case_trial_scored.result.case_id for event in first if event.HasField("case_trial_scored")
        )
        if len(scored) != cases or set(scored.values()) != {1}:
            found.append(f"{len(scored)} cases are judged, {scored.most_common(1)} most often")
        if not first or not first[-1].HasField("evaluation_completed"):
            found.append("the log has no verdict at its end")
        elif first[-1].evaluation_completed.verdict != eval_result_pb2.VERDICT_PASSED:
            found.append("a case did not pass")
        return found

    def _of_runs(self, cases: int) -> list[str]:
        counts = Counter(run.evaluation.case_id for run in self.runs)
        if len(counts) != cases or set(counts.values()) != {2}:
            return [f"{len(counts)} cases have runs, {counts.most_common(1)} most, for two turns each"]
        return []


def made_set(cases: int) -> eval_set_pb2.EvalSet:
    """A set of cases of two turns, which all pass."""
    made = eval_set_pb2.EvalSet(name="torture", agent="worker")
    for number in range(cases):
        case = made.cases.add(id=f"case {number}")
        for turn in (1, 2):
            case.turns.add(user=f"hello {number}").expect.answer.exact = f"hello {number} {turn}"
    return made


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
            runs = await _runs(address, seen[0].events[0].evaluation_id)
    return Outcome(logs=[each.events for each in seen], runs=runs, server_said=server.said)


async def _follow(address: str, made: eval_set_pb2.EvalSet, progress: Progress) -> None:
    async with AsyncClient(address, timeout=PATIENCE, rejoining=_REJOINING) as client:
        async for event in client.evaluations.run(made, request_id=_REQUEST, max_concurrency=4):
            progress.take(event)


async def _runs(address: str, evaluation_id: str) -> list[run_pb2.Run]:
    async with AsyncClient(address, timeout=PATIENCE) as client:
        return [run async for run in client.list_runs(evaluation_id=evaluation_id)]


def write_team(folder: Path) -> Path:
    """Write a configuration with the agent; return its path."""
    (folder / "eval_team.py").write_text(_AGENTS, encoding="utf-8")
    config = folder / "bough.yaml"
    storage = {"url": "bough.db", "durability": "process"}
    config.write_text(json.dumps({"storage": storage, "python": ["eval_team"]}), encoding="utf-8")
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
    faults = outcome.faults(arguments.cases)
    for fault in faults:
        print(fault)
    print(f"events={len(outcome.logs[0])} runs={len(outcome.runs)} kills={arguments.kills} faults={len(faults)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
