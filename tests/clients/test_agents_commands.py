"""`bough agents` with agents that calls have stored, and `bough run` with agents that it brings in files."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough import AsyncClient
from bough_server.app import App
from bough_server.settings import Settings
from tests.clients.cli_process import Finished, bough
from tests.rpc.catalog_server import define, team_settings
from tests.rpc.run_server import served
from tests.support.projects import llm, write_project

COACH = """\
name: coach
description: Coaches.
llm:
  instruction: Coach.
sub_agents:
  - agent: writer
"""


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """A client of a server with agents in a file and in code."""
    async with served(team_settings(tmp_path)) as server, AsyncClient(server.app.address) as connected:
        yield connected


async def _embedded(config: Path, *arguments: str) -> Finished:
    return await bough("--config", str(config), "--embedded", *arguments)


def _port(client: AsyncClient) -> int:
    return int(client.address.rpartition(":")[2])


async def test_stored_agents_are_listed_and_shown_with_revision_and_time(client: AsyncClient) -> None:
    stored = await client.catalog.create_agent(define("coach", links=["writer"]))
    listed = await bough("agents", "list", port=_port(client))
    shown = await bough("agents", "show", "coach", port=_port(client))
    as_json = json.loads((await bough("agents", "show", "coach", "--json", port=_port(client))).out)
    head, *rows = listed.out.splitlines()
    assert head.split() == ["agent", "model", "revision", "stored", "what", "it", "does"]
    coach, editor = (next(row for row in rows if row.startswith(name)) for name in ("coach", "editor"))
    assert (f"  {stored.revision[:12]}  " in coach, stored.revision in listed.out, editor.split()[3]) == (
        True,
        False,
        "-",
    )
    assert shown.out.splitlines()[:5] == [
        "# source: stored",
        f"# revision: {stored.revision[:12]}",
        f"# create_time: {stored.create_time.ToJsonString()}",
        f"# revision_create_time: {stored.revision_create_time.ToJsonString()}",
        "name: coach",
    ]
    assert (as_json["revision"], as_json["createTime"]) == (stored.revision, stored.create_time.ToJsonString())


async def test_a_run_tries_agents_of_files(client: AsyncClient, tmp_path: Path) -> None:
    folder = tmp_path / "team"
    folder.mkdir()
    (folder / "coach.yaml").write_text(COACH, encoding="utf-8")
    (folder / "writer.yaml").write_text("name: writer\ndescription: Writes.\nllm: {}\n", encoding="utf-8")
    ran = await bough(*("run", "coach", "Go.", "--definitions", str(folder), "--output", "answer"), port=_port(client))
    assert (ran.code, ran.out) == (0, "The coach's word.\n")
    assert "coach" not in [agent.definition.name async for agent in client.catalog.list_agents()]


async def test_what_is_wrong_with_them_is_told_by_file_line_and_field(client: AsyncClient, tmp_path: Path) -> None:
    coach, typo = tmp_path / "coach.yaml", tmp_path / "typo.yaml"
    coach.write_text(COACH.replace("writer", "riter"), encoding="utf-8")
    typo.write_text(COACH.replace("name:", "nam:"), encoding="utf-8")
    files = ("--definitions", str(coach))
    judged = await bough("run", "coach", "Go.", *files, port=_port(client))
    misspelled = await bough("run", "coach", "Go.", *files, "--definitions", str(typo), port=_port(client))
    assert (judged.code, judged.out) == (2, "")
    assert judged.err.splitlines() == [
        f"{coach}:6: sub_agents[0].agent: There is no agent 'riter'. Did you mean 'writer'?"
    ]
    assert misspelled.code == 2
    assert f"{typo}:1: nam: There is no such field. Did you mean 'name'?" in misspelled.err


async def test_runs_of_agents_that_stand_in_no_file_replay_with_their_revisions(tmp_path: Path) -> None:
    script: dict[str, list[object]] = {
        "coach": [{"calls": [{"name": "call_writer", "arguments": {"message": "Write."}}]}, "Done."],
        "*": ["A word."],
    }
    config = write_project(tmp_path, llm("writer"), script=script)
    coach = tmp_path / "coach.yaml"
    coach.write_text(COACH, encoding="utf-8")
    tried = await _embedded(config, "run", "coach", "Go.", "--definitions", str(coach), "--output", "answer")
    replayed = await _embedded(config, "replay", "last")
    async with App.open(Settings.load(config, port=0)) as app, AsyncClient(app.address) as client:
        stored = await client.catalog.create_agent(define("coach", links=["writer"]))
        answer = await client.ask("coach", "Go.")
        changed = await client.catalog.update_agent(define("coach"), revision=stored.revision)
    again = await _embedded(config, "replay", "last")
    shown = await _embedded(config, "agents", "show", "coach", "--revision", stored.revision, "--json")
    expected = (0, "replays to its end: 3 recorded results replayed, nothing diverged")
    assert (tried.code, tried.out, answer) == (0, "Done.\n", "Done.")
    for each in (replayed, again):
        assert (each.code, each.out.strip().partition(" replays ")[2]) == (0, expected[1].partition("replays ")[2])
    assert changed.revision != stored.revision
    assert json.loads(shown.out)["revision"] == stored.revision


HOUSE_CODE = """\
from bough_server import agent, condition

@condition
def enough(snapshot):
    return snapshot.iteration == 1

@agent(version="3")
async def counts(ctx, input):
    \"\"\"Counts its rounds.\"\"\"
    ctx.state["count"] = ctx.state.get("count", 0) + 1
    return f"Round {ctx.state['count']}."
"""

ROUNDS = """\
name: rounds
description: Goes on until it is enough.
loop: {max_iterations: 5, until: {predicate: enough}}
sub_agents: [{agent: counter, input: {template: "Go on with {{user}}."}}]
---
name: counter
description: Counts.
function: {function: counts}
"""


async def test_definitions_name_the_code_and_the_functions_of_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "bough.yaml"
    storage = f"storage: {{url: {tmp_path / 'bough.db'}}}"
    config.write_text(f"agents: [rounds.yaml]\npython: [house_code]\n{storage}\n", encoding="utf-8")
    (tmp_path / "house_code.py").write_text(HOUSE_CODE, encoding="utf-8")
    (tmp_path / "rounds.yaml").write_text(ROUNDS, encoding="utf-8")
    wrong = tmp_path / "wrong.yaml"
    text = (
        ROUNDS.replace("enough}", "enuogh}")
        .replace("{{user}}", "{{usr}}")
        .replace("function: counts", "function: cuonts")
    )
    wrong.write_text(text, encoding="utf-8")
    ran = await _embedded(config, "run", "rounds", "it", "--output", "answer")
    validated = await _embedded(config, "agents", "validate", str(wrong))
    named = await _embedded(config, "agents", "validate")
    assert (ran.out, ran.code) == ("Round 2.\n", 0)
    assert (named.code, named.err.splitlines()[-1]) == (0, "2 agents in 1 file: no problems found.")
    assert validated.code == 1
    places = [line.partition(": ")[2].partition(": ")[0] for line in validated.out.splitlines()]
    assert places[:3] == ["loop.until.predicate", "sub_agents[0].input.template", "function.function"]


async def test_validation_names_agents_that_can_call_each_other_in_turn(tmp_path: Path) -> None:
    config = write_project(
        tmp_path,
        llm("lead", calls=["clerk"]),
        llm("clerk", calls=["helper", "writer"]),
        llm("helper", calls=["lead"]),
        llm("writer"),
        {
            "name": "desk",
            "description": "Members.",
            "swarm": {"entry_agent": "one"},
            "sub_agents": [{"agent": "one"}, {"agent": "two"}],
        },
        llm("one"),
        llm("two"),
        script={},
    )
    ended = await _embedded(config, "agents", "validate")
    assert (ended.code, ended.out, ended.err.splitlines()) == (
        0,
        "",
        [
            "note: lead -> clerk -> helper -> lead: they can call each other in turn, until `limits.depth` ends it.",
            "7 agents in 1 file: no problems found.",
        ],
    )


async def test_validation_reads_the_scripts_of_models_and_names_agents_that_are_not_there(tmp_path: Path) -> None:
    script = {"lead": ["Yes."], "judge": ["Yes."], "lead.summary": ["So far."], "laed": ["No."]}
    config = write_project(tmp_path, llm("lead"), script=script)
    noted = await _embedded(config, "agents", "validate")
    (tmp_path / "script.yaml").write_text("agents:\n  lead:\n    - txt: Yes.\n", encoding="utf-8")
    wrong = await _embedded(config, "agents", "validate")
    assert (noted.code, noted.out, noted.err.splitlines()) == (
        0,
        "",
        [
            f"note: {tmp_path / 'script.yaml'}: agents.laed: There is no agent 'laed'. Did you mean 'lead'?",
            "1 agent in 1 file: no problems found.",
        ],
    )
    assert (wrong.code, wrong.err) == (1, "1 problem in 1 file.\n")
    assert wrong.out.startswith(f"{tmp_path / 'script.yaml'}:3: agents.lead[0].txt: There is no such field.")
