"""A pytest plugin for teams of agents: the fixture `bough_team` runs a project's agents on scripted models.

    def test_the_guide_asks_the_forecaster(bough_team):
        run = bough_team().run("guide", "A day in Oslo")
        assert run.answer == "The harbor, then a swim."
        assert run.tree == ["guide", "  forecaster (weather)"]

pytest loads this module in every session, wherever Bough is installed; the server is loaded when a test uses it.
"""

from asyncio import AbstractEventLoop
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bough_server.testing.team import Team, TeamRun, Teams

__all__ = ["Team", "TeamRun", "Teams", "bough_team"]


@pytest.fixture(scope="session")
def _bough_loop() -> Iterator[AbstractEventLoop]:
    """Yield the event loop of a thread, for the servers of all teams."""
    from bough_server.testing.team import ServerThread

    with ServerThread() as loop:
        yield loop


@pytest.fixture
def bough_team(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _bough_loop: AbstractEventLoop
) -> "Iterator[Teams]":
    """Open teams of the project that the test belongs to: `bough_team()`, or `bough_team(script)`.

    The project is that of the nearest `bough.yaml` at or above the test's folder. Teams are closed after the test.
    """
    from bough_server.testing.team import Teams

    with Teams(request.path.parent, tmp_path_factory.mktemp("bough"), _bough_loop) as teams:
        yield teams


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("bough_server.testing.team"), name)
