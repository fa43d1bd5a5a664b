"""What the blocks of a page have to be, and how a mistake is reported: with the line of the page."""

from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import Page
from tests.docs.project import Project
from tests.support.teams import call, calls, llm, open_team, script

TEAM = """
```yaml
# bough.yaml
agents: [agents/*.yaml]
python: [tools]
models:
  default: {provider: scripted, script: script.yaml}
```

```yaml
# agents/team.yaml
name: guide
description: Plans a day out.
llm: {instruction: Look the weather up., tools: [{name: weather}]}
```

```python
# tools.py
from bough_server import tool
```

Text between the parts of a file.

```python
@tool
def weather(place: str) -> str:
    \"\"\"Returns the weather of a place.\"\"\"
    return "It is dry."
```

```yaml
# script.yaml
agents:
  guide: [A swim.]
```
"""
ASK = """
```python
# ask.py
from bough import Client, collect_sync

with Client("127.0.0.1:50051") as client, client.run("guide", "Hello") as stream:
    assert collect_sync(stream).answer == "A swim."
```
"""


async def tried(folder: Path, text: str, *, example: str = "", into: str = "") -> str:
    """The report about a page; empty if there is nothing to report."""
    try:
        async with Project(folder, Page(example=example, into=into)) as project:
            for block in pages.blocks("page.md", text):
                await project.take(block)
            await project.judge()
    except pytest.fail.Exception as failure:
        return str(failure)
    return ""


async def test_a_page_is_one_project_whose_commands_and_scripts_are_run(tmp_path: Path) -> None:
    commands = """
```sh
bough agents validate agents
test "$(bough --embedded run guide "Hello" --output answer)" = "A swim."
```

```console
$ bough run guide "Hello" \\
    --output json     # not run
$ make run MODEL=scripted
A swim.
```
"""
    assert await tried(tmp_path, TEAM + commands + ASK) == ""


async def test_commands_without_a_flag_meet_a_server_of_the_page(tmp_path: Path) -> None:
    commands = """
```sh
bough run guide "Hello"
test "$(bough runs --json | wc -l)" = 1
```
"""
    assert await tried(tmp_path, TEAM + commands) == ""


async def test_a_page_can_start_from_an_example(tmp_path: Path) -> None:
    assert await tried(tmp_path, "```sh\nbough agents validate agents\n```\n", example="examples/desk") == ""


@pytest.mark.parametrize(
    ("shown", "report"),
    [
        ("one  in 0.3 s\nthree", ""),
        ("one  in 0.3 s\nfour", "the commands before have not printed this line, after those before it: 'four'"),
        ("three\ntwo", "the commands before have not printed this line, after those before it: 'two'"),
    ],
)
async def test_what_is_shown_after_commands_is_what_they_print_but_for_times(
    shown: str, report: str, tmp_path: Path
) -> None:
    commands = "```sh\nprintf 'one  in 12 ms\\ntwo\\nthree\\n'\n```\n"
    reported = await tried(tmp_path, f"{commands}\nPrints\n\n```console\n{shown}\n```\n")
    assert reported.partition("\n")[0].removeprefix("page.md:8: ") == report


@pytest.mark.parametrize("fence", ["```", "```json", "```text"])
async def test_other_kinds_of_blocks_are_reported(fence: str, tmp_path: Path) -> None:
    report = await tried(tmp_path, f"# Title\n\n{fence}\ntext\n```\n")

    assert report.startswith("page.md:4: a block is one of yaml, python, sh, console, proto, go, ts, py, not ")


@pytest.mark.parametrize("line", ["agents: []", "# a comment", "# compose.yaml", "# ../bough.yaml"])
async def test_a_yaml_block_says_which_file_it_is(line: str, tmp_path: Path) -> None:
    report = await tried(tmp_path, f"```yaml\n{line}\n```\n")

    named = "`# bough.yaml`, `# agents/NAME.yaml`, `# script.yaml`, `# eval.yaml`, `# evals/NAME.yaml`"
    assert report == f"page.md:2: a yaml block begins with {named}, `# keys.yaml` or `# kubernetes.yaml`."


async def test_a_first_python_block_says_which_file_it_is(tmp_path: Path) -> None:
    report = await tried(tmp_path, "```python\nimport bough_server\n```\n")

    assert report == "page.md:2: a python block begins with `# NAME.py`, or continues a module of the server before it."


async def test_a_block_that_is_not_closed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^page\.md:3: this block is not closed\.$"):
        await tried(tmp_path, "# Title\n\n```sh\ntrue\n")


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("```yaml\n# bough.yaml\nserver: {prt: 1}\n```", "page.md:3: server.prt: There is no such setting."),
        ("```yaml\n# agents/a.yaml\nname: a\nllms: {}\n```", "page.md:4: llms: There is no such field."),
        ("```yaml\n# script.yaml\nagents:\n  a: [{txt: Hm.}]\n```", "page.md:4: agents.a[0].txt"),
        ("```yaml\n# eval.yaml\nname: s\nagent: a\ncase: []\n```", "page.md:5: case: There is no such field."),
        ("```yaml\n# eval.yaml\nname: s\nagent: a\n```", "page.md:3: cases: must have at least one case."),
        ("```python\n# tools.py\nimport bough_server\nimport nowhere\n```", "page.md:4: ModuleNotFoundError"),
        (
            "```yaml\n# agents/a.yaml\nname: a\ndescription: A.\nsequence: {}\nsub_agents: [gone]\n```",
            "page.md:6: sub_agents[0].agent: There is no agent 'gone'.",
        ),
        (
            "```python\n# tools.py\nfrom bough_server import tool\n```\n\n\n```python\n1 / 0\n```",
            "page.md:8: ZeroDivisionError",
        ),
    ],
)
async def test_a_mistake_in_a_file_is_reported_with_its_line_in_the_page(
    text: str, report: str, tmp_path: Path
) -> None:
    assert (await tried(tmp_path, text)).startswith(report)


async def test_a_file_is_judged_before_a_later_block_replaces_it(tmp_path: Path) -> None:
    wrong = "```yaml\n# agents/a.yaml\nname: a\n```\n"
    right = "```yaml\n# agents/a.yaml\nname: a\ndescription: A.\nllm: {}\n```\n"

    assert (await tried(tmp_path, wrong + right)).startswith("page.md:3: ")


async def test_a_command_that_fails_is_reported_with_its_line_and_its_output(tmp_path: Path) -> None:
    report = await tried(tmp_path, "# Title\n\n```sh\ntrue\nbough agents validate nowhere\necho not reached\n```\n")

    assert report.endswith("page.md:5: exit code 2\n")
    assert "nowhere" in report
    assert "not reached" not in report


async def test_a_script_that_fails_is_reported_with_its_line(tmp_path: Path) -> None:
    report = await tried(tmp_path, TEAM + ASK.replace("A swim.", "A walk."))

    line = (TEAM + ASK).splitlines().index('    assert collect_sync(stream).answer == "A swim."') + 1
    assert f"page.md:{line}" in report
    assert report.endswith("AssertionError\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bough runn lead", "No such command"),
        ("bough run lead hello --loud", "No such option"),
        ("FOO=1 bough --embeded run lead hello", "No such option"),
        ("true && bough tree last --js | head", "No such option"),
        ("make everything", "there is no target 'everything'"),
    ],
)
async def test_commands_that_are_shown_only_have_to_exist(command: str, said: str, tmp_path: Path) -> None:
    report = await tried(tmp_path, f"```console\nSome output: bough nothing\n$ {command}\n```\n")

    assert report.startswith("page.md:3: ")
    assert said in report


async def test_a_block_of_a_terminal_can_be_run_and_says_which_commands_fail(tmp_path: Path) -> None:
    commands = "```console run\n$ test -n guide\nThis is output.\n$ test -n ''   # exits with 1, and says why\n```\n"

    assert await tried(tmp_path, commands) == ""
    assert await tried(tmp_path, commands.replace("with 1", "with 3")) == "page.md:4: exit code 1\n"
    assert await tried(tmp_path, commands.replace("guide", "''")) == "page.md:2: exit code 1\n"
    assert await tried(tmp_path, "```console now\n$ true\n```\n") == ("page.md:2: write ```console, or ```console run.")


async def test_a_page_can_start_from_the_folder_that_holds_the_examples(tmp_path: Path) -> None:
    config = "```sh\ntest ! -e bough.yaml && test -e examples/desk/bough.yaml\n```\n"

    assert await tried(tmp_path, config, example="examples", into="examples") == ""


async def test_a_skipped_block_says_why(tmp_path: Path) -> None:
    assert await tried(tmp_path, "```sh skip: it needs a network\nfalse\n```\n") == ""
    assert (await tried(tmp_path, "```sh skip\nfalse\n```\n")).startswith("page.md:2: write ```sh, or")
    assert "No such command" in await tried(tmp_path, "```sh skip: it needs a network\nbough fly\n```\n")


async def test_an_excerpt_of_the_schema_has_its_lines_in_their_order(tmp_path: Path) -> None:
    excerpt = "```proto\nmessage LoopUntil {\n  oneof condition {\n    string predicate = 1;\n    // ...\n  }\n}\n```\n"

    assert await tried(tmp_path, excerpt) == ""
    assert await tried(tmp_path, excerpt.replace("= 1", "= 3")) == (
        "page.md:2: no file of the schema has these lines in order: 'string predicate = 3;'"
    )


def test_a_page_in_a_folder_that_is_not_registered_is_not_tried() -> None:
    assert pages.page_of("docs/how-to/tools.md") == Page()
    assert pages.page_of("docs/somewhere/else.md") is None


async def test_what_failed_in_a_run_of_a_page_is_found(tmp_path: Path) -> None:
    turns = script(p=[calls(call("nothing")), "Done."])
    async with open_team(tmp_path, turns, llm("p")) as harness:
        await harness.turn("p")
    async with Project(tmp_path, Page()) as project:
        assert project.failures() == {"p: agent.tool.failed: UNKNOWN_TOOL"}
