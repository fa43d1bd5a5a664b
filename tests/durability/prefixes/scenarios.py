"""The recorded runs: one for each way in which a run can be under way when its server dies."""

from typing import Final

from tests.durability.prefixes.calls import BOUNDED, DEEP, PLAIN, RETRYING, SUB_AGENTS, TOOLS
from tests.durability.prefixes.cancellation import ABORTING, CANCELLED, OVERTIME
from tests.durability.prefixes.code_agents import CALLING, CODED
from tests.durability.prefixes.conversations import STAYING
from tests.durability.prefixes.files import PICTURES
from tests.durability.prefixes.histories import REMEMBERING
from tests.durability.prefixes.limits import ONE_AT_A_TIME, SPENT, UNSAID
from tests.durability.prefixes.mocks import MOCKED, STRICTLY_MOCKED
from tests.durability.prefixes.questions import (
    APPROVING,
    ASKING,
    CLIENT_SIDE,
    DISMISSED,
    DISMISSED_BY_CODE,
    PAYING_BY_CODE,
    RECOVERING,
)
from tests.durability.prefixes.state import KEEPING

SCENARIOS: Final = (
    PLAIN,
    TOOLS,
    SUB_AGENTS,
    DEEP,
    ABORTING,
    RETRYING,
    APPROVING,
    CLIENT_SIDE,
    CANCELLED,
    ASKING,
    OVERTIME,
    BOUNDED,
    RECOVERING,
    DISMISSED,
    CODED,
    KEEPING,
    REMEMBERING,
    SPENT,
    UNSAID,
    ONE_AT_A_TIME,
    CALLING,
    PAYING_BY_CODE,
    DISMISSED_BY_CODE,
    STAYING,
    PICTURES,
    MOCKED,
    STRICTLY_MOCKED,
)
