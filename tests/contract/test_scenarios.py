"""Every scenario, played by the client of every language against the same server.

Those that wait for a lost server are in test_broken_connections.py: they can wait while others are played.
"""

import pytest

from tests.contract.conftest import Stages
from tests.contract.languages import BUILD_SECONDS
from tests.contract.play import BROKEN, play, plays
from tests.contract.scenario_files import Group, Scenario, read_groups

# The first of these tests may build a driver.
pytestmark = pytest.mark.timeout(BUILD_SECONDS)


@pytest.mark.parametrize(
    ("group", "language", "scenario"), plays(group for group in read_groups() if group.name not in BROKEN)
)
async def test_a_client_does_what_the_contract_says(
    stages: Stages, group: Group, language: str, scenario: Scenario
) -> None:
    await play(scenario, await stages.of(group), language)
