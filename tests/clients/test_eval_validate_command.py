"""`bough eval validate`: eval sets are checked without a server."""

import json
from pathlib import Path

import pytest

from tests.clients.cli_process import Finished, bough

SET = """\
name: trips
agent: guide
cases:
  - id: oslo
    turns: [{user: What shall I do, expect: {agents: [guide]}}]
    metrics: [{llm_judge: {model: default, rubrics: [{id: kind, text: The answer is kind.}]}}]
"""
GUIDE = "name: guide\ndescription: Plans a day.\nllm: {instruction: Plan.}\n"


def project(folder: Path) -> Path:
    """A project with the agent guide and the model default; returns its configuration."""
    (folder / "agents").mkdir()
    (folder / "agents" / "guide.yaml").write_text(GUIDE, encoding="utf-8")
    (folder / "script.yaml").write_text("agents: {guide: [Swim.]}\n", encoding="utf-8")
    config = folder / "bough.yaml"
    config.write_text(
        "agents: [agents/*.yaml]\nmodels: {default: {provider: scripted, script: script.yaml}}\n", encoding="utf-8"
    )
    return config


async def validated(config: Path, text: str, name: str = "set.yaml") -> tuple[Finished, list[str]]:
    """The command's end, and its lines without the path of the set."""
    file = config.parent / name
    file.write_text(text, encoding="utf-8")
    ended = await bough("--config", str(config), "eval", "validate", str(file))
    return ended, [line.removeprefix(f"{file}:") for line in ended.out.splitlines()]


async def test_a_sound_set_exits_with_0(tmp_path: Path) -> None:
    ended, lines = await validated(project(tmp_path), SET)

    assert (ended.code, lines, ended.err) == (0, [], "1 case in 1 file: no problems found.\n")
    assert not (tmp_path / "var").exists()


async def test_problems_of_every_sort_come_together_with_their_lines_and_exit_with_2(tmp_path: Path) -> None:
    text = (
        SET.replace("agent: guide", "agent: gide\ndefaults: {trials: 0}")
        .replace("model: default", "model: defalt")
        .replace("    turns:", "    labels: {1: x}\n    trial: 3\n    turns:")
    )
    ended, lines = await validated(project(tmp_path), text)

    assert lines == [
        "2: agent: There is no agent 'gide'. Did you mean 'guide'?",
        "3: defaults.trials: must be greater than or equal to 1 and less than or equal to 1000",
        '6: cases[0].labels["1"]: does not match regex pattern `^[a-zA-Z][a-zA-Z0-9._/-]{0,62}$`',
        "7: cases[0].trial: There is no such field. Did you mean 'trials'?",
        "9: cases[0].metrics[0].llm_judge.model: There is no model 'defalt'. Did you mean 'default'?",
    ]
    assert (ended.code, ended.err) == (2, "5 problems in 1 file.\n")


async def test_names_of_before_are_refused_with_those_of_now(tmp_path: Path) -> None:
    text = SET.replace("    turns:", "    runs: 3\n    from: {run_id: a, through_sequence: 4}\n    turns:").replace(
        "    metrics:", "    answers: [{tool: pay, decision: APPROVE, arguments: {}}]\n    metrics:"
    )
    ended, lines = await validated(project(tmp_path), text)

    assert (ended.code, [line for line in lines if " is `" in line]) == (
        2,
        [
            "5: cases[0].runs: `runs` is `trials` now.",
            "6: cases[0].from: `from` is `origin` now.",
            "8: cases[0].answers[0].decision: `decision` is `approval` now.",
            "8: cases[0].answers[0].arguments: `arguments` is `approval.arguments` now.",
        ],
    )


@pytest.mark.parametrize(
    "answer",
    [
        "{tool: exit, value: '4242'}",
        "{question: Why, approval: APPROVE}",
        "{question: Why, tool_outcome: {parts: [{text: '4242'}]}}",
    ],
)
async def test_an_answer_that_fits_no_request_is_refused(answer: str, tmp_path: Path) -> None:
    text = SET.replace("    metrics:", f"    answers: [{answer}]\n    metrics:")
    ended, lines = await validated(project(tmp_path), text)

    assert (ended.code, [line.startswith("6: cases[0].answers[0]") for line in lines]) == (2, [True])


MODULE = '''
from bough_server import metric, tool


@tool
def search(topic: str) -> str:
    """Searches."""
    return topic


@metric
def brief(invocation, case) -> bool:
    return True
'''

TYPOS = """\
name: trips
agent: guide
cases:
  - id: oslo
    turns: [{user: Hi, expect: {agents: [giude], tools: [serch]}}]
    mocks: {tools: [{name: serch, result: 1}]}
    metrics: [{custom: {name: brif}}, {custom: {name: brief, config: {most: 1}}}, {tool_trajectory: {}, threshold: 2}]
"""


async def test_names_are_those_of_the_modules_too_unless_these_are_not_to_be_imported(tmp_path: Path) -> None:
    config = project(tmp_path)
    config.write_text(f"{config.read_text(encoding='utf-8')}python: [desk_tools]\n", encoding="utf-8")
    (tmp_path / "desk_tools.py").write_text(MODULE, encoding="utf-8")
    _, lines = await validated(config, TYPOS)
    unimported = await bough("--config", str(config), "eval", "validate", "--no-python", str(tmp_path / "set.yaml"))
    threshold = "7: cases[0].metrics[2].threshold: must be from 0 to 1, as the scores of this metric are."
    assert lines == [
        "5: cases[0].turns[0].expect.tools[0].name: There is no tool 'serch'. Did you mean 'search'?",
        "5: cases[0].turns[0].expect.agents[0].name: There is no agent 'giude'. Did you mean 'guide'?",
        "6: cases[0].mocks.tools[0].name: There is no tool 'serch'. Did you mean 'search'?",
        "7: cases[0].metrics[0].custom.name: There is no metric 'brif'. Did you mean 'brief'?",
        "7: cases[0].metrics[1].custom.config: must not be set: the function 'brief' takes no configuration. Remove "
        "it, or give the function a third parameter.",
        threshold,
    ]
    assert [line.partition("set.yaml:")[2] for line in unimported.out.splitlines()] == [threshold]


async def test_a_problem_of_a_field_is_reported_once(tmp_path: Path) -> None:
    ended, lines = await validated(project(tmp_path), "name: 7\nagent: guide\ncases: []\n")

    assert lines == [
        "1: name: must be text; put it in quotes",
        "3: cases: must have at least one case.",
    ]
    assert ended.code == 2


async def test_sets_in_json_have_lines_too(tmp_path: Path) -> None:
    text = json.dumps({"name": "s", "agent": "guide", "cases": [{"id": "a", "turns": [{}]}]}, indent=1)
    _, lines = await validated(project(tmp_path), text, "set.json")

    assert lines == ["8: cases[0].turns[0].user: is required, or `input`, or in every turn `recorded`."]


async def test_all_files_are_checked_even_if_one_cannot_be_read(tmp_path: Path) -> None:
    config = project(tmp_path)
    huge, missing, wrong = tmp_path / "huge.yaml", tmp_path / "missing.yaml", tmp_path / "wrong.yaml"
    with huge.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    wrong.write_text("name: [\n", encoding="utf-8")
    paths = [str(each) for each in (huge, missing, wrong, huge)]

    ended = await bough("--config", str(config), "eval", "validate", *paths)

    first, second, third = ended.out.splitlines()
    assert first == f"{huge}: The file is larger than 8 MiB."
    assert second == f"{missing}: The file cannot be read: No such file or directory."
    assert third.startswith(f"{wrong}:2: This is not YAML: ")
    assert (ended.code, ended.err) == (2, "3 problems in 3 files.\n")


async def test_without_a_configuration_names_are_not_checked(tmp_path: Path) -> None:
    empty = tmp_path / "bough.yaml"
    empty.write_text("log_level: info\n", encoding="utf-8")
    ended, lines = await validated(empty, SET)

    assert (ended.code, lines) == (0, [])
    assert ended.err.splitlines() == [
        "No agents and models are configured, so names are not checked; --config names a bough.yaml that has them.",
        "1 case in 1 file: no problems found.",
    ]


async def test_the_sets_of_the_example_desk_are_sound() -> None:
    examples = Path(__file__).parents[2] / "examples"
    sets = [str(examples / "eval" / name) for name in ("desk.yaml", "reader.yaml")]
    ended = await bough("--config", str(examples / "desk/bough.yaml"), "eval", "validate", *sets)

    assert (ended.code, ended.out, ended.err) == (0, "", "6 cases in 2 files: no problems found.\n")


async def test_a_simulated_user_is_checked_with_the_lines_of_its_fields(tmp_path: Path) -> None:
    text = "name: s\nagent: guide\ncases:\n  - id: a\n    user:\n      model: defualt\n      persona: A guest.\n"
    _, lines = await validated(project(tmp_path), text)

    assert lines == [
        "5: cases[0].user.goal: is required, or `plan`: what the user wants.",
        "6: cases[0].user.model: There is no model 'defualt'. Did you mean 'default'?",
    ]
