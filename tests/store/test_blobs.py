"""Files of sessions: stored with the event that refers to them, and deleted with the last session that does."""

import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bough_server.errors import InvalidRequest, NotFound, StorageFailed
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import Store, open_store, rebuild_projections, upgrade_database
from bough_server.store.ports.log import LogEvent
from bough_server.store.ports.sessions import BlobPiece
from bough_server.store.sql.blobs import DELETIONS
from bough_server.store.sql.writer import CommitHooks
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, BERT, START_NS, Made, completed, delta, resumed, session_id, text
from tests.store.sql import execute

PHOTO = bytes(range(256)) * 5_000
NOTE = b"a note"


def blob(data: bytes, media_type: str = "image/png", *, is_there: bool = False) -> StoredBlob:
    """A file; one that `is_there` is named without its bytes."""
    return StoredBlob(
        sha256=hashlib.sha256(data).hexdigest(),
        media_type=media_type,
        data=None if is_there else data,
        field="input.parts[0].blob.sha256",
    )


def bringing(records: Sequence[LogEvent], *blobs: StoredBlob) -> list[LogEvent]:
    """The records, of which the first brings files."""
    return [records[0]._replace(blobs=blobs), *records[1:]]


async def start(store: Store, run: Made, *blobs: StoredBlob) -> None:
    """Create a run whose first event brings files."""
    new = run.new()
    await store.log.create(replace(new, first=new.first._replace(blobs=blobs)))


async def end(store: Store, run: Made, *blobs: StoredBlob) -> None:
    """End a run with an event that brings files."""
    await store.log.append(run.run_id, epoch=1, log_events=bringing(run.next(completed()), *blobs))


async def has(store: Store, number: int, data: bytes) -> bool:
    """Whether a session has a file."""
    return not await store.blobs.find_missing(ANNE, session_id(number), [blob(data).sha256])


def stored(url: str) -> set[str]:
    """The hashes of all files of a database."""
    return {sha256 for (sha256,) in execute(url, "SELECT sha256 FROM blobs")}


async def test_a_file_is_read_piece_by_piece_as_it_was_brought(store: Store) -> None:
    await start(store, Made(), blob(PHOTO))
    sha256 = blob(PHOTO).sha256
    whole = await store.blobs.read(ANNE, session_id(1), sha256)
    assert whole == BlobPiece(data=PHOTO, size=len(PHOTO), media_type="image/png")
    pieces = [
        await store.blobs.read(ANNE, session_id(1), sha256, offset=at, count=500_000)
        for at in range(0, len(PHOTO), 500_000)
    ]
    assert [len(piece.data) for piece in pieces] == [500_000, 500_000, 280_000]
    assert b"".join(piece.data for piece in pieces) == PHOTO


async def test_files_come_with_every_kind_of_write(store: Store) -> None:
    run = Made()
    await start(store, run, blob(b"first"))
    await store.log.append(
        run.run_id, epoch=1, log_events=bringing(run.next(delta(), delta()), blob(b"appended"), blob(NOTE))
    )
    taken = bringing(run.next(resumed(2, "next")), blob(b"taken over"))
    await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=taken)
    assert [await has(store, 1, data) for data in (b"first", b"appended", NOTE, b"taken over", PHOTO)] == [True] * 4 + [
        False
    ]


async def test_a_file_is_of_its_session_and_its_tenant_alone(store: Store) -> None:
    await start(store, Made(number=1), blob(PHOTO))
    await start(store, Made(number=2), blob(NOTE))
    await store.sessions.create(BERT, session_id=session_id(1), labels={}, now_ns=START_NS)
    for principal, number in ((ANNE, 2), (BERT, 1), (BERT, 2), (ANNE, 3)):
        with pytest.raises(NotFound):
            await store.blobs.read(principal, session_id(number), blob(PHOTO).sha256)
    with pytest.raises(NotFound, match=r"There is no file 'ff'. The session .* has none with this SHA-256"):
        await store.blobs.read(ANNE, session_id(1), "ff")
    with pytest.raises(NotFound, match="There is no session"):
        await store.blobs.read(BERT, session_id(2), blob(NOTE).sha256)


async def test_a_file_goes_with_the_last_session_that_refers_to_it(store: Store, url: str) -> None:
    one, other = Made(number=1), Made(number=2)
    await start(store, one, blob(PHOTO), blob(NOTE))
    await start(store, other, blob(PHOTO, "image/jpeg"))
    await end(store, one)
    await end(store, other)
    assert stored(url) == {blob(PHOTO).sha256, blob(NOTE).sha256}
    await store.sessions.delete(ANNE, session_id(1))
    assert stored(url) == {blob(PHOTO).sha256}
    assert (await store.blobs.read(ANNE, session_id(2), blob(PHOTO).sha256)).media_type == "image/jpeg"
    await store.sessions.delete(ANNE, session_id(2))
    assert stored(url) == set()


async def test_another_tenants_file_of_the_same_bytes_stays(store: Store) -> None:
    mine, theirs = Made(number=1), Made(number=2, principal=BERT)
    await start(store, mine, blob(PHOTO))
    await start(store, theirs, blob(PHOTO))
    await end(store, mine)
    await store.sessions.delete(ANNE, session_id(1))
    assert (await store.blobs.read(BERT, session_id(2), blob(PHOTO).sha256)).data == PHOTO


async def test_a_fork_shares_the_files_that_it_can_see(store: Store, url: str) -> None:
    """Those of the runs before and of the shared events, but of what came later nothing."""
    before, origin = Made(number=1, question=text("?", "USER")), Made(number=2, session_number=1, session_cut=1)
    await start(store, before, blob(b"before"))
    await end(store, before)
    origin.question = text("??", "USER")
    await start(store, origin, blob(b"asked"))
    await store.log.append(origin.run_id, epoch=1, log_events=bringing(origin.next(delta()), blob(b"shared")))
    await store.log.append(origin.run_id, epoch=1, log_events=bringing(origin.next(delta()), blob(b"later")))
    await end(store, origin)
    await start(store, after := Made(number=3, session_number=1, session_cut=2), blob(b"after"))
    await end(store, after)
    fork = Fork(number=4).of(origin, 2)
    await store.log.fork(replace(fork, log_events=bringing(fork.log_events, blob(b"own"))))
    everything = (b"before", b"asked", b"shared", b"own", b"later", b"after")
    assert [await has(store, 4, data) for data in everything] == [True, True, True, True, False, False]
    await store.sessions.delete(ANNE, session_id(1))
    assert stored(url) == {blob(data).sha256 for data in everything[:4]}
    assert (await store.blobs.read(ANNE, session_id(4), blob(b"before").sha256)).data == b"before"


async def test_the_last_of_several_forks_takes_the_file_along(store: Store, url: str) -> None:
    origin, first, second = Made(number=1), Fork(number=2), Fork(number=3)
    await start(store, origin, blob(PHOTO))
    await store.log.fork(first.of(origin, 1))
    await store.log.fork(second.of(first, 2))
    for run in (origin, first, second):
        await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    for number, left in ((1, True), (3, True), (2, False)):
        await store.sessions.delete(ANNE, session_id(number))
        assert (stored(url) == {blob(PHOTO).sha256}) is left


async def test_a_file_can_be_named_again_where_it_is_known(store: Store) -> None:
    one = Made(number=1, question=text("?", "USER"))
    await start(store, one, blob(PHOTO))
    await end(store, one)
    await start(store, Made(number=2, session_number=1, session_cut=1), blob(PHOTO, is_there=True))
    fork = Fork(number=3).of(one, 1)
    await store.log.fork(replace(fork, log_events=bringing(fork.log_events, blob(PHOTO, is_there=True))))
    assert (await store.blobs.read(ANNE, session_id(3), blob(PHOTO).sha256)).data == PHOTO


async def test_a_file_that_the_session_does_not_have_cannot_be_named(store: Store) -> None:
    other = Made(number=1)
    await start(store, other, blob(PHOTO))
    field = r"input.parts\[0\].blob.sha256: The session has no file with this hash. Send its bytes as `data`."
    with pytest.raises(InvalidRequest, match=field):
        await start(store, Made(number=2), blob(PHOTO, is_there=True))
    with pytest.raises(NotFound):
        await store.runs.get(ANNE, Made(number=2).run_id)
    fork = Fork(number=3).of(other, 1)
    with pytest.raises(InvalidRequest, match=field):
        await store.log.fork(replace(fork, log_events=bringing(fork.log_events, blob(NOTE, is_there=True))))
    await end(store, other)  # nothing of what was refused is left behind


async def test_no_event_is_stored_without_its_files(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def fail() -> None:
        if errors:
            raise errors.pop()

    url, run = f"sqlite:///{tmp_path}/bough.db", Made()
    async with open_store(url, retry_delays=(), hooks=CommitHooks(before=fail)) as store:
        await start(store, run)
        errors.append(sqlite3.OperationalError("disk I/O error"))
        errors[0].sqlite_errorcode = sqlite3.SQLITE_IOERR  # type: ignore[attr-defined]
        with pytest.raises(StorageFailed):
            await end(store, run, blob(PHOTO))
        assert await store.log.last_sequence(run.run_id) == 1
        assert stored(url) == set()


async def test_files_are_there_after_a_restart_and_a_rebuild(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/bough.db"
    async with open_store(url) as store:
        await start(store, Made(), blob(PHOTO))
    rebuild_projections(url)
    async with open_store(url) as store:
        assert (await store.blobs.read(ANNE, session_id(1), blob(PHOTO).sha256)).data == PHOTO


async def test_the_bytes_of_files_count_as_waiting_for_their_commit(store: Store) -> None:
    run = Made()
    await start(store, run)
    appending = store.log.append(run.run_id, epoch=1, log_events=bringing(run.next(completed()), blob(PHOTO)))
    assert store.log.pending_bytes() > len(PHOTO)
    await appending
    assert store.log.pending_bytes() == 0


def test_deleting_a_session_reads_indexes_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/bough.db"
    upgrade_database(url)
    connection = sqlite3.connect(tmp_path / "bough.db")
    plans = [
        row[3]
        for statement in DELETIONS
        for row in connection.execute(
            f"EXPLAIN QUERY PLAN {statement}", {"tenant": "t", "session": "s", "tenant_1": "t"}
        )
    ]
    connection.close()
    assert plans
    assert [plan for plan in plans if plan.startswith("SCAN")] == []
