"""The workflow of examples/eval: what its steps run, on the desk."""

import re
from pathlib import Path

import yaml
from junitparser import JUnitXml

from tests.docs.pages import Block, Page
from tests.docs.project import Project

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "eval" / "github-actions.yaml"
SETTINGS = "export BOUGH_DEFAULT_MODEL=scripted GITHUB_STEP_SUMMARY=step.md\n"


def steps() -> dict[str, str]:
    """The commands of the workflow's steps by their names."""
    # GitHub reads "on" as a name, YAML 1.1 as true.
    workflow = yaml.load(WORKFLOW.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert set(workflow) == {"name", "on", "permissions", "jobs"}
    (job,) = workflow["jobs"].values()
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


def first_time() -> str:
    """The command that makes the baseline, as the workflow's comment has it."""
    (line,) = re.findall(r"^#   (bough .*)$", WORKFLOW.read_text(encoding="utf-8"), re.MULTILINE)
    return str(line)


def block(text: str) -> Block:
    return Block(page="github-actions.yaml", line=2, kind="sh", info="", text=f"{SETTINGS}{text}\n")


async def test_every_step_of_the_workflow_succeeds_on_the_desk_and_a_case_made_wrong_fails_it(tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    desk = (ROOT / "examples" / "eval" / "desk.yaml").read_text(encoding="utf-8")
    (tmp_path / "evals" / "desk.yaml").write_text(desk, encoding="utf-8")
    commands = steps()
    install = commands.pop("Install")
    async with Project(tmp_path, Page(example="examples/desk")) as project:
        script = tmp_path / "scripts" / "desk.yaml"
        script.write_text(script.read_text(encoding="utf-8").replace("delay_ms: 20", "delay_ms: 0"), encoding="utf-8")
        await project.take(block(first_time()))
        for text in commands.values():
            await project.take(block(text))

        wrong = desk.replace("contains: [chlorophyll, red]", "contains: [bananas]")
        assert wrong != desk
        (tmp_path / "evals" / "desk.yaml").write_text(wrong, encoding="utf-8")
        failing = f"code=0; {commands['Evaluate'].strip()} || code=$?; test $code = 1"
        await project.take(block(failing))
        await project.take(block(commands["Show the summary"]))

    assert install == 'pip install "bough-agents[server] @ git+https://github.com/bough-dev/bough"'
    assert JUnitXml.fromfile(str(tmp_path / "junit.xml")).failures > 0
    summary = (tmp_path / "step.md").read_text(encoding="utf-8")
    assert ("desk: passed" in summary, "desk: failed" in summary, "| unclear | leaves |" in summary) == (
        True,
        True,
        True,
    )
    assert (tmp_path / "report.html").stat().st_size > 1000
