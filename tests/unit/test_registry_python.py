"""Tools, agents and functions found in Python modules."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough_server.agents.loading import digest_code, load_python
from bough_server.errors import ConfigurationError

TOOLS = '''
from bough_server import agent, tool
from desk_notes import NOTES

@tool
def search(topic: str) -> str:
    """Searches."""
    return NOTES

again = search

@agent
async def coder(ctx, input):
    """Codes."""
    return "done"
'''


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    """Leaves no module and no folder of a test behind."""
    modules, folders = set(sys.modules), list(sys.path)
    yield
    assert sys.path == folders
    for name in set(sys.modules) - modules:
        if name.startswith("desk_"):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def refusal(folder: Path, *names: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load_python(names, folder)
    return refused.value.message


def test_the_digest_of_the_code_changes_with_any_loaded_module_of_the_project_and_with_nothing_else(
    tmp_path: Path,
) -> None:
    def digest(folder: str, notes: str) -> str:
        project = write(tmp_path / folder, "desk_notes.py", notes)
        write(project, "desk_tools.py", TOOLS)
        write(project, "desk_unused.py", folder)
        for name in ("desk_tools", "desk_notes"):
            sys.modules.pop(name, None)
        load_python(["desk_tools"], project)
        return digest_code(["desk_tools"], project)

    first = digest("one", "NOTES = 'n'\n")
    assert digest("two", "NOTES = 'n'\n") == first, "servers have the project in different folders"
    assert digest("three", "NOTES = 'new'\n") != first
    assert digest_code([], tmp_path) == ""


def test_tools_and_agents_are_found_once_each(tmp_path: Path) -> None:
    write(tmp_path, "desk_notes.py", "NOTES = 'n'\n")
    write(tmp_path, "desk_tools.py", TOOLS)
    write(tmp_path, "desk_more.py", "from desk_tools import search\n")
    parts = load_python(["desk_tools", "desk_more"], tmp_path)
    assert [each.name for each in parts.tools] == ["search"]
    assert [each.definition.name for each in parts.agents] == ["coder"]
    assert parts.tools[0]("x") == "n"


FUNCTIONS = """
from bough_server import condition, input_builder, rewriter

@condition
def enough(snapshot):
    return True

@input_builder(name="build")
def built(snapshot):
    return ""

bare = rewriter(name="bare")(lambda message: [message])
again = enough
"""


def test_functions_are_found_once_each_with_their_kinds(tmp_path: Path) -> None:
    write(tmp_path, "desk_functions.py", FUNCTIONS)
    write(tmp_path, "desk_more.py", "from desk_functions import enough\n")
    parts = load_python(["desk_functions", "desk_more"], tmp_path)
    assert [(each.name, each.kind) for each in parts.functions] == [
        ("enough", "condition"),
        ("build", "input builder"),
        ("bare", "rewriter"),
    ]


def test_two_functions_of_one_name_are_refused_whatever_they_are(tmp_path: Path) -> None:
    write(tmp_path, "desk_one.py", "from bough_server import condition\nx = condition(name='same')(lambda one: True)\n")
    write(tmp_path, "desk_two.py", "from bough_server import rewriter\nx = rewriter(name='same')(lambda one: [])\n")
    assert refusal(tmp_path, "desk_one", "desk_two") == "desk_two: There are two functions named 'same'."


def test_a_function_that_waits_is_refused_with_its_line(tmp_path: Path) -> None:
    text = "from bough_server import condition\n\n@condition\nasync def later(snapshot):\n    return True\n"
    write(tmp_path, "desk_later.py", text)
    assert refusal(tmp_path, "desk_later").startswith(f"{tmp_path}/desk_later.py:3: TypeError: 'later' must be a plain")


def test_a_module_of_the_same_name_in_another_folder_is_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = f'from bough_server import tool\n@tool\ndef {name}() -> str:\n    """Says."""\n    return "{name}"\n'
        write(tmp_path / name, "desk_tools.py", text)
    found = [load_python(["desk_tools"], tmp_path / name).tools[0].name for name in ("one", "two")]
    assert found == ["one", "two"]


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    text = 'from bough_server import tool\n@tool\ndef same() -> str:\n    """Says."""\n    return ""\n'
    write(tmp_path, "desk_one.py", text)
    write(tmp_path, "desk_two.py", text)
    assert refusal(tmp_path, "desk_one", "desk_two") == "desk_two: There are two tools named 'same'."


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x = 1\n\nraise KeyError('a')\n", 3, "KeyError: 'a'"),
        ("x = 1\nimport desk_missing\n", 2, "ModuleNotFoundError: No module named 'desk_missing'"),
        ("def f(:\n", 1, "SyntaxError: invalid syntax (desk_tools.py, line 1)"),
        (
            'from bough_server import tool\n\n@tool\ndef f(a) -> str:\n    """Says."""\n    return a\n',
            3,
            "TypeError: Parameter 'a' of tool 'f' needs a type hint, such as `a: str`.",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    write(tmp_path, "desk_tools.py", text)
    assert refusal(tmp_path, "desk_tools") == f"{tmp_path}/desk_tools.py:{line}: {words}"


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, "desk_none") == (
        "desk_none: cannot be imported: ModuleNotFoundError: No module named 'desk_none'"
    )


def test_a_name_of_pythons_own_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "json.py", "")
    assert refusal(tmp_path, "json") == (
        f"{tmp_path}/json: 'json' is the name of a standard library module; choose another."
    )
