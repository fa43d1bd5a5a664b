"""`bough eval run`: exit codes, what is printed where, files, and errors with the place of each."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
from google.protobuf import json_format
from junitparser import JUnitXml

from bough.v1 import eval_result_pb2, evaluation_pb2, execution_pb2
from tests.clients.cli_process import bough, server_of, started
from tests.clients.eval_project import ANSWER, SLOW, write_set, write_team
from tests.clients.terminals import at_a_terminal
from tests.support.processes import Finished, Forked, serving

FAILED = eval_result_pb2.VERDICT_FAILED
ALLOWED = ("--allow-removed", "--allow-incomplete-baseline")
WORSE = ("[boat]", "[ferry]")


@pytest.fixture(scope="module")
async def port(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[int]:
    """A server of the team for all tests."""
    async with server_of(write_team(tmp_path_factory.mktemp("team"))) as port:
        yield port


def written(path: Path) -> eval_result_pb2.EvalResult:
    return json_format.Parse(path.read_text(encoding="utf-8"), eval_result_pb2.EvalResult())


async def refused(port: int, *arguments: str) -> str:
    """What a command says that could not be done: nothing was evaluated, and nothing is on standard output."""
    ended = await bough("eval", "run", *arguments, port=port)
    assert (ended.code, ended.out, "Traceback" in ended.err) == (2, "", False), ended.err
    assert "evaluation 0" not in ended.err
    return ended.err


async def newest(port: int) -> evaluation_pb2.Evaluation:
    listed = await bough("eval", "list", "--limit", "1", "--json", port=port)
    return json_format.Parse(listed.out, evaluation_pb2.Evaluation())


async def test_a_set_that_passes_exits_with_0_and_only_results_are_on_standard_output(
    port: int, tmp_path: Path
) -> None:
    ended = await bough("eval", "run", write_set(tmp_path), "--max-concurrency", "1", port=port)

    first, *progress = ended.err.splitlines()
    assert (ended.code, first.startswith("evaluation ")) == (0, True)
    assert progress == ["oslo passed", "bergen passed"]
    assert ended.out.splitlines() == [
        "passed      oslo  final_response=1 tool_trajectory=1 agent_trajectory=1",
        "passed      bergen  final_response=1",
        "passed: 2 of 2 cases passed, pass rate 1.00 (0.34 to 1.00)",
    ]


async def test_a_case_made_wrong_exits_with_1_and_its_reason_is_printed_once_and_whole(
    port: int, tmp_path: Path
) -> None:
    ferry = "a ferry, and not the boat, which is slow"
    ended = await bough("eval", "run", write_set(tmp_path, ("[boat]", f"['{ferry}']")), "--trials", "3", port=port)

    assert ended.code == 1
    lines = ended.out.splitlines()
    assert lines[1] == "failed      bergen  0/3 (0.00 to 0.56)  final_response=0"
    (reason,) = lines[2:-1]
    assert ferry in reason
    assert lines[-1].startswith("failed: 1 of 2 cases passed, 3 of 6 trials passed, pass rate 0.50 (")
    assert "bergen 3/3 failed: final_response is 0" in ended.err


async def test_a_question_that_no_answer_answers_exits_with_2_and_is_printed(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    text = """\
name: shop
agent: lead
cases:
  - id: unanswered
    turns: [{user: Orders 1001 and 1002 come back.}]
  - id: answered
    turns: [{user: Orders 1001 and 1002 come back., expect: {tools: [read_card, refund, refund]}}]
    answers:
      - {tool: read_card, tool_outcome: {parts: [{text: "4242"}]}}
      - {agent: interviewer, value: it is broken}
      - {tool: refund, approval: REFUSE}
"""
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    config = ("--config", str(examples / "approvals" / "bough.yaml"), "--embedded")
    ended = await bough(*config, "eval", "run", write_set(tmp_path, text=text), environment=environment)

    lines = ended.out.splitlines()
    assert ended.code == 2
    assert [lines[0], lines[2]] == ["not scored  unanswered", "passed      answered  tool_trajectory=1"]
    assert "No answer of the case answers this: Run read_card" in lines[1]
    assert lines[3].startswith("not scored: 1 of 2 cases passed, 1 not scored")


async def test_four_files_are_written_whole_and_the_result_is_a_baseline(port: int, tmp_path: Path) -> None:
    files = {name: tmp_path / f"r.{name}" for name in ("json", "junit", "markdown", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    first = await bough("eval", "run", write_set(tmp_path), *options, port=port)

    assert first.code == 0
    result = written(files["json"])
    assert [case.case_id for case in result.cases] == ["oslo", "bergen"]
    assert result.cases[0].trials[0].turns[0].answer == ANSWER
    assert JUnitXml.fromfile(str(files["junit"])).tests == 2
    assert "trips: passed" in files["markdown"].read_text(encoding="utf-8")
    assert files["html"].read_text(encoding="utf-8").startswith("<!")
    assert sorted(os.listdir(tmp_path)) == ["r.html", "r.json", "r.junit", "r.markdown", "set.yaml"]

    second = await bough(
        "eval", "run", write_set(tmp_path, WORSE), "--baseline", str(files["json"]), *options, port=port
    )

    lines = second.out.splitlines()
    assert second.code == 1
    assert "unclear     bergen  passed -> failed, 1.00 to 0.00" in lines
    assert "            0 of 1 trial passed, 1 of 1 in the baseline, which may be chance (p = 0.5)." in lines
    assert "compared with the baseline: 0 better, 0 worse, 1 unclear, 0 removed, 0 added, pass rate -0.50" in lines
    assert any(line.startswith("The content of the set has changed") for line in lines)
    assert "| unclear | bergen | 1.00 to 0.00 |" in files["markdown"].read_text(encoding="utf-8")
    assert written(files["json"]).cases[1].verdict == FAILED


async def test_a_baseline_is_made_and_renewed_by_what_passes_and_kept_from_what_does_not(
    port: int, tmp_path: Path
) -> None:
    def update(set_path: str, *options: str) -> Awaitable[Finished]:
        return bough("eval", "run", set_path, "--baseline", str(baseline), "--update-baseline", *options, port=port)

    baseline = tmp_path / "base.json"
    made = await update(write_set(tmp_path), "--content", "none")
    first = written(baseline)
    renewed = await update(write_set(tmp_path), "--trials", "2")
    second = written(baseline)
    worse = await update(write_set(tmp_path, WORSE))

    assert (made.code, renewed.code, worse.code) == (0, 0, 1)
    assert (made.err.splitlines()[-1], renewed.err.splitlines()[-1]) == (f"wrote {baseline}",) * 2
    assert ("compared with the baseline" in made.out, "compared with the baseline" in renewed.out) == (False, True)
    assert (first.cases[0].trials[0].turns[0].answer, len(second.cases[0].trials)) == ("", 2)
    newest_id = (await newest(port)).evaluation_id
    accept = ("eval", "show", newest_id, "--json", str(baseline), "--content", "cut")
    assert worse.err.splitlines()[-1] == (
        f"{baseline} was not written, because the evaluation did not pass. To accept its result as the baseline: "
        f"bough --address 127.0.0.1:{port} {' '.join(accept)}"
    )
    assert written(baseline) == second
    await bough(*accept, port=port)
    assert (written(baseline).evaluation_id, written(baseline).verdict) == (newest_id, FAILED)


async def test_a_baseline_that_is_no_file_cannot_be_updated(port: int, tmp_path: Path) -> None:
    path, update = write_set(tmp_path), "--update-baseline"
    same = str(tmp_path / "r.json")

    assert await refused(port, path, update) == "--update-baseline needs --baseline FILE: the file to write.\n"
    assert await refused(port, path, update, "--baseline", "last") == (
        "--update-baseline: --baseline last names an evaluation, and no file: name a file, one that exists or a new "
        "one that ends in .json.\n"
    )
    assert await refused(port, path, update, "--baseline", same, "--json", same) == (
        "Two of --junit, --markdown, --html and --json, and --baseline with --update-baseline, name the same file.\n"
    )
    assert "does not exist" in await refused(port, path, update, "--baseline", str(tmp_path / "no" / "r.json"))


async def test_a_case_that_only_the_baseline_has_fails_unless_that_is_allowed(port: int, tmp_path: Path) -> None:
    baseline = str(tmp_path / "r.json")
    await bough("eval", "run", write_set(tmp_path), "--json", baseline, port=port)
    fewer = write_set(tmp_path, (str(_bergen()), ""))

    removed = await bough("eval", "run", fewer, "--baseline", baseline, port=port)
    allowed = await bough("eval", "run", fewer, "--baseline", baseline, "--allow-removed", port=port)

    assert (removed.code, allowed.code) == (1, 0)
    assert "removed     bergen" in removed.out


def _bergen() -> str:
    return "  - id: bergen\n    turns: [{user: And in Bergen, expect: {answer: {contains: [boat]}}}]\n"


async def test_a_baseline_may_be_an_evaluation_and_gates_decide_alone(port: int, tmp_path: Path) -> None:
    await bough("eval", "run", write_set(tmp_path), port=port)
    gates = ("--gate", "pass_rate >= 0.5", "--gate", "regressions <= 1")
    refused = await bough("eval", "run", write_set(tmp_path, WORSE), "--baseline", "last", *gates, port=port)
    assert (refused.code, "It takes --rerun-suspects 3." in refused.err) == (2, True)
    again = ("--rerun-suspects", "3")
    ended = await bough("eval", "run", write_set(tmp_path, WORSE), "--baseline", "last", *gates, *again, port=port)

    # The set expects something else now: what the baseline ran with fails as often.
    assert (ended.code, "unclear     bergen" in ended.out) == (0, True)
    assert "No regression is proven: over 1 case 0 of 3 trials passed, 0 of 3 in the baseline" in ended.out
    assert "1 suspect run 3 more times, and as often with what the baseline ran with" in ended.err
    assert "bergen baseline 3/3 failed" in ended.err
    assert "passed      gate pass_rate >= 0.5  is 0.5" in ended.out.splitlines()
    ended = await bough("eval", "run", write_set(tmp_path, WORSE), "--gate", "pass_rate > 0.5", port=port)
    assert (ended.code, "failed      gate pass_rate > 0.5  is 0.5" in ended.out) == (1, True)


async def test_another_team_is_evaluated_without_changing_the_servers(port: int, tmp_path: Path) -> None:
    agents = tmp_path / "agents"
    agents.mkdir()
    (agents / "guide.yaml").write_text(
        "name: guide\ndescription: Plans a day.\nsequence: {}\nsub_agents: [walker]\n"
        "---\nname: walker\ndescription: Walks.\nllm: {instruction: Walk.}\n",
        encoding="utf-8",
    )
    ended = await bough("eval", "run", write_set(tmp_path), "--agents", str(agents), port=port)
    own = await bough("eval", "run", write_set(tmp_path), port=port)

    assert (ended.code, own.code) == (1, 0)
    assert "walker" in ended.out
    (agents / "guide.yaml").write_text("name: guide\ndescription: Plans.\nllm: {models: none}\n", encoding="utf-8")
    said = await refused(port, write_set(tmp_path), "--agents", str(agents))
    assert said.startswith(f"{agents}/guide.yaml:3: llm.models: There is no such field.")
    unlinked = "name: guide\ndescription: Plans.\nllm: {instruction: Plan.}\nsub_agents: [nowhere]\n"
    (agents / "guide.yaml").write_text(unlinked, encoding="utf-8")
    said = await refused(port, write_set(tmp_path), "--agents", str(agents))
    assert said.startswith(f"{agents}/guide.yaml:4: sub_agents[0].agent: There is no agent 'nowhere'.")


async def test_labels_trials_and_the_request_id_are_sent_and_a_repeated_request_is_the_same_evaluation(
    port: int, tmp_path: Path
) -> None:
    arguments = ("eval", "run", write_set(tmp_path), "--trials", "2", "--label", "pr=7", "--request-id", "ci-1")
    first = await bough(*arguments, port=port)
    again = await bough(*arguments, port=port)

    assert (first.code, again.code) == (0, 0)
    assert first.err.splitlines()[0] == again.err.splitlines()[0]
    assert (dict((await newest(port)).labels), (await newest(port)).totals.trials) == ({"pr": "7"}, 4)
    other = await bough(*arguments[:-4], "--request-id", "ci-1", port=port)
    assert (other.code, other.out) == (2, "")
    assert "'ci-1' was used for another evaluation" in other.err


async def test_a_budget_that_is_used_up_leaves_the_rest_not_scored(port: int, tmp_path: Path) -> None:
    options = ("--max-concurrency", "1", "--budget", "model_calls=2")
    ended = await bough("eval", "run", write_set(tmp_path), *options, port=port)

    assert (ended.code, "not scored  bergen" in ended.out) == (2, True)
    assert "The budget of the evaluation is used up: 2 of 2 model_calls." in ended.out


async def test_files_hold_as_much_of_what_was_said_as_is_asked_for_and_never_what_is_redacted(tmp_path: Path) -> None:
    redact = {"redact": {"fields": ["topic"], "patterns": ["islands"]}}
    config = write_team(tmp_path, evaluation=redact)
    names = ("json", "junit", "markdown", "html")
    for content in ("none", "cut", "full"):
        options = [word for name in names for word in (f"--{name}", str(tmp_path / f"{content}.{name}"))]
        command = ("--config", str(config), "--embedded", "eval", "run", write_set(tmp_path, WORSE))
        ended = await bough(*command, *options, "--content", content)
        assert ended.code == 1
        assert "islands" not in ended.out + ended.err
        assert "[redacted]" in ended.out
        assert "[redacted]" in ended.err
    for command in (("show", "last"), ("watch", "last"), ("compare", str(tmp_path / "full.json"), "last")):
        ended = await bough("--config", str(config), "--embedded", "eval", *command)
        # The id of the case is removed from the file too, so to compare it a case is removed.
        assert (ended.code, "islands" in ended.out + ended.err) == (1, False), command
    recorded = tmp_path / "recorded.yaml"
    found = written(tmp_path / "full.json")
    run_id = found.cases[0].trials[0].turns[0].run_id
    other = tmp_path / "walker.yaml"
    other.write_text("name: guide\ndescription: Plans.\nllm: {instruction: Walk.}\n", encoding="utf-8")
    embedded = ("--config", str(config), "--embedded")
    await bough(*embedded, "run", "guide", "Hm", "--definitions", str(other))
    ended = await bough(*embedded, "eval", "diff", run_id, "last", "--json")
    assert (ended.code, "oslo" in ended.out, "[redacted]" in ended.out) == (1, False, True)
    ended = await bough("--config", str(config), "--embedded", "eval", "record", run_id, "--set", str(recorded))
    assert (ended.code, "'[redacted]' in the case" in ended.err) == (0, True)
    assert "islands" not in recorded.read_text(encoding="utf-8")
    assert "oslo" not in recorded.read_text(encoding="utf-8")
    ended = await bough(*embedded, "eval", "run", str(recorded))
    assert (ended.code, "islands" in ended.out + ended.err) == (0, False), ended
    # A verdict of a server that redacts nothing is no surprise: what it compares is the placeholder itself.
    plain = write_team(tmp_path)
    ended = await bough("--config", str(plain), "--embedded", "eval", "run", str(recorded))
    assert (ended.code, 'expected "Take the boat to the [redacted]."' in ended.out) == (1, True), ended
    texts = {
        (content, name): (tmp_path / f"{content}.{name}").read_text(encoding="utf-8")
        for content in ("none", "cut", "full")
        for name in names
    }
    assert [place for place, text in texts.items() if "islands" in text] == []
    assert [place for place, text in texts.items() if place[0] == "none" and "Take the boat" in text] == []
    assert "Take the boat to the [redacted]" in texts["full", "json"]
    assert '"[redacted]' in texts["full", "json"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("agent: guide", "agent: guid"), "2: agent: There is no agent 'guid'. Did you mean 'guide'? "),
        (("id: bergen", "id: oslo"), "11: cases[1].id: 'oslo' is also the id of cases[0]."),
        (("cases:", "case:"), "3: case: There is no such field. Did you mean 'cases'?"),
        (
            ("    turns: [{user: And", "    metrics: [{custom: {name: nice}}]\n    turns: [{user: And"),
            "12: cases[1].metrics[0].custom.name: There is no metric 'nice'.",
        ),
        (  # by its line the first of two, though turns are checked before metrics
            (
                "    turns: [{user: And in Bergen, expect: {answer",
                "    metrics: [{budget: {agent: guid, errors: 0}}]\n    turns: [{user: Hi, expect: {tools: [x], answer",
            ),
            "12: cases[1].metrics[0].budget.agent: There is no agent 'guid'. Did you mean 'guide'?",
        ),
    ],
)
async def test_what_is_wrong_with_a_set_has_its_line_and_field_also_what_the_server_finds(
    port: int, tmp_path: Path, change: tuple[str, str], error: str
) -> None:
    path = write_set(tmp_path, change)
    said = await refused(port, path)

    assert said.startswith(f"{path}:{error}"), said
    assert "CatalogService" not in said


async def test_gates_and_options_that_make_no_sense_are_named(port: int, tmp_path: Path) -> None:
    path, old = write_set(tmp_path), tmp_path / "old.json"
    old.write_text('{"setName": "trips", "cases": [{"caseId": "oslo"}]}', encoding="utf-8")
    for options, error in (
        (("--gate", "pass_rate.lower >= 0.9"), '--gate "pass_rate.lower >= 0.9": '),
        (("--gate", "speed > 3"), "--gate \"speed > 3\": There is no number 'speed'"),
        (("--gate", "regressions == 0"), '--gate "regressions == 0": needs a baseline'),
        (("--agent", "nobody"), "--agent nobody: There is no agent 'nobody'."),
        (("--budget", "price=2"), "--budget price: There is no such budget."),
        (("--budget", "cost=-2"), "--budget cost=-2: must be a number, and more than 0."),
        (("--budget", "time=soon"), "--budget time=soon: must be a duration such as 10m"),
        (("--matrix", "modle=a"), "--matrix modle=a: There is no axis 'modle'. Did you mean 'model'?"),
        (("--matrix", "model"), "--matrix model: must be AXIS=VALUES, such as model=small,large."),
        (("--matrix", "temperature=0,warm"), "--matrix temperature=0,warm: must be numbers, as in temperature=0,0.7."),
        (
            ("--matrix", "model=defalt"),
            "--matrix: matrix.model[0]: There is no model 'defalt'. Did you mean 'default'?",
        ),
        (("--label", "pr"), "--label pr: must be NAME=VALUE."),
        (("--label", "bough/x=1"), "--label: labels"),
        (("--request-id", "bough/x"), "--request-id: "),
        (("--baseline", str(tmp_path / "none.json")), f"{tmp_path}/none.json: The file cannot be read: "),
        (("--baseline", path), f"{path}: The file is no result of an evaluation: "),
        (("--baseline", str(old)), f"{old}: The result has no `state`, as those of version 0.1: "),
        (("--baseline", "01970000-0000-7000-8000-000000000000"), "There is no evaluation"),
        (("--json", str(tmp_path)), f"{tmp_path}: This is a folder."),
        (
            ("--html", str(tmp_path / "no" / "r.html")),
            f"{tmp_path}/no/r.html: The folder {tmp_path}/no does not exist.",
        ),
        (("--json", str(tmp_path / "r"), "--html", str(tmp_path / "r")), "Two of --junit, --markdown, --html and"),
    ):
        said = await refused(port, path, *options)
        assert said.startswith(error), said
    assert sorted(os.listdir(tmp_path)) == ["old.json", "set.yaml"]


async def test_a_redaction_that_is_no_regular_expression_is_found_before_anything_runs(tmp_path: Path) -> None:
    config = write_team(tmp_path, evaluation={"redact": {"patterns": ["("]}})
    ended = await bough("--config", str(config), "--embedded", "eval", "run", write_set(tmp_path))

    assert (ended.code, ended.out, "evaluation 0" in ended.err) == (2, "", False)
    assert "Traceback" not in ended.err


async def begun(port: int, path: str, *options: str) -> tuple[Forked, str]:
    """An evaluation whose cases take a minute each, and its id."""
    running = await started("eval", "run", path, *options, port=port)
    assert running.stderr is not None
    line = (await running.stderr.readline()).decode()
    assert line.startswith("evaluation ")
    return running, line.split()[1]


async def test_an_evaluation_that_is_cancelled_elsewhere_exits_with_4_and_writes_what_it_found(
    port: int, tmp_path: Path
) -> None:
    result = tmp_path / "r.json"
    running, evaluation_id = await begun(port, write_set(tmp_path, text=SLOW), "--json", str(result))
    cancelled = await bough("eval", "cancel", evaluation_id[-8:], "--note", "enough", port=port)
    out, _ = await running.communicate()

    assert (cancelled.code, cancelled.out) == (0, f"evaluation {evaluation_id} is being cancelled\n")
    assert (running.returncode, out.decode().splitlines()[-1].startswith("cancelled: 0 of 2 cases")) == (4, True)
    assert written(result).state == execution_pb2.EXECUTION_STATE_CANCELLED
    baseline = ("--baseline", str(result))
    incomplete = await refused(port, write_set(tmp_path), *baseline)
    assert "is of an evaluation that is CANCELLED, not SUCCEEDED" in incomplete
    allowed = await bough("eval", "run", write_set(tmp_path), *baseline, *ALLOWED, port=port)
    assert allowed.code == 0
    again = await bough("eval", "cancel", evaluation_id, port=port)
    assert (again.code, again.out) == (0, f"evaluation {evaluation_id} cancelled\n")
    assert (await bough("eval", "show", evaluation_id, port=port)).code == 4


async def test_ctrl_c_cancels_the_evaluation_and_exits_with_130(port: int, tmp_path: Path) -> None:
    baseline = tmp_path / "base.json"
    update = ("--baseline", str(baseline), "--update-baseline")
    running, evaluation_id = await begun(port, write_set(tmp_path, text=SLOW), *update)
    running.send_signal(signal.SIGINT)
    out, err = await running.communicate()

    unwritten = f"{baseline} was not written: the result is of an evaluation that is CANCELLED, not SUCCEEDED."
    assert (err.decode().splitlines()[-1], baseline.exists()) == (unwritten, False)
    assert (running.returncode, out.decode().splitlines()[-1].startswith("cancelled: ")) == (130, True)
    assert "Cancelling the evaluation; Ctrl-C again to leave at once." in err.decode()
    assert "Traceback" not in err.decode()
    assert (await bough("eval", "show", evaluation_id, port=port)).code == 4


async def test_ctrl_c_leaves_a_watched_evaluation_alone(port: int, tmp_path: Path) -> None:
    running, evaluation_id = await begun(port, write_set(tmp_path, text=SLOW))
    async with at_a_terminal("eval", "watch", evaluation_id, port=port) as terminal:
        await terminal.until("evaluating")
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.end() == (130, "")
    assert (await newest(port)).evaluation_id == evaluation_id
    assert not (await newest(port)).HasField("end_time")
    await bough("eval", "cancel", "last", port=port)
    await running.communicate()


async def test_a_terminal_gets_a_bar_and_lines_for_what_did_not_pass(port: int, tmp_path: Path) -> None:
    async with at_a_terminal("eval", "run", write_set(tmp_path, WORSE), port=port) as terminal:
        assert "evaluation " in await terminal.until("evaluating")
        await terminal.until("bergen failed: final_response is 0")
        code, out = await terminal.end()
    assert (code, out.splitlines()[-1].startswith("failed: 1 of 2 cases passed")) == (1, True)


async def test_a_command_says_that_its_server_is_lost_and_continues_with_the_next_one(tmp_path: Path) -> None:
    config = write_team(tmp_path)
    text = SLOW.replace("agent: sleeper", "agent: napper")
    with (tmp_path / "agents.yaml").open("a", encoding="utf-8") as agents:
        agents.write("---\nname: napper\ndescription: Naps.\nllm: {instruction: Nap.}\n")
    (tmp_path / "script.yaml").write_text("agents: {napper: [{text: Done., delay_ms: 1500}]}\n", encoding="utf-8")
    async with serving(config) as server:
        port = int(server.address.rpartition(":")[2])
        running, _ = await begun(port, write_set(tmp_path, text=text))
        await server.kill()
    async with serving(config, arguments=("--port", str(port))):
        out, err = await running.communicate()

    assert (running.returncode, out.decode().splitlines()[:2]) == (0, ["passed      oslo", "passed      bergen"])
    lost, *progress = err.decode().splitlines()
    assert lost == "The connection to the server was lost. Rejoining the evaluation for up to 60 s."
    assert sorted(progress) == ["bergen passed", "oslo passed"]
