"""Any interleaving of owners and readers: nothing is lost, reordered, repeated or written by a former owner."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough_server.errors import Fenced
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.log import StoredEvent
from tests.store.logs import Made, as_stored, completed, delta, everything, record, resumed
from tests.support.databases import Database, on_each_database

RUNS = 3

_RUN = st.integers(0, RUNS - 1)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), _RUN, st.integers(1, 5)),
        st.tuples(st.just("read"), _RUN, st.integers(0, 8)),
        st.tuples(st.just("take over"), _RUN, st.just(0)),
        st.tuples(st.just("append late"), _RUN, st.just(0)),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
        st.tuples(st.just("yield"), st.just(0), st.just(0)),
    ),
    max_size=40,
)
Step = tuple[str, int, int]


class _Play:
    """Does the steps on a store and remembers what the logs have to hold."""

    def __init__(self, store: Store) -> None:
        self._log = store.log
        self._runs = [Made(number=number) for number in range(1, RUNS + 1)]
        self._epochs = [1] * RUNS
        self.expected: list[list[StoredEvent]] = [as_stored([run.new().first]) for run in self._runs]
        self._pending: list[asyncio.Future[None]] = []
        self._late: list[asyncio.Future[None]] = []
        self._readers: list[tuple[int, int, asyncio.Task[list[StoredEvent]]]] = []

    async def begin(self) -> None:
        await asyncio.gather(*(self._log.create(run.new()) for run in self._runs))

    async def do(self, step: Step) -> None:
        name, index, count = step
        run = self._runs[index]
        match name:
            case "append":
                made = run.next(*(delta(f"{len(self.expected[index])}.{part}" * 20) for part in range(count)))
                self.expected[index] += as_stored(made)
                epoch = self._epochs[index]
                self._pending.append(asyncio.ensure_future(self._log.append(run.run_id, epoch=epoch, log_events=made)))
            case "read":
                task = asyncio.ensure_future(everything(self._log, run.run_id, after=count))
                self._readers.append((index, count, task))
            case "take over":
                epoch = self._epochs[index] = self._epochs[index] + 1
                made = run.next(resumed(epoch))
                self.expected[index] += as_stored(made)
                await self._log.take_over(run.run_id, epoch=epoch, owner="next", log_events=made)
            case "append late" if self._epochs[index] > 1:
                late = [record(delta("late"), run.last_sequence + 1)]
                epoch = self._epochs[index] - 1
                self._late.append(asyncio.ensure_future(self._log.append(run.run_id, epoch=epoch, log_events=late)))
            case "settle":
                await asyncio.gather(*self._pending)
            case "yield":
                await asyncio.sleep(0)

    async def end(self) -> None:
        for index, run in enumerate(self._runs):
            made = run.next(completed())
            self.expected[index] += as_stored(made)
            await self._log.append(run.run_id, epoch=self._epochs[index], log_events=made)
        await asyncio.gather(*self._pending)
        late = await asyncio.gather(*self._late, return_exceptions=True)
        assert [type(outcome) for outcome in late] == [Fenced] * len(late)
        for index, after, reader in self._readers:
            assert await reader == self.expected[index][after:]
        for index, run in enumerate(self._runs):
            assert await everything(self._log, run.run_id) == self.expected[index]


async def _play(url: str, steps: Sequence[Step], window_bytes: int) -> None:
    async with open_store(url, durability="process", window_bytes=window_bytes) as store:
        play = _Play(store)
        await play.begin()
        for step in steps:
            await play.do(step)
        await play.end()


@pytest.mark.grid
@on_each_database
def test_readers_get_exactly_the_log_whatever_happens_in_between(database: Database) -> None:
    @database.examples(20)
    @given(_STEPS, st.sampled_from([0, 3_000, 1 << 20]))
    def check(steps: list[Step], window_bytes: int) -> None:
        with database.empty() as url:
            asyncio.run(_play(url, steps, window_bytes))

    check()
