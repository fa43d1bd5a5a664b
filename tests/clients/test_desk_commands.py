"""The commands on the example desk, with an embedded server and with a separate one; nothing is simulated."""

import json
import signal
import socket
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import eval_result_pb2, event_pb2, invocation_pb2
from tests.clients.cli_process import bough, bough_cold, started
from tests.support.log_readings import failures
from tests.support.processes import start_cold

DESK = Path(__file__).parents[2] / "examples" / "desk"
CONFIG = ("--config", str(DESK / "bough.yaml"))
QUESTION = "Why do leaves turn red?"


@pytest.fixture
def database(tmp_path: Path) -> dict[str, str]:
    """The environment of a desk with a new database."""
    return {"BOUGH_DATABASE": str(tmp_path / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}


async def test_a_turn_of_the_desk_is_run_inside_the_command_and_read_again_later(database: dict[str, str]) -> None:
    ran = await bough_cold(*CONFIG, "--embedded", "run", "lead", QUESTION, "--output", "json", environment=database)
    events = [json_format.Parse(line, event_pb2.AgentEvent()) for line in ran.out.splitlines()]
    run_id = events[0].run_id
    assert (ran.code, ran.err) == (0, f"run {run_id}\n")
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert failures(events) == []
    tree = await bough(*CONFIG, "--embedded", "tree", "last", "--json", environment=database)
    record = json_format.Parse(tree.out, invocation_pb2.Invocation())
    assert record.run_id == run_id
    assert [(agent.depth, agent.name) for agent in record.agents] == [(0, "lead"), (1, "researcher"), (1, "writer")]
    again = await bough(*CONFIG, "--embedded", "events", run_id[-8:], "--json", environment=database)
    assert again.out == ran.out


async def test_a_simulated_reader_says_the_same_each_time_and_its_runs_can_be_replayed(
    database: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    evaluate = ("eval", "run", str(DESK.parent / "eval" / "reader.yaml"), "--trials", "2", "--json", str(file))
    ran = await bough(*CONFIG, "--embedded", *evaluate, environment=database)
    first, second = json_format.Parse(file.read_text(encoding="utf-8"), eval_result_pb2.EvalResult()).cases[0].trials
    listed = await bough(*CONFIG, "--embedded", "runs", "--evaluation", "last", "--json", environment=database)
    users = [json.loads(line) for line in listed.out.splitlines() if '"agent":"user"' in line.replace(" ", "")]
    replayed = await bough(*CONFIG, "--embedded", "replay", users[0]["runId"], environment=database)

    assert (ran.code, replayed.code, len(users)) == (0, 0, 4)
    assert [turn.user for turn in first.turns] == ["Why do leaves turn red?", "And which pigment is it?"]
    assert [(turn.user, turn.answer) for turn in first.turns] == [(turn.user, turn.answer) for turn in second.turns]
    assert first.user_finished


async def test_without_a_server_the_first_line_is_still_the_run(database: dict[str, str]) -> None:
    if _somebody_listens(50051):
        pytest.skip("a server listens on the default port")
    ran = await bough(*CONFIG, "run", "lead", QUESTION, "--output", "answer", environment=database)
    told = await bough(*CONFIG, "run", "lead", QUESTION, "--output", "answer", "-v", environment=database)
    assert (ran.code, told.code) == (0, 0)
    (line,), (first, *rest) = ran.err.splitlines(), told.err.splitlines()
    assert line.startswith("run ")
    assert first.startswith("run ")
    assert rest == ["No server answers at 127.0.0.1:50051: using one embedded in this command."]


async def test_an_agent_that_is_not_there_is_a_sentence(database: dict[str, str]) -> None:
    ran = await bough(*CONFIG, "--embedded", "run", "led", QUESTION, environment=database)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "There is no agent 'led'. Did you mean 'lead'? `bough agents list` lists all agents.\n"
    assert "Traceback" not in ran.err


async def test_a_request_that_breaks_rules_names_its_fields(database: dict[str, str]) -> None:
    ran = await bough(*CONFIG, "--embedded", "run", "lead", "", environment=database)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "The request was refused.\n  input: must have at least one part with text, data or a blob\n"


async def test_serve_says_where_and_serves_until_it_is_told_to_stop(database: dict[str, str], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = await start_cold(*CONFIG, "serve", "--port", "0", "--ready-file", str(ready), environment=database)
    assert server.stdout is not None
    line = (await server.stdout.readline()).decode()
    port = int(line.rpartition(":")[2])
    assert line == f"serving 127.0.0.1:{port}\n"
    ran = await bough("run", "lead", QUESTION, "--output", "answer", port=port)
    assert (ran.code, ran.err.startswith("run ")) == (0, True)
    assert ready.read_text() == f"127.0.0.1:{port}\n"
    sessions = await bough("sessions", "list", "--json", port=port)
    (session,) = [json.loads(line)["sessionId"] for line in sessions.out.splitlines()]
    messages = await bough("sessions", "messages", session, "--json", port=port)
    kinds = [json.loads(line)["kind"].removeprefix("MESSAGE_KIND_") for line in messages.out.splitlines()]
    assert (kinds[0], kinds[-1]) == ("USER", "ASSISTANT")
    agents = await bough("agents", "list", "--json", port=port)
    assert [json.loads(line)["definition"]["name"] for line in agents.out.splitlines()] == [
        "lead",
        "researcher",
        "writer",
    ]
    server.send_signal(signal.SIGTERM)
    await server.communicate()
    assert server.returncode == 0


async def test_a_database_in_use_and_a_port_in_use_are_sentences(database: dict[str, str], tmp_path: Path) -> None:
    server = await started(*CONFIG, "serve", "--port", "0", environment=database)
    assert server.stdout is not None
    port = (await server.stdout.readline()).decode().strip().rpartition(":")[2]
    second = await bough(*CONFIG, "serve", "--port", "0", environment=database)
    assert (second.code, second.out, f"in use by process {server.pid}" in second.err) == (2, "", True)
    other = {**database, "BOUGH_DATABASE": str(tmp_path / "other.db")}
    third = await bough(*CONFIG, "serve", "--port", port, environment=other)
    assert (third.code, third.out, f"Port {port}" in third.err, "Traceback" in third.err) == (2, "", True, False)
    server.send_signal(signal.SIGINT)
    await server.communicate()
    assert server.returncode == 0


async def test_a_default_model_is_not_for_a_server_that_runs_already(database: dict[str, str]) -> None:
    server = await started(*CONFIG, "serve", "--port", "0", environment=database)
    assert server.stdout is not None
    port = int((await server.stdout.readline()).decode().strip().rpartition(":")[2])
    ran = await bough("run", "lead", "hi", "--default-model", "local", port=port)
    assert (ran.code, ran.err.startswith("--default-model applies only to an embedded server")) == (2, True)
    server.send_signal(signal.SIGTERM)
    await server.communicate()


async def test_definitions_are_validated_with_file_line_and_field(tmp_path: Path, database: dict[str, str]) -> None:
    good = await bough(*CONFIG, "agents", "validate", str(DESK / "agents"), environment=database)
    assert (good.code, good.out, good.err) == (0, "", "3 agents in 3 files: no problems found.\n")
    typo = tmp_path / "typo.yaml"
    typo.write_text("name: a\ndescripton: b\nllm:\n  model: defult\n")
    bad = await bough(*CONFIG, "agents", "validate", str(typo), environment=database)
    assert bad.code == 1
    assert f"{typo}:4: llm.model: There is no model 'defult'. Did you mean 'default'?" in bad.out.splitlines()
    places = [line.removeprefix(f"{typo}:").split(": ")[:2] for line in bad.out.splitlines()]
    assert places == [["1", "description"], ["2", "descripton"], ["4", "llm.model"]]
    missing = await bough(*CONFIG, "agents", "validate", str(tmp_path / "no.yaml"), environment=database)
    assert (missing.code, "cannot be read" in missing.err) == (2, True)


async def test_the_database_is_made_rebuilt_and_described(database: dict[str, str]) -> None:
    before = await bough(*CONFIG, "db", "status", environment=database)
    made = await bough(*CONFIG, "db", "upgrade", environment=database)
    after = await bough(*CONFIG, "db", "status", "--json", environment=database)
    rebuilt = await bough(*CONFIG, "db", "rebuild", environment=database)
    assert (before.code, made.code, after.code, rebuilt.code) == (1, 0, 0, 0)
    status = json.loads(after.out)
    assert (status["path"], status["revision"]) == (database["BOUGH_DATABASE"], status["head"])
    assert rebuilt.out == "0 runs rebuilt\n"


async def test_the_doctor_looks_at_everything(database: dict[str, str]) -> None:
    seen = await bough(*CONFIG, "doctor", "--json", environment=database)
    findings = {finding["name"]: finding for finding in map(json.loads, seen.out.splitlines())}
    assert seen.code == 0
    assert findings["agents"]["words"] == "lead, researcher, writer"
    assert findings["model default"]["isRight"] is True
    broken = await bough("--config", "/nowhere/bough.yaml", "doctor", environment=database)
    assert (broken.code, "!!  configuration: /nowhere/bough.yaml" in broken.out) == (1, True)


def _somebody_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
