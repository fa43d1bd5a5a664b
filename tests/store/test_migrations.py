"""A next revision of the schema, on every database: applied by `bough db upgrade`, and refused by an older server."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from structlog.testing import capture_logs

from bough_server.errors import ConfigurationError
from bough_server.store.opening import database_status, open_store, upgrade_database
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.postgres import database as postgres_database
from bough_server.store.sql import migrations, schema_version
from bough_server.store.sqlite import database as sqlite_database
from bough_server.store.sqlite.database_path import is_postgres
from tests.store.logs import ANNE, Made, completed, delta
from tests.store.sql import execute
from tests.support.older_schema import BEFORE_LABELS, undo_labels

_NEXT = "9998"

_SCRIPT = f'''
"""A column and an index that only this test has."""

import sqlalchemy as sa
from alembic import op

from bough_server.store.sql.tables import NUMBER, TEXT

revision = "{_NEXT}"
down_revision = "{migrations.HEAD}"


def upgrade() -> None:
    """Add them."""
    op.add_column("runs", sa.Column("color", TEXT, nullable=False, server_default=sa.text("''")))
    op.add_column("runs", sa.Column("height", NUMBER, nullable=False, server_default=sa.text("0")))
    has_color = sa.text("color != ''")
    op.create_index(
        "runs_of_color", "runs", ["tenant_id", "color"], sqlite_where=has_color, postgresql_where=has_color
    )
'''


@contextmanager
def newer_version(folder: Path) -> Iterator[None]:
    """Inside, this is a version of the program that has one more revision."""
    here = Path(migrations.__file__).parent
    shutil.copytree(here, folder / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "migrations" / "versions" / f"r{_NEXT}_color.py").write_text(_SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "__file__", str(folder / "migrations" / "__init__.py"))
        for module in (schema_version, postgres_database, sqlite_database):
            patch.setattr(module, "HEAD", _NEXT)
        yield


async def test_a_next_revision_is_applied_with_all_that_there_is_and_refused_by_a_server_of_before(
    url: str, tmp_path: Path
) -> None:
    run, later = Made(number=1, labels={"n": "1"}), Made(number=2)
    async with open_store(url) as store:
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
        before = await store.runs.get(ANNE, run.run_id)
    with newer_version(tmp_path):
        assert ScriptDirectory(str(tmp_path / "migrations")).get_heads() == [_NEXT]
        assert not database_status(url).is_current
        with pytest.raises(ConfigurationError, match=f"has revision {migrations.HEAD}, and this version needs {_NEXT}"):
            open_store(url, may_upgrade=False)
        assert upgrade_database(url).revision == _NEXT
        assert upgrade_database(url).is_current
        async with open_store(url, may_upgrade=False) as store:
            assert await store.runs.get(ANNE, run.run_id) == before
            await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
            await store.log.create(later.new())
        assert execute(url, "SELECT color, height FROM runs") == [("", 0)] * 2
    for opening in (open_store, upgrade_database):
        with pytest.raises(ConfigurationError, match=f"has revision {_NEXT}, which is newer than {migrations.HEAD}"):
            opening(url)


async def test_a_server_that_may_upgrades_at_its_start(url: str, tmp_path: Path) -> None:
    async with open_store(url):
        pass
    with newer_version(tmp_path):
        async with open_store(url):
            assert database_status(url).revision == _NEXT


def test_a_revision_that_fails_leaves_the_database_as_it_was(url: str, tmp_path: Path) -> None:
    upgrade_database(url)
    with newer_version(tmp_path):
        script = tmp_path / "migrations" / "versions" / f"r{_NEXT}_color.py"
        script.write_text(f'{script.read_text()}    op.execute("SELECT 1 FROM nowhere")\n')
        with pytest.raises(Exception, match="nowhere"):
            upgrade_database(url)
    assert database_status(url).is_current
    with pytest.raises(Exception, match="color"):
        execute(url, "SELECT color FROM runs")


def test_a_column_of_a_next_revision_has_the_types_of_the_tables(postgres_url: str, tmp_path: Path) -> None:
    with newer_version(tmp_path):
        upgrade_database(postgres_url)
    types = "SELECT data_type, collation_name FROM information_schema.columns WHERE table_name = 'runs'"
    assert execute(postgres_url, f"{types} AND column_name = 'color'") == [("character varying", "C")]
    assert execute(postgres_url, f"{types} AND column_name = 'height'") == [("bigint", None)]
    found = execute(postgres_url, "SELECT indexdef FROM pg_indexes WHERE indexname = 'runs_of_color'")
    assert [" WHERE " in definition for (definition,) in found] == [True]


async def test_an_upgrade_indexes_the_labels_that_there_are_and_those_that_come(url: str) -> None:
    before, later = Made(number=1, labels={"in": "both"}), Made(number=2, labels={"in": "both"})
    async with open_store(url) as store:
        await store.log.create(before.new())
    undo_labels(url)
    with capture_logs() as logged:
        store = open_store(url)
    (said,) = [entry for entry in logged if entry["event"] == "upgraded the database"]
    assert (said["log_level"], said["from"], said["to"]) == ("warning", BEFORE_LABELS, migrations.HEAD)
    assert ("backup" in said) == (not is_postgres(url))
    async with store:
        await store.log.create(later.new())
        found, _ = await store.runs.list(ANNE, RunFilter(labels={"in": "both"}), Page(size=9))
        assert [run.run_id for run in found] == [later.run_id, before.run_id]
