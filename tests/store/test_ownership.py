"""Two owners on one store in any interleaving: one writer an epoch, no event lost, every letter acted on once.

Commits are held until a step lets them happen, so that what the owners know may be as old as it likes; a model, which
takes the writes in their order one by one, says what has to become of each.
"""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from bough.v1 import event_pb2, input_pb2
from bough_server.errors import Fenced
from bough_server.log import events
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.log import LogEvent, RunMoved, StoredEvent
from bough_server.store.ports.workers import RunCommand
from bough_server.store.sql.writer import CommitHooks
from tests.store.logs import ANNE, Made, as_stored, completed, delta, everything, record, resumed
from tests.support.databases import POSTGRES, SQLITE, Database, on_each_database

WORKERS = ("a", "b")
RUNS = (0, 1)

T = TypeVar("T")


class Gate:
    """Holds commits, and fails one of them right before or right after it happens."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._trouble = ""
        self.holds = threading.Event()
        """Set once a commit is held."""

    def before(self) -> None:
        """The hook before a commit."""
        self.holds.set()
        self._open.wait()
        self._fail("before")

    def after(self) -> None:
        """The hook after a commit."""
        self._fail("after")

    def open(self, trouble: str = "") -> None:
        """Lets commits happen; the next one with trouble "before" or "after", and with "after the next" the second."""
        self._trouble = trouble
        self._open.set()

    def close(self) -> None:
        """Holds the next commit."""
        self.holds.clear()
        self._trouble = ""
        self._open.clear()

    def _fail(self, where: str) -> None:
        if self._trouble == f"{where} the next":
            self._trouble = where
            return
        if self._trouble == where:
            self._trouble = ""
            raise OSError("the database failed")


@dataclass(kw_only=True)
class Owned:
    """A run as its owner knows it."""

    epoch: int
    last_sequence: int
    acted: set[int]
    """The letters whose events are in the log, or on their way there."""


@dataclass(kw_only=True)
class Write:
    """A write that is on its way."""

    kind: str
    worker: str
    run: int
    future: asyncio.Future[Any]
    epoch: int = 0
    records: list[LogEvent] = field(default_factory=list)


@dataclass(kw_only=True)
class Model:
    """What is to become of a run."""

    log: list[StoredEvent]
    owners: list[str]
    """The owner of each epoch."""
    letters: list[int] = field(default_factory=list)
    """Those that wait."""
    posted: list[int] = field(default_factory=list)
    is_ended: bool = False

    def outcome(self, write: Write) -> type[Exception] | None:
        """Takes a write in, or says how it is refused."""
        if self.is_ended:
            return Fenced
        if write.kind == "post":
            return None
        fits = write.records[0].sequence == len(self.log) + 1
        if write.kind == "take":
            if write.epoch != len(self.owners) + 1 or not fits:
                return RunMoved
            self.owners.append(write.worker)
        elif write.epoch != len(self.owners) or not fits:
            return Fenced
        assert self.owners[write.epoch - 1] == write.worker, "each epoch has one writer"
        self.log += as_stored(write.records)
        self.is_ended = write.records[-1].kind in events.TERMINAL_KINDS
        if self.is_ended:
            self.letters = []
        return None


def _acted_on(letter_id: int) -> event_pb2.AgentEvent:
    answer = input_pb2.InputAnswer(input_id=f"letter {letter_id}")
    return event_pb2.AgentEvent(input_received=event_pb2.InputReceived(answer=answer))


def _letters_in(log: list[StoredEvent]) -> list[int]:
    received = [events.parse(one.data).input_received for one in log if one.kind == events.INPUT_RECEIVED]
    return [int(each.answer.input_id.removeprefix("letter ")) for each in received]


class Ownership(RuleBasedStateMachine):
    """Two workers, two runs, and the senders of commands."""

    database: ClassVar[Database] = SQLITE

    @initialize()
    def begin(self) -> None:
        self._empty = self.database.empty()
        self._url = self._empty.__enter__()
        self._runner = asyncio.Runner()
        self._gate = Gate()
        self._gate.open()
        self._store = self._do(self._opened())
        self._runs = [Made(number=number + 1, owner="a") for number in RUNS]
        for run in self._runs:
            self._do(self._store.log.create(run.new()))
        self._models = [Model(log=as_stored(run.first()), owners=["a"]) for run in self._runs]
        self._owned = {("a", run): Owned(epoch=1, last_sequence=1, acted=set()) for run in RUNS}
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}
        self._leases: dict[str, int] = {}
        self._writes: list[Write] = []
        self._count = 0
        self._gate.close()

    async def _opened(self) -> Store:
        hooks = CommitHooks(before=self._gate.before, after=self._gate.after)
        return open_store(self._url, durability="process", retry_delays=(0.0, 0.0), hooks=hooks)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _submit(self, kind: str, worker: str, run: int, work: Coroutine[Any, Any, Any], **known: Any) -> None:
        async def start() -> asyncio.Future[Any]:
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0)  # now it is in the writer's queue, behind all before it
            return task

        self._writes.append(Write(kind=kind, worker=worker, run=run, future=self._do(start()), **known))

    async def _appending(self, run: int, epoch: int, records: list[LogEvent]) -> None:
        await self._store.log.append(self._runs[run].run_id, epoch=epoch, log_events=records)

    def _append(self, worker: str, run: int, *batch: event_pb2.AgentEvent) -> None:
        owned = self._owned.get((worker, run))
        if owned is not None:
            made = [record(event, owned.last_sequence + place) for place, event in enumerate(batch, 1)]
            owned.last_sequence += len(made)
            work = self._appending(run, owned.epoch, made)
            self._submit("append", worker, run, work, epoch=owned.epoch, records=made)

    @rule(worker=st.sampled_from(WORKERS), run=st.sampled_from(RUNS), size=st.integers(1, 3))
    def append(self, worker: str, run: int, size: int) -> None:
        self._count += 1
        self._append(worker, run, *(delta(f"{worker}, {self._count}, {part}") for part in range(size)))

    @rule(worker=st.sampled_from(WORKERS), run=st.sampled_from(RUNS))
    def look(self, worker: str, run: int) -> None:
        found = self._do(self._store.runs.get(ANNE, self._runs[run].run_id))
        self._seen[worker, run] = found.epoch, found.run.last_sequence

    def owner(self, run: int) -> str:
        """The owner of a run, as its row names it."""
        return self._do(self._store.runs.get(ANNE, self._runs[run].run_id)).owner

    def is_held(self) -> bool:
        """Wait until a commit is held; False if none is soon."""
        return self._gate.holds.wait(10)

    @rule(worker=st.sampled_from(WORKERS), run=st.sampled_from(RUNS))
    def take_over(self, worker: str, run: int) -> None:
        if (worker, run) in self._seen:
            epoch, last_sequence = self._seen[worker, run]
            made = [record(resumed(epoch + 1, worker), last_sequence + 1)]
            work = self._store.log.take_over(self._runs[run].run_id, epoch=epoch + 1, owner=worker, log_events=made)
            self._submit("take", worker, run, work, epoch=epoch + 1, records=made)

    @rule(run=st.sampled_from(RUNS))
    def post(self, run: int) -> None:
        letter = RunCommand(command_id=0, run_id=self._runs[run].run_id, cancel=event_pb2.CancelRequested())
        self._submit("post", "", run, self._store.mailbox.post(letter))

    @rule(worker=st.sampled_from(WORKERS), run=st.sampled_from(RUNS))
    def act(self, worker: str, run: int) -> None:
        taken = [letter.command_id for letter in self._do(self._store.mailbox.take(self._runs[run].run_id))]
        assert taken == self._models[run].letters
        owned = self._owned.get((worker, run))
        for letter_id in taken:
            if owned is not None and letter_id not in owned.acted:
                owned.acted.add(letter_id)
                self._append(worker, run, _acted_on(letter_id))

    @rule(run=st.sampled_from(RUNS))
    def tidy(self, run: int) -> None:
        """A worker that finds a command's events in the log removes the command, whether it wrote them or not."""
        for letter_id in _letters_in(self._models[run].log):
            if letter_id in self._models[run].letters:
                self._submit("done", "", run, self._store.mailbox.delete_command(letter_id))
                self._models[run].letters.remove(letter_id)
        self.settle("")

    @rule(worker=st.sampled_from(WORKERS), run=st.sampled_from(RUNS))
    def end(self, worker: str, run: int) -> None:
        self._append(worker, run, completed())

    @rule(worker=st.sampled_from(WORKERS), lives=st.booleans())
    def renew_or_release(self, worker: str, lives: bool) -> None:
        if lives:
            self._submit("lease", worker, 0, self._store.leases.begin(worker))
            self._leases[worker] = self._leases.get(worker, 0) + 1
        else:
            self._submit("lease", worker, 0, self._store.leases.release(worker))
            self._leases.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), run=st.sampled_from(RUNS))
    def die(self, worker: str, run: int) -> None:
        """A worker forgets that it owns a run; what it has written is on its way all the same."""
        self._owned.pop((worker, run), None)

    @rule(trouble=st.sampled_from(["", "before", "after", "after the next"]))
    def settle(self, trouble: str) -> None:
        self._gate.open(trouble)
        outcomes = self._do(self._outcomes())
        self._gate.close()
        writes, self._writes = self._writes, []
        late = [write.run for write, outcome in zip(writes, outcomes, strict=True) if self._learn(write, outcome)]
        # A group that is written again sees what its first attempt has committed: the end of a run behind a takeover.
        assert not late or trouble.startswith("after")
        assert all(self._models[run].is_ended for run in late)
        assert self._do(self._store.leases.counters()).keys() == self._leases.keys()

    async def _outcomes(self) -> list[Any]:
        return await asyncio.gather(*(write.future for write in self._writes), return_exceptions=True)

    def _learn(self, write: Write, outcome: Any) -> bool:
        """Compare an outcome with the model's; return True for a takeover that is refused by a later end of the run."""
        if write.kind in ("done", "lease"):
            assert outcome is None
            return False
        model, key = self._models[write.run], (write.worker, write.run)
        refusal = model.outcome(write)
        if refusal is RunMoved and isinstance(outcome, Fenced):
            return True
        assert (type(outcome) if isinstance(outcome, Exception) else None) is refusal
        if refusal is None and write.kind == "post":
            model.letters.append(outcome)
            model.posted.append(outcome)
        elif refusal is None and write.kind == "take":
            acted = set(_letters_in(model.log))
            self._owned[key] = Owned(epoch=write.epoch, last_sequence=write.records[-1].sequence, acted=acted)
        elif refusal is Fenced and (owned := self._owned.get(key)) and owned.epoch == write.epoch:
            del self._owned[key]
        return False

    @rule()
    def restart(self) -> None:
        self.settle("")
        self._gate.open()
        self._do(self._store.close())
        self._store = self._do(self._opened())
        self._owned, self._leases = {}, {}
        self._gate.close()

    def teardown(self) -> None:
        if hasattr(self, "_store"):
            try:
                self._finish()
            finally:
                self._gate.open()
                self._do(self._store.close())
                self._runner.close()
                self._empty.__exit__(None, None, None)

    def _finish(self) -> None:
        """One more owner acts on what waits, and ends every run: then nothing is lost, and nothing done twice."""
        self.settle("")
        for run in RUNS:
            self._owned.pop(("b", run), None)
            self.look("b", run)
            self.take_over("b", run)
            self.settle("")
            self.act("b", run)
            self.settle("")
            model = self._models[run]
            assert self._do(everything_now(self._store, self._runs[run])) == model.log
            assert [one.sequence for one in model.log] == list(range(1, len(model.log) + 1))
            acted = _letters_in(model.log)
            assert len(set(acted)) == len(acted), "no letter is acted on twice"
            assert model.is_ended or sorted(acted) == model.posted, "no letter is lost"
            self.end("b", run)
            self.settle("")
            assert self._do(everything(self._store.log, self._runs[run].run_id)) == model.log


async def everything_now(store: Store, run: Made) -> list[StoredEvent]:
    """All that is committed of a run."""
    stored: list[StoredEvent] = []
    while page := await store.log.read(run.run_id, after=len(stored)):
        stored += page
    return stored


class OwnershipOnPostgres(Ownership):
    """The same on PostgreSQL."""

    database = POSTGRES


MACHINES = {SQLITE: Ownership, POSTGRES: OwnershipOnPostgres}


@on_each_database
def test_a_command_that_was_committed_with_the_end_of_its_run_is_posted(database: Database) -> None:
    machine = MACHINES[database]()
    try:
        machine.begin()
        machine.post(run=0)
        machine.end(run=0, worker="a")
        machine.settle(trouble="after")
    finally:
        machine.teardown()


@pytest.mark.parametrize("lives", [False, True])
@on_each_database
def test_a_takeover_that_is_committed_with_a_lease_of_its_worker_has_succeeded(database: Database, lives: bool) -> None:
    machine = MACHINES[database]()
    try:
        machine.begin()
        machine.look(run=0, worker="b")
        machine.renew_or_release(lives=lives, worker="b")
        machine.take_over(run=0, worker="b")
        machine.settle(trouble="after")
        assert machine.owner(run=0) == "b"
    finally:
        machine.teardown()


@on_each_database
def test_a_takeover_whose_group_is_written_again_is_refused_by_the_end_behind_it(database: Database) -> None:
    machine = MACHINES[database]()
    try:
        machine.begin()
        machine.look(run=0, worker="b")
        machine.post(run=1)
        assert machine.is_held()  # so that the next three are one group
        machine.append(run=0, worker="a", size=1)
        machine.take_over(run=0, worker="b")
        machine.end(run=0, worker="a")
        machine.settle(trouble="after the next")
    finally:
        machine.teardown()


@pytest.mark.grid
@on_each_database
def test_each_epoch_has_one_writer_and_nothing_committed_or_posted_is_lost_or_done_twice(database: Database) -> None:
    machine_settings = settings(database.examples(20), stateful_step_count=40)
    run_state_machine_as_test(MACHINES[database], settings=machine_settings)
