"""What a package that is not installed is reported with: the command that installs it."""

import pytest

from bough_server.errors import ConfigurationError
from bough_server.store import opening


def test_a_postgres_url_without_its_driver_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError(name="psycopg")

    monkeypatch.setattr(opening, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r'pip install "bough-agents\[server,postgres\]"'):
        opening.display_database_url("postgresql://db/bough")
