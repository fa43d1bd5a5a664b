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


RELATIVE = """from importlib import import_module
import importlib

NAME = "json"
import_module("bough_server.clock")


def late(name: str) -> None:
    from . import live
    from .queue import Queue
    import bough.v1
    importlib.import_module("bough_server.log.events")
    import_module(f"bough_server.runs.{name}")
    import_module(".live", __package__)
    import_module(__name__ + ".live")
    __import__("bough.errors")
    import_module(name)
    import_module("json")
    import boughs
"""


def test_relative_and_computed_imports_are_reported_and_modules_of_operators_are_not() -> None:
    reported = [line.split(" inside ")[0] for line in problems("runs/live.py", RELATIVE)]
    assert sorted(reported) == [
        "runs/live.py:10: imports .queue",
        "runs/live.py:11: imports bough.v1",
        "runs/live.py:12: imports 'bough_server.log.events'",
        "runs/live.py:13: imports f'bough_server.runs.{name}'",
        "runs/live.py:14: imports '.live'",
        "runs/live.py:15: imports __name__ + '.live'",
        "runs/live.py:16: imports 'bough.errors'",
        "runs/live.py:5: imports 'bough_server.clock'",
        "runs/live.py:9: imports .",
    ]


def test_a_module_may_have_so_many_lines_and_no_more() -> None:
    assert list(problems("a.py", "x = 1\n" * MAX_LINES)) == []
    assert list(problems("a.py", "x = 1\n" * (MAX_LINES + 1))) == [
        f"a.py:1: has {MAX_LINES + 1} lines; the limit is {MAX_LINES}. Split it by subject."
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


SYSTEM = """import asyncio, os, random, threading, time, uuid
import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from secrets import token_hex
from time import monotonic as now
from uuid import UUID, uuid4


def use(loop: object, thread: threading.Thread, seeded: random.Random) -> "random.Random":
    time.sleep(now() - time.time())
    started = (datetime.now(), dt.datetime.utcnow(), asyncio.get_running_loop().time(), loop.time)
    stamp.GetCurrentTime()
    drawn = (uuid.uuid1(), partial(uuid4), token_hex(8), os.urandom(8), random.random(), random.Random())
    pure = (UUID("0"), uuid.uuid5(uuid.NAMESPACE_DNS, "name"), random.Random("seed"), reservation.time)
    threading.Thread(target=use).start()
    callback(asyncio.to_thread, loop.run_in_executor(None, use), loop.run_in_executor(ThreadPoolExecutor(), use))
"""


def uses_of(name: str) -> list[str]:
    return sorted(line.removeprefix(f"{name}:") for line in problems(name, SYSTEM))


def test_clocks_randomness_and_threads_are_reported_outside_of_the_module_that_has_them() -> None:
    clock = ", which only clock.py does"
    clocks = [
        f"12: now reads a clock{clock}",
        f"12: time.time reads a clock{clock}",
        f"13: asyncio.get_running_loop().time reads a clock{clock}",
        f"13: datetime.now reads a clock{clock}",
        f"13: dt.datetime.utcnow reads a clock{clock}",
        f"13: loop.time reads a clock{clock}",
        f"14: stamp.GetCurrentTime() reads a clock{clock}",
    ]
    ids = "draws randomness from the system, which only ids.py does"
    draws = [
        f"15: {each} {ids}"
        for each in ("os.urandom", "random.Random()", "random.random", "token_hex", "uuid.uuid1", "uuid4")
    ]
    threads = [
        f"{line}: {each} makes threads, which only threads.py does"
        for line, each in (
            (17, "threading.Thread"),
            (18, "ThreadPoolExecutor"),
            (18, "asyncio.to_thread"),
            (18, "loop.run_in_executor(None, use)"),
        )
    ]
    assert uses_of("runs/live.py") == clocks + draws + threads
    assert uses_of("clock.py") == draws + threads
    assert uses_of("ids.py") == clocks + threads
    assert uses_of("threads.py") == clocks + draws


def test_commands_and_the_plugin_of_pytest_may_use_the_system() -> None:
    assert uses_of("cli/run.py") == uses_of("testing/team.py") == []
