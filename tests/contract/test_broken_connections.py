"""The scenarios of connections that break and of servers that are killed, played by the client of every language."""

import pytest

from tests.contract.conftest import Stages
from tests.contract.languages import BUILD_SECONDS
from tests.contract.play import BROKEN, play, plays
from tests.contract.scenario_files import FOLDER, Group, Scenario, read_group

# The first of these tests may build a driver.
pytestmark = pytest.mark.timeout(BUILD_SECONDS)


@pytest.mark.parametrize(
    ("group", "language", "scenario"), plays(read_group(FOLDER / f"{name}.yaml") for name in BROKEN)
)
async def test_a_client_does_what_the_contract_says_whatever_breaks(
    stages: Stages, group: Group, language: str, scenario: Scenario
) -> None:
    await play(scenario, await stages.of(group), language)
