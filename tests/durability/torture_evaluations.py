"""Evaluations on servers that are killed: a set whose cases all pass, and the judge of what comes of it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from bough import AsyncClient
from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, run_pb2
from tests.durability.torture_clients import READ_SECONDS, REJOINING, Faults, changing_client, other_servers

CASES: Final = 12
"""How many cases a set has that is evaluated beside runs."""

TURNS: Final = 2 * CASES
"""How many runs such an evaluation has: one for each turn of a case."""

EVALUATION_SECONDS: Final = 240.0
"""How long an evaluation beside runs may take, kills included, before it counts as unfinished."""


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

    async def follow(self, client: AsyncClient, made: eval_set_pb2.EvalSet, *, request_id: str) -> None:
        """Evaluate a set, or join the evaluation of the same request, and follow it to its end."""
        async for event in client.evaluations.run(made, request_id=request_id, max_concurrency=4):
            self.take(event)

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


async def runs_of(client: AsyncClient, evaluation_id: str) -> list[run_pb2.Run]:
    """Return the runs of an evaluation."""
    return [run async for run in client.list_runs(evaluation_id=evaluation_id)]


class Evaluator:
    """A caller who evaluates one set after the other, each followed through two clients of all servers."""

    def __init__(self, addresses: Sequence[str], number: int, faults: Faults, *, seed: int) -> None:
        self._addresses, self._number, self._faults, self._seed = addresses, number, faults, seed
        self.evaluations: list[Sequence[Progress]] = []

    async def evaluate(self, over: asyncio.Event) -> None:
        """Evaluate one set after the other until it is over."""
        async with AsyncExitStack() as stack:
            orders = [other_servers(len(self._addresses), f"{self._seed} {self._number} {each}") for each in range(2)]
            clients = [await stack.enter_async_context(changing_client(self._addresses, order)) for order in orders]
            while not over.is_set() or not self.evaluations:
                request_id = f"evaluation-{self._number}-{len(self.evaluations)}"
                seen = [Progress() for _ in clients]
                self.evaluations.append(seen)
                try:
                    async with asyncio.timeout(EVALUATION_SECONDS), asyncio.TaskGroup() as group:
                        for client, each in zip(clients, seen, strict=True):
                            group.create_task(each.follow(client, made_set(CASES), request_id=request_id))
                except Exception as error:
                    self._faults.add("unfinished", f"{request_id}: {len(seen[0].events)} events, then {error!r}")

    async def check(self) -> None:
        """Add evaluations without their whole result to the faults, as each server has it; call it at the end."""
        for address in self._addresses:
            async with AsyncClient(address, timeout=READ_SECONDS, rejoining=REJOINING) as client:
                for seen in self.evaluations:
                    if seen[0].events:
                        await self._check(client, seen)

    async def _check(self, client: AsyncClient, seen: Sequence[Progress]) -> None:
        evaluation_id = seen[0].events[0].evaluation_id
        stored = [event async for event in client.evaluations.watch(evaluation_id)]
        logs = [stored, *(each.events for each in seen)]
        outcome = Outcome(logs=logs, runs=await runs_of(client, evaluation_id))
        for fault in outcome.faults(CASES):
            self._faults.add("unfinished", f"{evaluation_id} at {client.address}: {fault}")
