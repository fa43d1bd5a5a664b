"""Evaluations on servers that are killed: cases that pass, one that runs again, and the judge of what comes of it."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from bough import AsyncClient
from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, run_pb2
from tests.durability.torture_clients import READ_SECONDS, REJOINING, Faults, changing_client, other_servers

CASES: Final = 11
"""How many cases that pass a set has that is evaluated beside runs."""

_SUSPECT: Final = "suspect"
"""The case that never passes, so that it runs again beside the baseline."""

_RERUNS: Final = 3
"""How often it does so on each side: with fewer, no regression could be proven."""

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

    async def follow(
        self, client: AsyncClient, made: eval_set_pb2.EvalSet, *, request_id: str, baseline: str = ""
    ) -> None:
        """Evaluate a set, or join the evaluation of the same request, and follow it to its end.

        A case that fails is a suspect if there is a baseline. The gates hold if suspects fail in the baseline too.
        """
        async for event in client.evaluations.run(
            made,
            request_id=request_id,
            max_concurrency=4,
            gates=["pass_rate >= 0.5", *(["regressions == 0"] if baseline else [])],
            baseline=baseline or None,
            rerun_suspects=_RERUNS if baseline else None,
        ):
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

    def faults(self, trials: Mapping[str, int]) -> list[str]:
        """What is wrong with it, in words; `trials` says how many trials each case has."""
        found = [*self._of_logs(trials), *self._of_runs(trials)]
        if "Traceback" in self.server_said:
            found.append(f"a server logged a traceback: {self.server_said.partition('Traceback')[2][:2000]}")
        return found

    def _of_logs(self, trials: Mapping[str, int]) -> list[str]:
        found = []
        for number, log in enumerate(self.logs):
            if [event.sequence for event in log] != list(range(1, len(log) + 1)):
                found.append(f"client {number} saw gaps or duplicates")
        first, *others = self.logs
        if any(list(other) != list(first) for other in others):
            found.append("the clients saw different logs")
        results = [event.case_trial_scored.result for event in first if event.HasField("case_trial_scored")]
        scored = Counter((result.case_id, result.trial) for result in results)
        if scored != {(case_id, trial): 1 for case_id, count in trials.items() for trial in range(count)}:
            found.append(f"{len(scored)} trials are judged, {scored.most_common(1)} most often")
        if not first or not first[-1].HasField("evaluation_completed"):
            found.append("the log has no verdict at its end")
        elif first[-1].evaluation_completed.verdict != eval_result_pb2.VERDICT_PASSED:
            found.append("a case did not pass")
        return found

    def _of_runs(self, trials: Mapping[str, int]) -> list[str]:
        counts = Counter((run.evaluation.case_id, run.evaluation.trial) for run in self.runs)
        if counts != {(case_id, trial): 2 for case_id, count in trials.items() for trial in range(count)}:
            return [f"{len(counts)} trials have runs, {counts.most_common(1)} most, for two turns each"]
        return []


def passing_trials(cases: int) -> dict[str, int]:
    """How many trials the cases of a set have that all pass."""
    return {f"case {number}": 1 for number in range(cases)}


def trials_of(events: Sequence[evaluation_pb2.EvaluationEvent]) -> dict[str, int]:
    """How many trials each case of an Evaluator's evaluation has: more of the suspect if there is a baseline."""
    again = events[0].evaluation_planned.HasField("baseline")
    return {**passing_trials(CASES), _SUSPECT: 1 + 2 * _RERUNS * again}


def made_set(cases: int, *, has_suspect: bool = False) -> eval_set_pb2.EvalSet:
    """A set of cases of two turns, which all pass; but for the suspect."""
    made = eval_set_pb2.EvalSet(name="torture", agent="worker")
    if has_suspect:
        case = made.cases.add(id=_SUSPECT)
        case.turns.add(user="hello").expect.answer.exact = "never"
        case.turns.add(user="hello")
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
            while not over.is_set() or len(self.evaluations) < 2:
                request_id = f"evaluation-{self._number}-{len(self.evaluations)}"
                baseline = self._find_baseline()
                seen = [Progress() for _ in clients]
                self.evaluations.append(seen)
                try:
                    async with asyncio.timeout(EVALUATION_SECONDS), asyncio.TaskGroup() as group:
                        for client, each in zip(clients, seen, strict=True):
                            made = made_set(CASES, has_suspect=True)
                            group.create_task(each.follow(client, made, request_id=request_id, baseline=baseline))
                except Exception as error:
                    self._faults.add("unfinished", f"{request_id}: {len(seen[0].events)} events, then {error!r}")

    def _find_baseline(self) -> str:
        """The first evaluation's id; empty for that one itself."""
        return next((events[0].evaluation_id for events in (seen[0].events for seen in self.evaluations) if events), "")

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
        for fault in outcome.faults(trials_of(stored)):
            self._faults.add("unfinished", f"{evaluation_id} at {client.address}: {fault}")
