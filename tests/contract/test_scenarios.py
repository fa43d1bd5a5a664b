"""Every scenario, played by the client of every language against the same server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.contract.languages import BUILD_SECONDS, LANGUAGES
from tests.contract.play import play
from tests.contract.scenario_files import Group, Scenario, read_groups
from tests.contract.stage import Stage, staged

# The first of these tests may build a driver.
pytestmark = pytest.mark.timeout(BUILD_SECONDS)

GROUPS = {group.name: group for group in read_groups()}


class Stages:
    """The stage of one group at a time: tests come group by group."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders, self._stack = folders, AsyncExitStack()
        self._group: Group | None = None
        self._stage: Stage | None = None

    async def of(self, group: Group) -> Stage:
        """Return the stage of a group; that of another one is ended."""
        if self._stage is None or self._group is not group:
            await self.close()
            self._group = group
            folder = self._folders.mktemp(group.name)
            self._stage = await self._stack.enter_async_context(staged(group.server, folder))
        return self._stage

    async def close(self) -> None:
        """End the present stage."""
        self._stage = None
        await self._stack.aclose()


@pytest.fixture(scope="module")
async def stages(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stages]:
    """The servers of the groups, each started once."""
    stages = Stages(tmp_path_factory)
    yield stages
    await stages.close()


@pytest.mark.parametrize(
    ("group", "language", "scenario"),
    [
        pytest.param(group, language, scenario, id=f"{group.name}-{language}-{scenario.name}")
        for group in GROUPS.values()
        for language in LANGUAGES
        for scenario in group.scenarios
    ],
)
async def test_a_client_does_what_the_contract_says(
    stages: Stages, group: Group, language: str, scenario: Scenario
) -> None:
    await play(scenario, await stages.of(group), language)
