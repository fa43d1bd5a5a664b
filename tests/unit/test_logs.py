"""The server's log: what an exception or a library says cannot control the terminal that shows it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
import structlog
from bough_server.observability.logs import configure_logging

configure_logging("info", sys.argv[1])
try:
    raise ValueError("red \\x1b[31m, bell \\x07, C1 \\x9b2J, tab \\t, ü\\nsecond line")
except ValueError as error:
    structlog.get_logger().error("agent failed", exc_info=error)
logging.getLogger("library").warning("red \\x1b[31m")
"""


def logged(log_format: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, check=True, encoding="utf-8"
    )
    return done.stderr


def test_text_shows_control_characters_as_escapes_and_keeps_lines_and_tabs() -> None:
    text = logged("text")
    assert "ValueError: red \\x1b[31m, bell \\x07, C1 \\x9b2J, tab \t, ü\nsecond line\n" in text
    assert "red \\x1b[31m " in text.splitlines()[-1]
    assert not any(character in text for character in "\x1b\x07\x9b")


@pytest.mark.parametrize("control", ["\\u001b[31m", "\\u0007"])
def test_json_escapes_them_too(control: str) -> None:
    lines = logged("json").splitlines()
    assert [json.loads(line)["level"] for line in lines] == ["error", "warning"]
    assert control in lines[0]
