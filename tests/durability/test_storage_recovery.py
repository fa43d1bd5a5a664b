"""A run whose log could not be written: its server tries again, less and less often, and goes on where it is well."""

import asyncio
import sqlite3
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from bough_server.errors import StorageFailed
from bough_server.store.ports.log import RunMoved
from bough_server.store.sql.writer import CommitHooks
from bough_server.tools.tool import Tool, tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script


class Disk:
    """A disk that the tool breaks the first time that it runs."""

    def __init__(self) -> None:
        self.is_failing = False
        self.ran_again = asyncio.Event()
        self._was_broken = False

    def __call__(self) -> None:
        """What becomes of a commit."""
        if self.is_failing:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    def tool(self) -> Tool:
        """The tool."""

        @tool(name="write")
        async def writing() -> str:
            """Writes."""
            if self._was_broken:
                self.ran_again.set()
            else:
                self._was_broken = self.is_failing = True
            return "written"

        return writing


def _team(folder: Path, disk: Disk, clock: HeldClock) -> AbstractAsyncContextManager[RunHarness]:
    said = script(root=[calls(call("write")), "It is written."])
    hooks = CommitHooks(before=disk)
    return open_team(folder, said, llm("root", tools=["write"]), tools=[disk.tool()], clock=clock, hooks=hooks)


async def test_a_run_whose_log_cannot_be_written_is_tried_again_less_and_less_often_and_then_goes_on(
    tmp_path: Path,
) -> None:
    disk, clock = Disk(), HeldClock()
    async with _team(tmp_path, disk, clock) as harness:
        run = await harness.start("root")
        with pytest.raises(StorageFailed):
            await harness.log(run)
        patience = []
        for _ in range(3):
            patience.append(await clock.next_sleep())
            clock.advance(patience[-1])
        patience.append(await clock.next_sleep())
        disk.is_failing = False
        clock.advance(patience[-1])
        await disk.ran_again.wait()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert patience == [1, 2, 4, 8]
    assert [event.attempt for event in having(log, "tool_started")] == [1, 2]
    assert len(having(log, "run_resumed")) == 1
    assert answer_of(log) == "It is written."


async def test_a_run_whose_server_leaves_while_the_storage_fails_goes_on_at_the_next(tmp_path: Path) -> None:
    disk, clock = Disk(), HeldClock()
    async with _team(tmp_path, disk, clock) as harness:
        run = await harness.start("root")
        with pytest.raises(StorageFailed):
            await harness.log(run)
        assert await clock.next_sleep() == 1
    disk.is_failing = False
    async with _team(tmp_path, disk, clock) as harness:
        assert await harness.runs.recover() == 1
        log = await harness.log(run)
        await check_replay(harness, log)
    assert [event.attempt for event in having(log, "tool_started")] == [1, 2]
    assert answer_of(log) == "It is written."


@pytest.mark.parametrize(
    ("port", "method", "failures"),
    [
        ("runs", "get", [StorageFailed("The server could not read its storage.")]),
        ("log", "take_over", [RunMoved()] * 5),
    ],
    ids=["its row cannot be read", "its former owner writes on"],
)
async def test_a_run_that_cannot_be_taken_over_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, port: str, method: str, failures: list[Exception]
) -> None:
    disk, clock, left = Disk(), HeldClock(), [*failures]
    async with _team(tmp_path, disk, clock) as harness:
        run = await harness.start("root")
        with pytest.raises(StorageFailed):
            await harness.log(run)
        disk.is_failing = False
        found = getattr(harness.store, port)
        usual = getattr(found, method)

        async def failing(*arguments: Any, **options: Any) -> Any:
            if left:
                raise left.pop()
            return await usual(*arguments, **options)

        monkeypatch.setattr(found, method, failing)
        for seconds in (1, 2):
            assert await clock.next_sleep() == seconds
            clock.advance(seconds)
        await disk.ran_again.wait()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert left == []
    assert answer_of(log) == "It is written."
