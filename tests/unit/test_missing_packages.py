"""What a package that is not installed is reported with: the command that installs it."""

import importlib.util
from pathlib import Path

import pytest

from bough_server.cli.eval.files import Files
from bough_server.errors import ConfigurationError, NotInstalled
from bough_server.evals.job.planning import require_extra
from bough_server.settings_sections import RedactSection
from bough_server.store import opening


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_a_postgres_url_without_its_driver_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError(name="psycopg")

    monkeypatch.setattr(opening, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r'pip install "bough-agents\[server,postgres\]"'):
        opening.display_database_url("postgresql://db/bough")


@pytest.mark.usefixtures("without_packages")
def test_an_evaluation_without_its_extra_is_refused_with_what_to_install() -> None:
    with pytest.raises(NotInstalled, match=r'pip install "bough-agents\[server,eval\]"'):
        require_extra()


@pytest.mark.usefixtures("without_packages")
def test_a_junit_file_without_its_package_is_refused_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r'junit\.xml: .*pip install "bough-agents\[server,eval\]"'):
        Files(junit=tmp_path / "junit.xml").check(RedactSection())
