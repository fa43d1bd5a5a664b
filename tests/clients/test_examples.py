"""The commands of the examples' READMEs: the answer of each, and its agent tree."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough import collect_sync, text_of
from bough.v1 import event_pb2, execution_pb2, invocation_pb2
from bough_server.cli.render.live import LiveView
from bough_server.models.local.engine import find_problem
from bough_server.tree.fold import fold
from tests.clients.cli_process import bough
from tests.support.log_readings import failures

KINDS = Path(__file__).parents[2] / "examples" / "kinds"
CONFIG = ("--config", str(KINDS / "bough.yaml"), "--embedded")
_COMMAND = re.compile(r'`try (\w+) "([^"]+)"`')
COMMANDS = dict(_COMMAND.findall((KINDS / "README.md").read_text(encoding="utf-8")))
"""The agent of each command in the README, and its input."""

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
    "party": (
        "Six of us will come on Saturday. There is a cake without nuts.",
        [
            (0, "party", "ANSWERED"),
            (1, "host", "ANSWERED"),
            (1, "helper", "ANSWERED"),
            (1, "checker", "ANSWERED"),
            (1, "helper", "ANSWERED"),
            (1, "checker", "ANSWERED"),
        ],
    ),
    "jury": (
        "Yes, by 2 votes to 1.",
        [(0, "jury", "ANSWERED"), (1, "farmer", "ANSWERED"), (1, "baker", "ANSWERED"), (1, "teacher", "ANSWERED")],
    ),
}


_TIMES = re.compile(r"(, |  )[0-9.]+ m?s(, [0-9,]+ tokens)?$")
SHOWN = {
    "haiku": [
        "● haiku  loop",
        "│ ○ iteration 1",
        "│ ● poet",
        "│ │ Red leaves on the path.",
        "│ │ My old broom is very slow this morning.",
        "│ │ The wind is quicker.",
        "│ ✓ poet",
        "│ ● critic",
        "│ │ The second line has ten syllables, and may have seven. Take two words out.",
        "│ ✓ critic",
        "│ ○ iteration 2",
        "│ ● poet #2",
        "│ │ Red leaves on the path.",
        "│ │ My broom is slow this morning.",
        "│ │ The wind is quicker.",
        "│ ✓ poet #2",
        "│ ● critic #2",
        "│ │ → break_loop",
        "│ │ ← break_loop  The loop ends here.",
        "│ ✓ critic #2  broke the loop",
        "✓ haiku  ended by a break",
    ],
    "helpline": [
        "● helpline  swarm",
        "│ ● greeter",
        '│ │ → transfer_to_agent {"agent_name": "technician"}',
        "│ ✓ greeter  transferred",
        "│ ⇢ greeter transfers to technician",
        "│ ● technician",
        "│ │ The router first: hold its button for ten seconds, and the light turns green.",
        '│ │ → transfer_to_agent {"agent_name": "billing"}',
        "│ ✓ technician  transferred",
        "│ ⇢ technician transfers to billing",
        "│ ● billing",
        "│ │ I am sorry for the second charge. It is back on your card in three days.",
        "│ ✓ billing",
        "✓ helpline",
    ],
    "party": [
        "● party  plan_execute",
        "│ ● host",
        '│ │ → plan {"steps": ["Ask who comes.", "Order a cake that is big enough."]}',
        "│ │ ← plan  Planned.",
        "│ ✓ host",
        "│ ≡ planned: 2 steps",
        "│   1. Ask who comes.",
        "│   2. Order a cake that is big enough.",
        "│ ● helper",
        "│ │ Six come, and one of them eats no nuts.",
        "│ ✓ helper",
        "│ ● checker",
        '│ │ → plan {"steps": ["Order a cake for six without nuts."]}',
        "│ │ ← plan  Planned.",
        "│ ✓ checker",
        "│ ≡ left to do: 1 step",
        "│   1. Order a cake for six without nuts.",
        "│ ● helper #2",
        "│ │ The cake is ordered, without nuts.",
        "│ ✓ helper #2",
        "│ ● checker #2",
        '│ │ → respond {"answer": "Six of us will come on Saturday. There is a cake without nuts."}',
        "│ │ ← respond  Six of us will come on Saturday. There is a cake without nuts.",
        "│ ✓ checker #2",
        "✓ party",
    ],
}
"""The live view of some runs, in lines without their times."""

Log = list[event_pb2.AgentEvent]


@pytest.fixture(scope="module")
def turn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Awaitable[Log]]:
    """Return the events of the README's command for an agent; it is run once."""
    environment = {"BOUGH_DATABASE": str(tmp_path_factory.mktemp("kinds") / "bough.db")}
    made: dict[str, Log] = {}

    async def events_of(agent: str) -> Log:
        if agent not in made:
            ran = await bough(*CONFIG, "run", agent, COMMANDS[agent], "--output", "json", environment=environment)
            assert ran.code == 0, ran.err
            made[agent] = [json_format.Parse(line, event_pb2.AgentEvent()) for line in ran.out.splitlines()]
        return made[agent]

    return events_of


def test_the_readme_has_a_command_for_every_team() -> None:
    assert COMMANDS.keys() == {*EXPECTED, "porter"}


@pytest.mark.parametrize("agent", EXPECTED)
async def test_a_team_of_each_kind_answers_and_has_its_tree(agent: str, turn: Callable[[str], Awaitable[Log]]) -> None:
    answer, nodes = EXPECTED[agent]
    log = await turn(agent)
    record = fold(log)
    assert collect_sync(log).answer == text_of(record.final_response) == answer
    assert [(node.depth, node.name, _reason(node)) for node in record.agents] == nodes
    assert failures(log) == []
    assert not [*record.anomalies, *(text for node in record.agents for text in node.anomalies)]


@pytest.mark.parametrize("agent", SHOWN)
async def test_a_turn_reads_as_what_happened(agent: str, turn: Callable[[str], Awaitable[Log]]) -> None:
    view = LiveView(width=100)
    lines = [_TIMES.sub("", line.plain) for event in await turn(agent) for line in view.feed(event)]
    assert lines == SHOWN[agent]


async def test_the_second_run_of_a_helpline_starts_with_the_member_that_answered_last(tmp_path: Path) -> None:
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db")}
    command, session = (*CONFIG, "run", "helpline"), tuple[str, ...]()
    logs: list[Log] = []
    for text in (COMMANDS["helpline"], "When exactly?"):
        ran = await bough(*command, text, *session, "--output", "json", environment=environment)
        assert ran.code == 0, ran.err
        logs.append([json_format.Parse(line, event_pb2.AgentEvent()) for line in ran.out.splitlines()])
        assert failures(logs[-1]) == []
        session = ("--session", logs[0][0].session_id)
    assert [log[0].run_started.starts_with for log in logs] == ["", "billing"]
    assert collect_sync(logs[1]).answer == "On Thursday at noon."
    assert [node.name for node in fold(logs[1]).agents] == ["helpline", "billing"]


async def test_the_definitions_are_right(tmp_path: Path) -> None:
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db")}
    found = await bough(*CONFIG, "agents", "validate", str(KINDS / "agents"), environment=environment)
    assert (found.code, found.out) == (0, "")


@pytest.mark.skipif(find_problem() is not None, reason=f"THE EMBEDDED SUPERVISOR IS NOT TESTED: {find_problem()}")
@pytest.mark.timeout(120)
async def test_the_embedded_model_hands_over_to_a_member_and_answers_after_it(
    turn: Callable[[str], Awaitable[Log]],
) -> None:
    log = await turn("porter")
    record = fold(log)
    assert failures(log) == []
    assert text_of(record.final_response).strip() != ""
    # The model is very small: which guide it calls, and their texts, are not asserted.
    assert [(node.depth, node.kind, node.trigger, node.step_count) for node in record.agents] == [
        (0, execution_pb2.AGENT_KIND_SUPERVISOR, execution_pb2.INVOCATION_TRIGGER_ROOT, 2),
        (1, execution_pb2.AGENT_KIND_LLM, execution_pb2.INVOCATION_TRIGGER_TRANSFER, 1),
    ]
    assert [tool.name for tool in record.tools] == ["transfer_to_agent"]


def _reason(node: invocation_pb2.AgentInvocation) -> str:
    return execution_pb2.EndReason.Name(node.end_reason).removeprefix("END_REASON_")
