"""The other commands of `bough eval`: evaluations listed and compared, runs recorded, scored and compared."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf import json_format
from junitparser import JUnitXml

from bough.v1 import eval_result_pb2
from tests.clients.cli_process import bough, server_of
from tests.clients.eval_project import ANSWER, write_set, write_team

DESK = Path(__file__).parents[2] / "examples" / "desk"
WORSE = ("[boat]", "[ferry]")


@pytest.fixture(scope="module")
async def port(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[int]:
    """A server of the team, with an evaluation that passed and a later one in which a case is worse."""
    folder = tmp_path_factory.mktemp("team")
    async with server_of(write_team(folder)) as port:
        await bough("eval", "run", write_set(folder), port=port)
        await bough("eval", "run", write_set(folder, WORSE), port=port)
        yield port


async def ids(port: int) -> list[str]:
    listed = await bough("eval", "list", "--json", port=port)
    return [json.loads(line)["evaluationId"] for line in listed.out.splitlines()]


async def test_evaluations_are_listed_newest_first_in_whole_lines(port: int) -> None:
    listed = await bough("eval", "list", port=port)
    head, newest, oldest = listed.out.splitlines()

    assert (listed.code, head.split()) == (0, ["evaluation", "verdict", "created", "set,", "agent"])
    assert [newest.split()[:2], oldest.split()[:2]] == [
        [(await ids(port))[0], "failed"],
        [(await ids(port))[1], "passed"],
    ]
    assert newest.endswith("trips, guide")
    assert (await bough("eval", "list", "--limit", "1", port=port)).out.splitlines() == [head, newest]


async def test_without_evaluations_a_sentence_says_how_to_start_one(tmp_path: Path) -> None:
    config = ("--config", str(write_team(tmp_path)), "--embedded")
    listed = await bough(*config, "eval", "list")
    shown = await bough(*config, "eval", "show", "last")

    assert (listed.code, listed.out) == (0, "")
    assert listed.err == "There are no evaluations yet: start one with `bough eval run`.\n"
    assert (shown.code, shown.err) == (2, "There is no evaluation yet: start one with `bough eval run`.\n")


async def test_show_and_watch_print_what_run_printed_with_its_exit_code(port: int, tmp_path: Path) -> None:
    newest, oldest = await ids(port)
    shown = await bough("eval", "show", "last", "--junit", str(tmp_path / "j.xml"), port=port)
    watched = await bough("eval", "watch", newest[-8:], port=port)

    assert (shown.code, watched.code, (await bough("eval", "show", oldest, port=port)).code) == (1, 1, 0)
    assert shown.out == watched.out
    assert "failed      bergen  final_response=0" in shown.out
    assert JUnitXml.fromfile(str(tmp_path / "j.xml")).failures == 1
    assert sorted(watched.err.splitlines())[-1] == "oslo passed"


async def test_the_runs_and_sessions_of_an_evaluation_are_listed_apart(tmp_path: Path) -> None:
    embedded = ("--config", str(write_team(tmp_path)), "--embedded")
    ended = await bough(*embedded, "eval", "run", write_set(tmp_path))
    await bough(*embedded, "run", "guide", "What shall I do in Oslo?")
    listed = await bough(*embedded, "runs", "--evaluation", "last", "--json")
    found = [json.loads(line) for line in listed.out.splitlines()]
    evaluation_id = ended.err.split()[1]
    assert sorted((one["evaluation"]["evaluationId"], one["evaluation"]["caseId"]) for one in found) == [
        (evaluation_id, "bergen"),
        (evaluation_id, "oslo"),
    ]
    others = await bough(*embedded, "runs", "--json")
    assert ["evaluation" in json.loads(line) for line in others.out.splitlines()] == [False]
    counts = {
        " ".join(listing): len((await bough(*embedded, *listing, "--json")).out.splitlines())
        for listing in (("runs", "--all"), ("sessions", "list"), ("sessions", "list", "--all"))
    }
    assert counts == {"runs --all": 3, "sessions list": 1, "sessions list --all": 3}
    tree = await bough(*embedded, "tree", found[0]["runId"][-8:])
    assert (tree.code, tree.err) == (0, "")
    unknown = await bough(*embedded, "runs", "--evaluation", "zzzzzz")
    assert (unknown.code, "There is no evaluation whose id ends in 'zzzzzz'" in unknown.err) == (2, True)


async def test_a_name_that_is_none_is_a_sentence(port: int) -> None:
    for name, said in (
        ("nope", "'nope' is too short to name an evaluation: "),
        ("abcdefgh", "There is no evaluation whose id ends in 'abcdefgh': "),
        ("01970000-0000-7000-8000-000000000000", "There is no evaluation "),
    ):
        for command in ("show", "watch", "cancel"):
            ended = await bough("eval", command, name, port=port)
            assert (ended.code, ended.out, ended.err.startswith(said)) == (2, "", True), ended.err


async def test_two_results_are_compared_by_id_or_as_files_without_a_server(port: int, tmp_path: Path) -> None:
    newest, oldest = await ids(port)
    for name, evaluation in (("new", newest), ("old", oldest)):
        await bough("eval", "show", evaluation, "--json", str(tmp_path / f"{name}.json"), port=port)
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    by_id = await bough("eval", "compare", oldest[-10:], "last", port=port)
    by_file = await bough("--config", str(write_team(tmp_path)), "eval", "compare", old, new)
    mixed = await bough("eval", "compare", new, oldest, port=port)

    assert (by_id.code, by_file.code, mixed.code) == (0, 0, 0), "one trial of a case proves nothing"
    assert by_id.out == by_file.out
    changed, unclear, why, counts, tested, power, estimates = by_id.out.splitlines()
    assert changed.startswith("The content of the set has changed: ")
    assert unclear == "unclear     bergen  passed -> failed, 1.00 to 0.00"
    assert why.strip() == "0 of 1 trial passed, 1 of 1 in the baseline, which may be chance (p = 0.5)."
    assert counts.startswith("compared with the baseline: 0 better, 0 worse, 1 unclear, 0 removed, 0 added, pass rate ")
    assert tested == "No regression is proven: over 2 cases 1 of 2 trials passed, 2 of 2 in the baseline (p = 0.5)."
    assert power.startswith(
        "This comparison, 1 trial against 1 of 2 cases, finds no drop of all cases together in 80 %"
    )
    assert estimates.startswith("Mean changes of a case: pass_rate -0.5 (-1 to +0), ")
    assert "0 better, 0 worse, 1 unclear" in mixed.out
    printed = await bough("eval", "compare", old, new, "--json", port=port)
    assert json_format.Parse(printed.out, eval_result_pb2.EvalComparison()).unclear == 1
    assert not (tmp_path / "bough.db").exists()


async def test_runs_are_scored_by_a_case_of_a_set(port: int, tmp_path: Path) -> None:
    await bough("run", "guide", "Oslo?", port=port)
    passed = await bough("eval", "score", "last", "--set", write_set(tmp_path), "--case", "oslo", port=port)
    unset = await bough("eval", "score", "last", port=port)
    several = await bough("eval", "score", "last", "--set", write_set(tmp_path), port=port)
    unknown = await bough("eval", "score", "last", "--set", write_set(tmp_path), "--case", "olso", port=port)
    user = f"{{model: default, goal: A trip., expect: {{answer: {{exact: {ANSWER}}}}}}}"
    talk = write_set(tmp_path, text=f"name: talk\nagent: guide\ncases: [{{id: a, user: {user}}}]\n")
    conversation = await bough("eval", "score", "last", "--set", talk, port=port)
    missed = write_set(tmp_path, WORSE)
    files = ("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    failed = await bough("eval", "score", "last", "--set", missed, "--case", "bergen", *files, port=port)

    assert [one.code for one in (passed, unset, several, unknown, failed)] == [0, 0, 2, 2, 1]
    assert "final_response=1 tool_trajectory=1 agent_trajectory=1" in passed.out
    assert (conversation.code, "final_response=1" in conversation.out) == (0, True)
    assert "The set has several cases: choose one with --case." in several.err
    assert "There is no case 'olso'. Did you mean 'oslo'?" in unknown.err
    assert 'does not contain "ferry"' in failed.out
    assert (tmp_path / "r.html").stat().st_size > 1000


async def test_the_trees_of_two_runs_are_compared(port: int, tmp_path: Path) -> None:
    await bough("run", "guide", "Oslo?", port=port)
    first = (await bough("runs", "--limit", "1", "--json", port=port)).out
    await bough("run", "guide", "Oslo?", port=port)
    run_id = json.loads(first)["runId"]
    same = await bough("eval", "diff", run_id, "last", port=port)
    printed = await bough("eval", "diff", run_id, "last", "--json", port=port)

    assert (same.code, same.out) == (0, "The agents, their calls and the answers are the same.\n")
    assert json_format.Parse(printed.out, eval_result_pb2.InvocationDiff()).same
    other = tmp_path / "guide.yaml"
    other.write_text(
        "name: guide\ndescription: Plans.\nsequence: {}\nsub_agents: [walker]\n"
        "---\nname: walker\ndescription: Walks.\nllm: {instruction: Walk.}\n",
        encoding="utf-8",
    )
    await bough("run", "guide", "Oslo?", "--definitions", str(other), port=port)
    differ = await bough("eval", "diff", run_id, "last", port=port)
    assert differ.code == 1
    assert "walker" in differ.out
    assert "look_up" in differ.out


async def test_a_run_becomes_a_case_that_passes_where_its_tools_do_not_run(tmp_path: Path) -> None:
    shutil.copytree(DESK, tmp_path / "desk", ignore=shutil.ignore_patterns("var", "__pycache__"))
    config, recorded = ("--config", str(tmp_path / "desk" / "bough.yaml"), "--embedded"), str(tmp_path / "set.yaml")
    environment = {"BOUGH_DATABASE": str(tmp_path / "first.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    await bough(*config, "run", "lead", "Why do leaves turn red?", environment=environment)
    made = await bough(
        *config, "eval", "record", "last", "--set", recorded, "--case", "leaves", environment=environment
    )
    await bough(*config, "run", "lead", "And the tides?", environment=environment)
    more = await bough(*config, "eval", "record", "last", "--set", recorded, "--no-mocks", environment=environment)

    assert (made.code, made.out, made.err) == (0, "", f"wrote {recorded}: 1 case\n")
    assert (more.code, more.err) == (0, f"wrote {recorded}: 2 cases\n")
    assert (await bough(*config, "eval", "validate", recorded)).code == 0
    again = await bough(
        *config, "eval", "record", "last", "--set", recorded, "--case", "leaves", environment=environment
    )
    assert again.err == f"wrote {recorded}: 2 cases\n"
    await bough(*config, "run", "lead", "Why do leaves turn red?", environment=environment)
    alone = str(tmp_path / "alone.yaml")
    await bough(*config, "eval", "record", "last", "--set", alone, "--case", "leaves", environment=environment)

    # A server that has never seen the run, and whose tool would fail.
    module = tmp_path / "desk" / "desk_tools.py"
    module.write_text(
        'from bough_server import tool\n\n\n@tool\ndef search_notes(topic: str) -> str:\n    """Fails."""\n'
        '    raise RuntimeError("It ran.")\n',
        encoding="utf-8",
    )
    fresh = {**environment, "BOUGH_DATABASE": str(tmp_path / "fresh.db")}
    ended = await bough(*config, "eval", "run", alone, environment=fresh)
    assert (ended.code, ended.out.splitlines()[0]) == (
        0,
        "passed      leaves  final_response=1 tool_trajectory=1 agent_trajectory=1",
    )


async def test_several_runs_cannot_have_one_id_and_a_broken_set_is_not_overwritten(port: int, tmp_path: Path) -> None:
    await bough("run", "guide", "Oslo?", port=port)
    broken = tmp_path / "set.yaml"
    broken.write_text("cases: [\n", encoding="utf-8")
    several = await bough("eval", "record", "last", "last", "--set", str(broken), "--case", "a", port=port)
    unread = await bough("eval", "record", "last", "--set", str(broken), port=port)
    rows, with_rows = tmp_path / "rows.csv", tmp_path / "with-rows.yaml"
    rows.write_text("id\na\n", encoding="utf-8")
    with_rows.write_text("cases_from: {file: rows.csv, template: {id: '{{id}}'}}\n", encoding="utf-8")
    refused = await bough("eval", "record", "last", "--set", str(with_rows), port=port)
    nowhere = await bough("eval", "record", "last", "--set", str(tmp_path / "no" / "set.yaml"), port=port)

    assert (several.code, several.err) == (2, "--case names one case, and there are several runs: omit it.\n")
    assert (unread.code, unread.err.startswith(f"{broken}:2: This is not YAML")) == (2, True)
    assert (refused.code, refused.err) == (2, f"{with_rows}: Its cases come from {rows}: record into another set.\n")
    assert (nowhere.code, nowhere.err) == (2, f"{tmp_path}/no/set.yaml: The folder {tmp_path}/no does not exist.\n")
    assert broken.read_text(encoding="utf-8") == "cases: [\n"


async def test_a_run_that_did_not_succeed_is_recorded_with_a_note(tmp_path: Path) -> None:
    config = ("--config", str(write_team(tmp_path)), "--embedded")
    (tmp_path / "script.yaml").write_text(
        "agents: {guide: [{error: {reason: UNAVAILABLE, message: It broke.}}]}\n", encoding="utf-8"
    )
    await bough(*config, "run", "guide", "Oslo?")
    made = await bough(*config, "eval", "record", "last", "--set", str(tmp_path / "s.json"), "--case", "a")

    assert made.code == 0
    assert "failed" in made.err
    assert json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["cases"][0]["id"] == "a"


async def test_a_run_that_waited_for_people_becomes_a_case_with_their_answers(tmp_path: Path) -> None:
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    shop = ("--config", str(DESK.parent / "approvals" / "bough.yaml"), "--embedded")
    recorded = str(tmp_path / "set.yaml")
    await bough(*shop, "run", "lead", "Orders 1001 and 1002 come back.", environment=environment)
    replies = {"read_card": '"4242"', "interviewer": '"it is broken"', "refund": "false"}
    while asked := await open_requests(shop, environment):
        answers = [word for input_id, name in asked.items() for word in ("--answer", f"{input_id}={replies[name]}")]
        await bough(*shop, "resume", "last", *answers, environment=environment)
    for mocks in ("--mocks", "--no-mocks"):
        command = ("eval", "record", "last", "--set", recorded, "--case", mocks.strip("-"), mocks)
        made = await bough(*shop, *command, environment=environment)
        assert (made.code, len(made.err.splitlines())) == (0, 1), made.err
    fresh = {**environment, "BOUGH_DATABASE": str(tmp_path / "fresh.db")}
    ended = await bough(*shop, "eval", "run", recorded, environment=fresh)

    assert (ended.code, ended.out.count("passed      ")) == (0, 2), ended.out
    text = (tmp_path / "set.yaml").read_text(encoding="utf-8")
    assert (text.count("approval: REFUSE"), text.count("value: it is broken")) == (2, 2)


async def open_requests(command: tuple[str, ...], environment: dict[str, str]) -> dict[str, str]:
    """What the newest run asks for: the id of each request, and its tool or the agent that asks."""
    listed = await bough(*command, "runs", "--limit", "1", "--json", environment=environment)
    requests = json.loads(listed.out).get("openRequests", [])
    return {one["inputId"]: one.get("call", {}).get("name") or one["agentPath"][-1] for one in requests}
