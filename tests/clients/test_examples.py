"""The examples by their commands, as their READMEs have them: what each answers, and the tree that it makes."""

import re
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough import text_of
from bough.v1 import event_pb2, invocation_pb2
from bough_server.models.local import available
from bough_server.tree import fold
from tests.clients.commands import bough

KINDS = Path(__file__).parents[2] / "examples" / "kinds"
CONFIG = ("--config", str(KINDS / "bough.yaml"), "--embedded")
_COMMAND = re.compile(r'`try (\w+) "([^"]+)"`')
COMMANDS = dict(_COMMAND.findall((KINDS / "README.md").read_text(encoding="utf-8")))
"""The agent of each command in the README, and what it is told."""

Node = tuple[int, str, str]

EXPECTED: dict[str, tuple[str, list[Node]]] = {
    "minutes": (
        "Ann paints the shed on Friday. Ben brings the paint.",
        [(0, "minutes", "ANSWERED"), (1, "listener", "ANSWERED"), (1, "clerk", "ANSWERED")],
    ),
    "dinner": (
        "A soup of roast pumpkin.\n\nMushroom risotto, with thyme.\n\nBaked apples with walnuts.",
        [
            (0, "dinner", "ANSWERED"),
            (1, "starter", "ANSWERED"),
            (1, "main_course", "ANSWERED"),
            (1, "dessert", "ANSWERED"),
        ],
    ),
    "haiku": (
        "Red leaves on the path.\nMy broom is slow this morning.\nThe wind is quicker.",
        [
            (0, "haiku", "BROKE_LOOP"),
            (1, "poet", "ANSWERED"),
            (1, "critic", "ANSWERED"),
            (1, "poet", "ANSWERED"),
            (1, "critic", "BROKE_LOOP"),
        ],
    ),
    "slogan": (
        "Warm bread, warm hearts.",
        [(0, "slogan", "ANSWERED"), (1, "copywriter", "ANSWERED"), (1, "copywriter", "ANSWERED")],
    ),
    "reception": (
        "Room 12 is yours tonight, and breakfast waits at six.",
        [(0, "reception", "ANSWERED"), (1, "rooms", "ANSWERED"), (1, "kitchen", "ANSWERED")],
    ),
    "helpline": (
        "I am sorry for the second charge. It is back on your card in three days.",
        [
            (0, "helpline", "ANSWERED"),
            (1, "greeter", "TRANSFERRED"),
            (1, "technician", "TRANSFERRED"),
            (1, "billing", "ANSWERED"),
        ],
    ),
    "jury": (
        "Yes, by 2 votes to 1.",
        [(0, "jury", "ANSWERED"), (1, "farmer", "ANSWERED"), (1, "baker", "ANSWERED"), (1, "teacher", "ANSWERED")],
    ),
}


@pytest.fixture
def database(tmp_path: Path) -> dict[str, str]:
    """The environment of a database of its own."""
    return {"BOUGH_DATABASE": str(tmp_path / "bough.db")}


def test_the_readme_has_a_command_for_every_team() -> None:
    assert COMMANDS.keys() == {*EXPECTED, "porter"}


@pytest.mark.parametrize("agent", EXPECTED)
async def test_a_team_of_each_kind_answers_and_has_its_tree(agent: str, database: dict[str, str]) -> None:
    answer, nodes = EXPECTED[agent]
    record = await _record(agent, database)
    assert text_of(record.final_response) == answer
    assert [(node.depth, node.name, _reason(node)) for node in record.agents] == nodes
    assert not [*record.anomalies, *(text for node in record.agents for text in node.anomalies)]


async def test_the_definitions_are_right(database: dict[str, str]) -> None:
    found = await bough(*CONFIG, "agents", "validate", str(KINDS / "agents"), environment=database)
    assert (found.code, found.out) == (0, "")


@pytest.mark.skipif(available() is not None, reason=f"THE EMBEDDED SUPERVISOR IS NOT TESTED: {available()}")
@pytest.mark.timeout(120)
async def test_the_embedded_model_hands_over_to_a_member_and_answers_after_it(database: dict[str, str]) -> None:
    record = await _record("porter", database)
    assert text_of(record.final_response).strip() != ""
    # Which guide it asks, and what they say, is a very small model's.
    assert [(node.depth, node.kind, node.trigger, node.step_count) for node in record.agents] == [
        (0, event_pb2.AGENT_KIND_SUPERVISOR, event_pb2.TRIGGER_ROOT, 2),
        (1, event_pb2.AGENT_KIND_LLM, event_pb2.TRIGGER_TRANSFER, 1),
    ]
    assert [tool.name for tool in record.tools] == ["transfer_to_agent"]


async def _record(agent: str, database: dict[str, str]) -> invocation_pb2.Invocation:
    """What the command that the README has for an agent makes."""
    ran = await bough(*CONFIG, "run", agent, COMMANDS[agent], "--output", "json", environment=database)
    assert ran.code == 0, ran.err
    return fold([json_format.Parse(line, event_pb2.AgentEvent()) for line in ran.out.splitlines()])


def _reason(node: invocation_pb2.AgentInvocation) -> str:
    return event_pb2.EndReason.Name(node.end_reason).removeprefix("END_REASON_")
