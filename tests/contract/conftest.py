"""What the tests of the contract share: the stage of one group of scenarios at a time."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.contract.scenario_files import Group
from tests.contract.stage import Stage, staged


class Stages:
    """Starts the server of a group when its first scenario comes, and ends it when that of another group does."""

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
