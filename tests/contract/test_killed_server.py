"""A server that is killed under clients of every language, which follow one turn together."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from bough import v1
from tests.contract.driver_process import DriverProcess, driving
from tests.contract.languages import BUILD_SECONDS, LANGUAGES, command_of
from tests.contract.scenario_files import FOLDER, read_group
from tests.contract.stage import Stage, staged

# The first of these tests may build a driver.
pytestmark = pytest.mark.timeout(BUILD_SECONDS)

GROUP = read_group(FOLDER / "parallel.yaml")

SECONDS = 60.0


class Follower:
    """A client of one language that follows the turn."""

    def __init__(self, language: str, driver: DriverProcess) -> None:
        self.language, self._driver = language, driver
        self.events: list[v1.AgentEvent] = []
        self.end: dict[str, Any] = {}
        self._grown = asyncio.Condition()

    async def follow(self, line: dict[str, Any]) -> None:
        """Make a call and keep its events."""
        async for printed in self._driver.perform(line):
            if "event" in printed:
                self.events.append(json_format.ParseDict(printed["event"], v1.AgentEvent()))
            else:
                self.end = printed["end"]
            async with self._grown:
                self._grown.notify_all()

    async def has(self, name: str, count: int = 1) -> None:
        """Wait until so many events of a name have come. Raises AssertionError if the call ends before."""
        async with self._grown:
            await self._grown.wait_for(lambda: self.end or self.names.count(name) >= count)
        assert self.names.count(name) >= count, f"{self.language}: {self.end} after {self.names}"

    async def tree(self, run_id: str) -> Any:
        """Return the tree of a run as the client's helpers walk it."""
        return [printed async for printed in self._driver.perform({"tree": run_id})]

    @property
    def names(self) -> list[str]:
        """The names of the events."""
        return [str(event.WhichOneof("payload")) for event in self.events]


async def test_a_server_is_killed_twice_under_clients_of_every_language_that_follow_one_turn(tmp_path: Path) -> None:
    commands, missing = available()
    async with AsyncExitStack() as stack, asyncio.timeout(SECONDS):
        stage = await stack.enter_async_context(staged(GROUP.server, tmp_path))
        followers = []
        for language, command in commands.items():
            errors = tmp_path / f"{language}.stderr"
            driver = await stack.enter_async_context(driving(command, stage.proxy.address, errors))
            followers.append(Follower(language, driver))
        await followed(stage, followers)
        check(followers)
        run_id = followers[0].events[0].run_id
        trees = [await follower.tree(run_id) for follower in followers]
    assert [agent["path"] for agent in trees[0][0]["answer"]["agents"]] == ["lead", "lead/talker", "lead/holder"]
    assert all(tree[0] == trees[0][0] for tree in trees)
    if missing:
        pytest.skip("; ".join(missing))


def available() -> tuple[dict[str, Any], list[str]]:
    """Return the commands of the drivers, and why others are missing: the test is one of those that are there."""
    commands, missing = {}, []
    for language in LANGUAGES:
        try:
            commands[language] = command_of(language)
        except pytest.skip.Exception as reason:
            missing.append(str(reason))
    return commands, missing


async def followed(stage: Stage, followers: list[Follower]) -> None:
    """Have all clients follow a turn whose server is killed when each has half of it, and again while it recovers."""
    first, *others = followers
    async with asyncio.TaskGroup() as calls:
        request = {"agent": "lead", "input": {"parts": [{"text": "Go"}]}}
        calls.create_task(first.follow({"call": "AgentService.Run", "request": request}))
        await first.has("run_started")
        watch = {"call": "AgentService.WatchRun", "request": {"runId": first.events[0].run_id}}
        for follower in others:
            calls.create_task(follower.follow(watch))
        for follower in followers:
            await follower.has("llm_output_text_delta", 12)
        await stage.server.restart(signal.SIGKILL)
        for follower in followers:
            await follower.has("run_resumed")
        await stage.server.restart(signal.SIGKILL)
        stage.gate.open()


def check(followers: list[Follower]) -> None:
    """Check that every client has every sequence once, and the same events as the others."""
    for follower in followers:
        assert follower.end["code"] == "OK", (follower.language, follower.end)
        assert follower.end["rejoins"] > 0, follower.language
        sequences = [event.sequence for event in follower.events]
        assert sequences == list(range(1, len(sequences) + 1)), follower.language
        assert follower.names.count("run_resumed") == 2, follower.language
        assert follower.names[-1] == "run_completed", follower.language
        assert follower.events == followers[0].events, follower.language
