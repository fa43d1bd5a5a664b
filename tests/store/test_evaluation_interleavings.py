"""Runs and evaluations interleaved over one writer: each log, each row and each session is as if it were alone."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import execution_pb2
from bough_server.errors import Fenced
from bough_server.store.opening import Store, open_store, rebuild_projections
from bough_server.store.ports.log import AnyLogEvent, StoredEvent
from bough_server.store.ports.runs import Page, RunFilter
from tests.store.evaluation_logs import MadeEvaluation, began, fact, passed, scored
from tests.store.logs import ANNE, Made, as_stored, completed, delta, everything, resumed, text
from tests.store.sql import execute
from tests.support.databases import Database, on_each_database

LOGS = 2
"""How many runs there are, and how many evaluations."""

_LOG = st.integers(0, LOGS - 1)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), _LOG, st.integers(1, 3)),
        st.tuples(st.just("evaluate"), _LOG, st.integers(1, 3)),
        st.tuples(st.just("begin"), _LOG, st.just(0)),
        st.tuples(st.just("take over run"), _LOG, st.just(0)),
        st.tuples(st.just("take over evaluation"), _LOG, st.just(0)),
        st.tuples(st.just("refuse"), _LOG, st.just(0)),
        st.tuples(st.just("yield"), st.just(0), st.just(0)),
    ),
    max_size=30,
)
Step = tuple[str, int, int]


class _Play:
    """Does the steps on a store and remembers what the logs have to hold."""

    def __init__(self, store: Store) -> None:
        self._store, self._log = store, store.log
        self._runs = [Made(number=number, question=text("?", "USER")) for number in range(1, LOGS + 1)]
        self._evaluations = [MadeEvaluation(number=number) for number in range(1, LOGS + 1)]
        self._epochs: dict[str, int] = {}
        self._scored = [0] * LOGS
        self.expected: dict[str, list[StoredEvent]] = {}
        self._pending: list[asyncio.Future[None]] = []
        self._refused: list[asyncio.Future[None]] = []

    async def begin(self) -> None:
        for run in self._runs:
            self.expected[run.run_id] = as_stored(run.first())
        for made in self._evaluations:
            self.expected[made.evaluation_id] = as_stored(made.first())
        self._epochs = dict.fromkeys(self.expected, 1)
        creations = [self._log.create(run.new()) for run in self._runs]
        await asyncio.gather(*creations, *(self._log.create_evaluation(made.new()) for made in self._evaluations))

    async def do(self, step: Step) -> None:
        name, index, count = step
        run, made = self._runs[index], self._evaluations[index]
        match name:
            case "run":
                facts = run.next(*(delta(str(number)) for number in range(count)))
                self._append(run.run_id, facts)
            case "evaluate":
                self._scored[index] += count
                self._append(made.evaluation_id, made.next(*(scored() for _ in range(count))))
            case "begin":
                self._append(made.evaluation_id, made.next(began()))
            case "take over run":
                epoch = self._next_epoch(run.run_id)
                taken = run.next(resumed(epoch))
                self.expected[run.run_id] += as_stored(taken)
                await self._log.take_over(run.run_id, epoch=epoch, owner="next", log_events=taken)
            case "take over evaluation":
                epoch = self._next_epoch(made.evaluation_id)
                await self._log.take_over(made.evaluation_id, epoch=epoch, owner="next", log_events=[])
            case "refuse" if self._epochs[made.evaluation_id] > 1:
                late = [fact(scored(), made.last_sequence + 1)]
                writing = self._log.append(
                    made.evaluation_id, epoch=self._epochs[made.evaluation_id] - 1, log_events=late
                )
                self._refused.append(asyncio.ensure_future(writing))
            case "yield":
                await asyncio.sleep(0)

    def _append(self, log_id: str, records: Sequence[AnyLogEvent]) -> None:
        self.expected[log_id] += as_stored(records)
        writing = self._log.append(log_id, epoch=self._epochs[log_id], log_events=records)
        self._pending.append(asyncio.ensure_future(writing))

    def _next_epoch(self, log_id: str) -> int:
        self._epochs[log_id] += 1
        return self._epochs[log_id]

    async def end(self) -> None:
        for run, made in zip(self._runs, self._evaluations, strict=True):
            self._append(run.run_id, run.next(completed(text("So.", "ASSISTANT"))))
            self._append(made.evaluation_id, made.next(passed()))
        await asyncio.gather(*self._pending)
        outcomes = await asyncio.gather(*self._refused, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Fenced] * len(outcomes)
        for log_id, expected in self.expected.items():
            assert await everything(self._log, log_id) == expected
        await self._check_rows()

    async def _check_rows(self) -> None:
        for made, count in zip(self._evaluations, self._scored, strict=True):
            record = await self._store.evaluations.get(ANNE, made.evaluation_id)
            totals = record.evaluation.totals
            assert (totals.trials_ended, totals.trials_passed, totals.cases, totals.trials) == (count, count, 2, 4)
            assert record.evaluation.state == execution_pb2.EXECUTION_STATE_SUCCEEDED
            assert (record.evaluation.last_sequence, record.epoch) == (
                made.last_sequence,
                self._epochs[made.evaluation_id],
            )
        listed, _ = await self._store.runs.list(ANNE, RunFilter(), Page(size=9))
        assert [run.run_id for run in listed] == [run.run_id for run in reversed(self._runs)]
        sessions, _ = await self._store.sessions.list(ANNE, labels={}, page=Page(size=9))
        assert [session.session_id for session in sessions] == [run.session_id for run in reversed(self._runs)]
        for run in self._runs:
            messages = await self._store.sessions.messages(ANNE, run.session_id, through=9)
            assert [one.message.parts[0].text for one in messages] == ["?", "So."]


async def _play(url: str, steps: Sequence[Step]) -> None:
    async with open_store(url, durability="process") as store:
        play = _Play(store)
        await play.begin()
        for step in steps:
            await play.do(step)
        await play.end()


@pytest.mark.grid
@on_each_database
def test_runs_and_evaluations_share_a_writer_and_nothing_else(database: Database) -> None:
    rows = "SELECT * FROM runs ORDER BY run_id"

    @database.examples(20)
    @given(_STEPS)
    def check(steps: list[Step]) -> None:
        with database.empty() as url:
            asyncio.run(_play(url, steps))
            before = execute(url, rows)
            assert rebuild_projections(url) == LOGS
            assert execute(url, rows) == before

    check()
