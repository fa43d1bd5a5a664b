"""The check of the structure: what it reports of a module, and what it lets pass."""

from tests.structure import MAX_LINES, private_access, problems, repeated_classes

NESTED = """from typing import TYPE_CHECKING

import bough_server.errors
from bough_server import events

if TYPE_CHECKING:
    from bough_server.runs.runs import Runs


def late() -> None:
    import bough_server.clock
    import json
"""


def test_imports_of_the_own_package_below_the_top_level_are_reported_but_where_they_are_meant() -> None:
    hides = "inside of a function or under TYPE_CHECKING, which hides a circle"
    assert list(problems("runs/live.py", NESTED)) == [
        f"runs/live.py:7: imports bough_server.runs.runs {hides}",
        f"runs/live.py:11: imports bough_server.clock {hides}",
    ]
    assert list(problems("cli/run.py", NESTED)) == list(problems("__init__.py", NESTED)) == []


def test_a_module_may_have_so_many_lines_and_no_more() -> None:
    assert list(problems("a.py", "x = 1\n" * MAX_LINES)) == []
    assert list(problems("a.py", "x = 1\n" * (MAX_LINES + 1))) == [
        f"a.py:1: has {MAX_LINES + 1} lines, more than {MAX_LINES}: which second subject is in it?"
    ]


def test_a_public_class_name_is_used_once_in_the_server() -> None:
    sources = {
        "a.py": "class Turn: ...\nclass _Reader: ...\n",
        "b.py": "class _Reader: ...\n\ndef make():\n    class Turn: ...\n",
        "c.py": "class Other: ...\n",
    }
    assert list(repeated_classes(sources)) == ["b.py:4: the class name Turn is also used in a.py:1"]


TEST = """from bough_server.app import _hidden, shown


class Held:
    def __init__(self, store):
        self._store = store
        store._queue = 1

    def other(self, other: "Held"):
        return other._store is self._store and hasattr(self, "_later")


def test_it(store, monkeypatch):
    monkeypatch.setattr("bough_server.app._SECONDS", 1)
    monkeypatch.setattr(store, "_reader", None)
    assert store.runs._supervisor._live is shown and store.__class__
"""


def test_private_names_in_tests_are_reported_but_those_that_the_test_defines() -> None:
    found = sorted((int(line.split(":")[1]), line.split()[5].rstrip(":")) for line in private_access("t.py", TEST))
    assert found == [
        (1, "_hidden"),
        (7, "_queue"),
        (14, "_SECONDS"),
        (15, "_reader"),
        (16, "_live"),
        (16, "_supervisor"),
    ]
    assert next(private_access("t.py", TEST)).endswith("tests go through what is public")
