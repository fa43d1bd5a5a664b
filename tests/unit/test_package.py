"""What authors of agents and tools import."""

import subprocess
import sys

import pytest

import bough_server


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = "import sys, bough_server; print([name for name in sys.modules if name.startswith('bough_server.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_authors_find_what_they_need_and_nothing_else() -> None:
    from bough_server.agents.function import agent
    from bough_server.runtime.agent import Context
    from bough_server.tools.tool import tool

    assert (bough_server.agent, bough_server.tool, bough_server.Context) == (agent, tool, Context)
    assert bough_server.__all__ == [
        "Context",
        "Snapshot",
        "agent",
        "condition",
        "input_builder",
        "rewriter",
        "serve",
        "tool",
    ]
    assert set(bough_server.__all__) <= set(dir(bough_server))
    with pytest.raises(AttributeError, match="has no attribute 'metric'"):
        bough_server.metric  # noqa: B018


def test_the_command_has_grpc_say_nothing_of_the_child_that_is_the_embedded_model() -> None:
    code = """
import os, sys, bough_server.cli as cli
sys.argv = ["bough", "--version"]
assert "grpc" not in sys.modules
try:
    cli.main()
except SystemExit as end:
    print(end.code, os.environ["GRPC_ENABLE_FORK_SUPPORT"])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "0 0"
