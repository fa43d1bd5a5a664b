"""What authors of agents and tools import."""

import subprocess
import sys
from pathlib import Path

import pytest

import bough_server
from bough_server import Context, Message, Part, agent, text_of
from bough_server.cli.program import make_program
from tests.support.teams import open_team, script


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = "import sys, bough_server; print([name for name in sys.modules if name.startswith('bough_server.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_authors_find_what_they_need_and_nothing_else() -> None:
    assert bough_server.__all__ == [
        "Context",
        "Graph",
        "Message",
        "ModelRequest",
        "Outcome",
        "Part",
        "RunError",
        "Snapshot",
        "ToolContext",
        "Update",
        "agent",
        "condition",
        "file_part",
        "handler",
        "input_builder",
        "metric",
        "node",
        "reducer",
        "rewriter",
        "router",
        "serve",
        "text_of",
        "tool",
    ]
    assert set(bough_server.__all__) <= set(dir(bough_server))
    assert {name: getattr(bough_server, name).__module__ for name in bough_server.__all__} == {
        "Context": "bough_server.runtime.agent",
        "Graph": "bough_server.agents.graph.builder",
        "Message": "bough.v1.message_pb2",
        "ModelRequest": "bough_server.models.model",
        "Outcome": "bough_server.runtime.agent",
        "Part": "bough.v1.message_pb2",
        "RunError": "bough_server.errors",
        "Snapshot": "bough_server.functions",
        "ToolContext": "bough_server.tools.tool",
        "Update": "bough_server.functions",
        "agent": "bough_server.agents.function",
        "condition": "bough_server.functions",
        "file_part": "bough_server.log.blobs",
        "handler": "bough_server.functions",
        "input_builder": "bough_server.functions",
        "metric": "bough_server.evals.metrics.custom",
        "node": "bough_server.agents.graph.function",
        "reducer": "bough_server.functions",
        "rewriter": "bough_server.functions",
        "router": "bough_server.functions",
        "serve": "bough_server.app",
        "text_of": "bough_server.messages",
        "tool": "bough_server.tools.tool",
    }
    with pytest.raises(AttributeError, match="has no attribute 'metrics_of'"):
        bough_server.metrics_of  # noqa: B018


CONTEXT = [
    "ask",
    "call_tool",
    "definition",
    "dispatch",
    "gather",
    "history",
    "invocation_id",
    "map",
    "model",
    "new_id",
    "now",
    "offers",
    "random",
    "read_file",
    "run_id",
    "session_id",
    "sleep",
    "state",
    "step",
    "step_index",
    "tenant_id",
    "tools",
    "user_id",
]


def public(of: object) -> list[str]:
    return [name for name in dir(of) if not name.startswith("_")]


async def test_a_context_has_23_names_in_its_protocol_and_where_code_gets_one(tmp_path: Path) -> None:
    found: list[list[str]] = []

    @agent
    async def curious(ctx: Context, input: str) -> str:
        """Looks at what it is given."""
        found.append(public(ctx))
        await ctx.map(look, ["", ""])
        return ""

    async def look(ctx: Context, _: str) -> None:
        found.append(public(ctx))

    async with open_team(tmp_path, script(), code_agents=[curious]) as harness:
        await harness.turn("curious")
    assert public(Context) == CONTEXT
    assert found == [CONTEXT] * 3


def test_the_text_of_a_message_is_its_texts_and_its_json() -> None:
    parts = [Part(text="Three: "), Part(data_json="[1, 2, 3]"), Part(), Part(text=".")]
    parts[2].blob.uri = "file:///a.png"
    assert text_of(Message(parts=parts)) == "Three: [1, 2, 3]."
    assert text_of(Message()) == ""


def test_the_command_has_grpc_say_nothing_of_the_child_that_is_the_embedded_model() -> None:
    code = """
import os, sys, bough_server.cli as cli
sys.argv = ["bough", "--version"]
assert "grpc" not in sys.modules
try:
    cli.execute()
except SystemExit as end:
    print(end.code, os.environ["GRPC_ENABLE_FORK_SUPPORT"])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "0 0"


def loaded(code: str) -> set[str]:
    """Return the packages that a new interpreter has loaded after some code, by their first names."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return {name.partition(".")[0] for name in said.splitlines()[-1].split()}


def test_the_help_and_a_shells_completion_load_neither_client_nor_server() -> None:
    code = """
import bough_server.cli as cli
sys.argv = ["bough", "--help"]
try:
    cli.execute()
except SystemExit:
    pass
"""
    found = loaded(code)
    assert "typer" in found
    assert not found & {"asyncio", "bough", "google", "grpc", "pydantic", "rich", "sqlalchemy", "yaml"}


def test_a_command_waits_for_threads_and_exit_handlers_but_frees_no_objects() -> None:
    code = """
import atexit, sys, threading, time, bough_server.cli as cli

class Kept:
    def __del__(self):
        print("freed")

def late():
    time.sleep(0.1)
    print("thread")

def end():
    threading.Thread(target=late).start()
    atexit.register(print, "handler")
    raise SystemExit(3)

kept = Kept()
cli.execute = end
cli.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (3, ["thread", "handler"], "")


def test_a_command_to_a_running_server_loads_neither_the_database_nor_the_server() -> None:
    found = loaded("import bough_server.cli.connection, bough_server.cli.follow")
    assert "grpc" in found
    assert not found & {"alembic", "jsonschema", "openai", "opentelemetry", "protovalidate", "sqlalchemy", "sqlmodel"}


def test_a_command_loads_no_module_of_the_others() -> None:
    code = """
import sys, bough_server.cli as cli
sys.argv = ["bough", "schema", "agent"]
try:
    cli.execute()
except SystemExit as end:
    assert end.code == 0
print(*(name for name in sys.modules if name.startswith("bough_server.cli.")))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(said.splitlines()[-1].split()) == {
        f"bough_server.cli.{name}" for name in ("commands", "completion", "options", "program", "schema")
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rum"], "all"),
        (["--help"], "all"),
        (["tree", "last"], ["tree"]),
        (["--config", "db", "sessions", "list"], ["sessions", "db"]),
    ],
)
def test_only_commands_that_the_words_name_are_made(words: list[str], expected: list[str] | str) -> None:
    whole = make_program()
    every = [each.name or each.callback.__name__ for each in whole.registered_commands if each.callback]
    every += [each.name for each in whole.registered_groups if isinstance(each.name, str)]
    made = make_program(words)
    found = [each.name or each.callback.__name__ for each in made.registered_commands if each.callback]
    found += [each.name for each in made.registered_groups if isinstance(each.name, str)]
    assert len(every) == 27
    assert found == (every if expected == "all" else expected)
