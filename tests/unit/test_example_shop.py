"""The example of a shop desk that waits for people: its files fit together, and its tools ask as they teach."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from bough.v1 import agent_pb2
from bough_server.agents.loading import PythonParts, definition_files, load_python, load_sources, source_problems
from bough_server.agents.validation import Known
from bough_server.models.scripted.script import read_script
from bough_server.settings import Settings
from bough_server.tools.execution import needs_approval

SHOP = Path(__file__).parents[2] / "examples" / "approvals"
SETTINGS = Settings.load(SHOP / "bough.yaml")


@dataclass(frozen=True)
class Call:
    """A call as a tool knows it."""

    run_id: str = "run"
    session_id: str = "session"
    tenant_id: str = "tenant"
    user_id: str = "user"
    invocation_id: str = "invocation"
    agent: str = "refunds"
    call_id: str = "0.1"
    idempotency_key: str = "0197b2c4-5d6e"


@pytest.fixture
def parts() -> PythonParts:
    return load_python(SETTINGS.python, SETTINGS.folder)


def test_the_shops_definitions_fit_together(parts: PythonParts) -> None:
    sources = load_sources(definition_files(SETTINGS.agents, SETTINGS.folder))
    known = Known(
        tools=[each.name for each in parts.tools],
        client_tools=[each.name for each in parts.tools if each.is_client_side],
        models=SETTINGS.models,
        code_agents=[each.definition for each in parts.agents],
    )
    assert source_problems(sources, known) == []
    team = {source.definition.name: source.definition for source in sources}
    assert list(team) == ["lead", "refunds"]
    assert list(team["lead"].sub_agents) == [
        agent_pb2.AgentLink(agent="interviewer"),
        agent_pb2.AgentLink(agent="refunds"),
    ]
    assert [each.definition.name for each in parts.agents] == ["interviewer"]


def test_the_shops_tools_ask_each_in_its_own_way(parts: PythonParts) -> None:
    rules = {each.name: (each.is_client_side, each.on_recovery, each.answer_within) for each in parts.tools}
    assert rules == {"refund": (False, "ask", 7 * 86_400), "read_card": (True, "retry", 86_400)}


def test_a_refund_above_a_hundred_needs_approval(parts: PythonParts) -> None:
    refund = parts.tools[0]
    asked = [
        amount for amount in (99.5, 100, 100.5, 180) if needs_approval(refund, {"order_id": "1", "amount": amount})
    ]
    assert asked == [100.5, 180]


def test_a_refund_is_paid_under_its_calls_key_and_never_above_the_price(parts: PythonParts) -> None:
    refund = parts.tools[0]
    paid = refund("1001", 40, Call())
    assert paid == "40 EUR are paid back for order 1001, receipt 0197b2c4."
    with pytest.raises(ValueError, match="order 1001 was 40 EUR, so 41 EUR cannot be paid back"):
        refund("1001", 41, Call())
    with pytest.raises(ValueError, match="there is no order '7'"):
        refund("7", 1, Call())


def test_the_shops_script_calls_what_its_agents_have(parts: PythonParts) -> None:
    sources = load_sources(definition_files(SETTINGS.agents, SETTINGS.folder))
    offered = {
        source.definition.name: {each.name for each in source.definition.llm.tools}
        | {f"call_{each.agent}" for each in source.definition.sub_agents}
        for source in sources
    }
    script = read_script(SHOP / "scripts" / "shop.yaml")
    called = {name: {call.name for turn in turns for call in turn.calls} for name, turns in script.agents.items()}
    assert called == offered
