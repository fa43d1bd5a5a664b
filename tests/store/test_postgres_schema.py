"""The schema of a PostgreSQL database: made once, upgraded, refused, and read through its indexes."""

import asyncio
import threading
from collections.abc import Iterator

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from bough.v1 import execution_pb2
from bough_server.errors import ConfigurationError
from bough_server.identity import Principal
from bough_server.store.opening import database_status, open_store, rebuild_projections, upgrade_database
from bough_server.store.ports.evaluations import EvaluationFilter
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.postgres.database import display_url, exclusive_connection
from bough_server.store.sql import migrations
from bough_server.store.sql.tables import metadata
from tests.store.logs import ALL, ANNE, Made
from tests.store.sql import execute, indexes_in, plans_of, seen_statements
from tests.support import postgres
from tests.support.open_runs import open_runs

_RUNNING, _SUCCEEDED = execution_pb2.EXECUTION_STATE_RUNNING, execution_pb2.EXECUTION_STATE_SUCCEEDED

_MANY_RUNS = f"""
    INSERT INTO runs SELECT 'r' || n, 'acme', 'u' || n % 50, 's' || n % 5000, 1000 + n, 1, 'w', 3, n % 100 != 0,
        CASE WHEN n % 9999 = 0 THEN 'rare' ELSE 'agent-' || n % 40 END,
        CASE WHEN n % 100 = 0 THEN {_RUNNING} ELSE {_SUCCEEDED} END, '{{}}', '', NULL, NULL, NULL, NULL, '',
        CASE WHEN n % 2 = 0 THEN 'q' || n ELSE '' END, '', NULL, NULL, '', 0, 0,
        CASE WHEN n % 10 = 0 THEN 'e' || n % 70 ELSE '' END, '', '', NULL, 0,
        CASE WHEN n % 10 = 0 THEN 1 ELSE 0 END, NULL
    FROM generate_series(1, 30000) AS n;
    INSERT INTO runs SELECT 'e' || n, 'acme', 'u', '', 1000 + n, 1, 'w', 3, true,
        'agent-1', {_SUCCEEDED}, '{{}}', '', NULL,
        NULL, NULL, NULL, '', '', '', NULL, NULL, '', 0, 1, '', '', 'set-' || n % 9, '', 0, 0, NULL
    FROM generate_series(1, 300) AS n;
    ANALYZE runs;
"""


@pytest.fixture
def empty() -> Iterator[str]:
    """A database without tables."""
    made = postgres.database(is_empty=True)
    yield made
    postgres.drop(made)


def _tables(url: str) -> list[str]:
    return [name for (name,) in execute(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")]


async def test_an_empty_database_is_made_whole(empty: str) -> None:
    assert (database_status(empty).revision, _tables(empty)) == (None, [])
    async with open_store(empty):
        assert database_status(empty).is_current
    assert _tables(empty) == sorted([*metadata.tables, "alembic_version"])
    with exclusive_connection(empty) as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_numbers_have_64_bits_and_ids_sort_by_their_bytes(postgres_url: str) -> None:
    columns = "SELECT table_name, column_name, data_type, collation_name FROM information_schema.columns"
    found = execute(postgres_url, f"{columns} WHERE table_schema = 'public' AND table_name != 'alembic_version'")
    assert {kind for _, _, kind, _ in found} == {"bigint", "character varying", "bytea", "boolean"}
    assert {collation for _, _, kind, collation in found if kind == "character varying"} == {"C"}


def test_rows_of_runs_leave_room_for_their_next_versions(empty: str) -> None:
    upgrade_database(empty)
    found = execute(empty, "SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL AND relkind = 'r'")
    assert found == [("runs", ["fillfactor=50"])]


def test_every_partial_index_is_partial(postgres_url: str) -> None:
    partial = {index.name for table in metadata.tables.values() for index in table.indexes
               if index.dialect_options["sqlite"]["where"] is not None}  # fmt: skip
    found = execute(postgres_url, "SELECT indexname FROM pg_indexes WHERE indexdef LIKE '% WHERE %'")
    assert {name for (name,) in found} == partial


def test_two_servers_that_start_on_an_empty_database_make_it_once(empty: str) -> None:
    outcomes: list[object] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        try:
            outcomes.append(upgrade_database(empty).is_current)
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 4
    assert execute(empty, "SELECT version_num FROM alembic_version") == [(migrations.HEAD,)]


def test_tables_are_made_by_the_operator_if_servers_must_not(empty: str) -> None:
    with pytest.raises(ConfigurationError, match=r"has no tables yet: run `bough db upgrade`"):
        open_store(empty, may_upgrade=False)
    assert _tables(empty) == []
    assert upgrade_database(empty).is_current


async def test_a_server_that_must_not_upgrade_opens_what_is_current(postgres_url: str) -> None:
    async with open_store(postgres_url, may_upgrade=False) as store:
        assert await open_runs(store) == []


def test_a_newer_database_is_refused_in_a_sentence_with_both_revisions(postgres_url: str) -> None:
    execute(postgres_url, "UPDATE alembic_version SET version_num = '9999'")
    for opening in (open_store, upgrade_database):
        with pytest.raises(ConfigurationError) as refused:
            opening(postgres_url)
        assert refused.value.message == (
            f"The database {display_url(postgres_url)} has revision 9999, which is newer than {migrations.HEAD}, the "
            "newest that this version of bough knows: use the newer version, or name another database."
        )
    assert database_status(postgres_url).revision == "9999"


def test_a_revision_that_no_version_had_on_postgresql_is_refused(postgres_url: str) -> None:
    execute(postgres_url, "UPDATE alembic_version SET version_num = '0008'")
    for opening in (open_store, upgrade_database, database_status, rebuild_projections):
        with pytest.raises(ConfigurationError, match="revision 0008, which this version of bough cannot read"):
            opening(postgres_url)


@pytest.mark.parametrize("names", [["recipes"], ["alembic_version"], ["alembic_version", "recipes"]])
def test_another_programs_database_is_refused_and_left_alone(empty: str, names: list[str]) -> None:
    for name in names:
        execute(empty, f"CREATE TABLE {name} (version_num TEXT)")
    for opening in (open_store, upgrade_database, database_status, rebuild_projections):
        with pytest.raises(ConfigurationError, match=rf"another program \(it has the table '{names[-1]}'\)"):
            opening(empty)
    assert _tables(empty) == names


def test_a_database_that_is_not_there_is_named_without_its_password(postgres_url: str) -> None:
    url = postgres_url.replace("bough@/test", "bough:hunter2@/missing").replace("?", "?password=hunter3&")
    for opening in (open_store, upgrade_database, database_status, rebuild_projections):
        with pytest.raises(ConfigurationError, match="does not exist") as refused:
            opening(url)
        assert "hunter" not in refused.value.message
        assert refused.value.__cause__ is None


def test_a_url_that_cannot_be_read_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError, match="The storage URL is not one of PostgreSQL") as refused:
        open_store("postgresql://anne:hunter2@host:port/bough")
    assert "hunter" not in refused.value.message


async def test_a_command_that_needs_the_database_alone_waits_for_no_server(postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        with pytest.raises(ConfigurationError, match="is in use by a server: stop all servers"):
            rebuild_projections(postgres_url)
        await store.log.create(Made().new())
    assert rebuild_projections(postgres_url) == 1


def test_no_server_starts_while_a_command_has_the_database_alone(postgres_url: str) -> None:
    with (
        exclusive_connection(postgres_url),
        pytest.raises(ConfigurationError, match="an operator's command has the database for itself"),
    ):
        open_store(postgres_url)


_USE_LOCK = 0x626F7567_00000002
_WAITS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def _until_someone_waits(connection: psycopg.Connection[tuple[int]]) -> None:
    while connection.execute(_WAITS).fetchone() == (0,):
        pass


@pytest.mark.parametrize(
    ("taken", "released", "work"),
    [
        ("pg_advisory_lock", "pg_advisory_unlock", "a server"),
        ("pg_advisory_lock_shared", "pg_advisory_unlock_shared", "a command"),
    ],
)
async def test_who_comes_right_after_a_server_or_a_command_waits_until_postgresql_has_ended_that(
    postgres_url: str, taken: str, released: str, work: str
) -> None:
    async def open_and_close() -> None:
        await open_store(postgres_url).close()

    with psycopg.connect(postgres_url, autocommit=True) as ending:
        ending.execute(f"SELECT {taken}({_USE_LOCK})")
        if work == "a server":
            coming = asyncio.create_task(asyncio.to_thread(asyncio.run, open_and_close()))
        else:
            coming = asyncio.create_task(asyncio.to_thread(rebuild_projections, postgres_url))  # type: ignore[arg-type]
        await asyncio.to_thread(_until_someone_waits, ending)
        ending.execute(f"SELECT {released}({_USE_LOCK})")
        await coming


async def test_lists_and_look_ups_use_their_indexes_once_there_are_many_runs(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute(_MANY_RUNS)
    one, several = frozenset({_RUNNING}), frozenset({_RUNNING, _SUCCEEDED})
    lists = {
        "runs_newest_first": RunFilter(),
        "runs_of_session": RunFilter(session_id="s1", agent="agent-1", states=several),
        "runs_of_agent": RunFilter(agent="rare", states=frozenset({_SUCCEEDED})),
        "runs_by_state": RunFilter(states=one),
        "runs_of_evaluation": RunFilter(evaluation_id="e10", states=several),
        "runs_of_evaluations": RunFilter(include_evaluation_runs=True),
    }
    async with open_store(postgres_url) as store:
        with seen_statements() as seen:
            for run_filter in lists.values():
                await store.runs.list(ALL, run_filter, Page(size=10))
            await store.evaluations.list(ALL, EvaluationFilter(), Page(size=10))
            await store.runs.list(Principal(tenant_id="acme", user_id="u7"), RunFilter(), Page(size=10))
            await store.runs.find_request(ANNE, "q2")
            await store.evaluations.find_request(ANNE, "q2")
            await store.leases.begin("a")
            await store.leases.claim("a", most=9)
            await store.runs.next_expiry()
    expected = [
        *lists,
        "evaluations_newest_first",
        "runs_of_user",
        "runs_by_request",
        "evaluations_of_user",  # of which the user has none: the index of requests has others' as well
        "runs_by_owner",
        "runs_by_expiry",
    ]
    plans = plans_of(postgres_url, [each for each in seen if each[0].lstrip().startswith("SELECT runs")])
    for index, plan in zip(expected, plans, strict=True):
        assert index in indexes_in(plan), plan
        assert not any("Seq Scan" in step for step in plan), plan
