"""Who uses a database, as its status says: servers, their leases and the runs that have not ended."""

import pytest

from bough_server.store.opening import database_status, open_store
from bough_server.store.sql.schema_version import DatabaseUse, LeaseStatus
from tests.store.evaluation_logs import MadeEvaluation
from tests.store.logs import Made, completed
from tests.store.sql import execute

_LEASES = "INSERT INTO workers VALUES ('alive', 5), ('dead', -1), ('idle', 1)"


async def _write(url: str) -> None:
    async with open_store(url, durability="process") as store:
        for number, owner in enumerate(["alive", "alive", "alive", "dead", ""], start=1):
            run = Made(number=number, owner=owner)
            await store.log.create(run.new())
            if number == 1:
                await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
        await store.log.create_evaluation(MadeEvaluation().new())


def _lease(worker: str, open_runs: int, *, is_lost: bool) -> LeaseStatus:
    return LeaseStatus(worker=worker, open_runs=open_runs, is_dead=is_lost)


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_shared_database_is_used_by_its_servers(postgres_url: str, servers: int) -> None:
    opened = [open_store(postgres_url) for _ in range(servers)]
    execute(postgres_url, _LEASES)
    await _write(postgres_url)
    use = database_status(postgres_url).use
    for store in opened:
        await store.close()
    leases = [_lease("alive", 2, is_lost=False), _lease("dead", 1, is_lost=True), _lease("idle", 0, is_lost=False)]
    assert use == DatabaseUse(servers=servers, open_runs=4, leases=leases)


async def test_without_a_server_every_lease_is_lost(url: str) -> None:
    await _write(url)
    execute(url, _LEASES)
    leases = [_lease("alive", 2, is_lost=True), _lease("dead", 1, is_lost=True), _lease("idle", 0, is_lost=True)]
    assert database_status(url).use == DatabaseUse(servers=0, open_runs=4, leases=leases)


async def test_a_file_is_used_by_the_server_that_names_its_address(file_url: str) -> None:
    await _write(file_url)
    async with open_store(file_url) as store:
        store.publish("127.0.0.1:50051")
        execute(file_url, _LEASES)
        use = database_status(file_url).use
    assert use is not None
    assert (use.servers, [lease.is_dead for lease in use.leases]) == (1, [False, True, False])


async def test_nothing_is_read_of_tables_that_this_version_does_not_know(url: str) -> None:
    await _write(url)
    execute(url, "UPDATE alembic_version SET version_num = '9999'")
    assert database_status(url).use is None
