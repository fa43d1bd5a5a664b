"""The workflow of examples/eval: what its steps run, on the desk, and the comment that it leaves on a pull request."""

import re
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from junitparser import JUnitXml

from tests.docs.pages import Block, Page
from tests.docs.project import Project

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "eval" / "github-actions.yaml"
SETTINGS = "export BOUGH_DEFAULT_MODEL=scripted GITHUB_STEP_SUMMARY=step.md\n"
TOKEN = "token-of-the-job"
MARKER = "<!-- bough eval: evals/desk.yaml -->"


class PullRequest:
    """GitHub's API for the comments of pull request 7, and what they are."""

    def __init__(self) -> None:
        # Anyone can write the marker, and there are more comments than GitHub returns at once.
        self.comments = [{"id": 1, "user": {"login": "reader"}, "body": f"{MARKER}\nNot the workflow's."}]
        self.comments += [{"id": number, "user": {"login": "reader"}, "body": "Hm."} for number in range(2, 102)]
        self.methods: list[str] = []

    @property
    def bodies(self) -> list[str]:
        """What the workflow has written."""
        return [comment["body"] for comment in self.comments if comment["user"] == {"login": "github-actions[bot]"}]

    def serve(self) -> TestServer:
        """Return its server on loopback."""
        issues = "/repos/bough-dev/desk/issues"
        app = web.Application(middlewares=[self._authenticate])
        app.router.add_get(f"{issues}/7/comments", self._list)
        app.router.add_post(f"{issues}/7/comments", self._create)
        app.router.add_patch(f"{issues}/comments/{{id}}", self._update)
        return TestServer(app)

    @web.middleware
    async def _authenticate(self, request, handler):
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.methods.append(request.method)
        return await handler(request)

    async def _list(self, request):
        size, page = int(request.query.get("per_page", "30")), int(request.query.get("page", "1"))
        return web.json_response(self.comments[size * (page - 1) : size * page])

    async def _create(self, request):
        content = await request.json()
        number = len(self.comments) + 1
        self.comments.append({"id": number, "user": {"login": "github-actions[bot]"}, **content})
        return web.json_response(self.comments[-1], status=201)

    async def _update(self, request):
        comment = self.comments[int(request.match_info["id"]) - 1]
        comment.update(await request.json())
        return web.json_response(comment)


def job() -> dict[str, Any]:
    """The workflow's only job."""
    # GitHub reads "on" as a name, YAML 1.1 as true.
    workflow = yaml.load(WORKFLOW.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert set(workflow) == {"name", "on", "permissions", "concurrency", "jobs"}
    assert (set(workflow["on"]), workflow["permissions"]["pull-requests"]) == ({"pull_request"}, "write")
    (only,) = workflow["jobs"].values()
    return dict(only)


def steps() -> dict[str, str]:
    """The commands of the workflow's steps by their names."""
    return {step["name"]: step["run"] for step in job()["steps"] if "run" in step}


def comment_step(api: TestServer) -> str:
    """The step that comments, with what GitHub has for it."""
    (step,) = (step for step in job()["steps"] if step.get("name") == "Comment on the pull request")
    assert set(step["env"]) == {"GITHUB_TOKEN", "PULL_REQUEST", "MARKER"}
    given = {
        "GITHUB_TOKEN": TOKEN,
        "PULL_REQUEST": "7",
        "MARKER": step["env"]["MARKER"],
        "GITHUB_SERVER_URL": "https://github.example",
        "GITHUB_API_URL": str(api.make_url("")).rstrip("/"),
        "GITHUB_REPOSITORY": "bough-dev/desk",
        "GITHUB_RUN_ID": "1",
    }
    return "".join(f"export {name}='{value}'\n" for name, value in given.items()) + step["run"]


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
    commands, pull_request = steps(), PullRequest()
    install = commands.pop("Install")
    del commands["Comment on the pull request"]
    async with pull_request.serve() as api, Project(tmp_path, Page(example="examples/desk")) as project:
        script = tmp_path / "scripts" / "desk.yaml"
        script.write_text(script.read_text(encoding="utf-8").replace("delay_ms: 20", "delay_ms: 0"), encoding="utf-8")
        await project.take(block(first_time()))
        for text in commands.values():
            await project.take(block(text))
        await project.take(block(comment_step(api)))
        created = pull_request.bodies

        wrong = desk.replace("contains: [chlorophyll, red]", "contains: [bananas]")
        assert wrong != desk
        (tmp_path / "evals" / "desk.yaml").write_text(wrong, encoding="utf-8")
        failing = f"code=0; {commands['Evaluate'].strip()} || code=$?; test $code = 1"
        await project.take(block(failing))
        await project.take(block(commands["Show the summary"]))
        await project.take(block(comment_step(api)))
        updated = pull_request.bodies
        (tmp_path / "summary.md").unlink()
        await project.take(block(comment_step(api)))

    assert install == 'pip install "bough-agents[server] @ git+https://github.com/bough-dev/bough"'
    assert JUnitXml.fromfile(str(tmp_path / "junit.xml")).failures > 0
    summary = (tmp_path / "step.md").read_text(encoding="utf-8")
    assert ("desk: passed" in summary, "desk: failed" in summary, "| unclear | leaves |" in summary) == (
        True,
        True,
        True,
    )
    assert (tmp_path / "report.html").stat().st_size > 1000

    (before,), (after,), (last,) = created, updated, pull_request.bodies
    assert pull_request.methods == ["GET", "GET", "POST", "GET", "GET", "PATCH", "GET", "GET", "PATCH"]
    assert ("desk: passed" in before, "desk: failed" in after) == (True, True)
    log = "[Log and reports](https://github.example/bough-dev/desk/actions/runs/1)"
    assert last == f"{MARKER}\nThe evaluation has no result: its log says why.\n\n{log}"
    assert all(text.startswith(f"{MARKER}\n") and text.endswith(f"\n\n{log}") for text in (before, after))


def test_a_pull_request_of_a_fork_is_neither_evaluated_nor_commented_on() -> None:
    """Its token cannot write, it has no key, and a workflow that gives it either runs the fork's code with them."""
    guarded = {
        step["name"] for step in job()["steps"] if "!github.event.pull_request.head.repo.fork" in step.get("if", "")
    }
    assert guarded == {"Evaluate", "Comment on the pull request"}
