"""Runs that are cancelled when no client follows them, and clients that follow them at other servers."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from bough.v1 import policy_pb2
from bough_server.runs.follow import RemoteFollowers
from bough_server.runs.live import REMOTE_FOLLOWER_SECONDS
from bough_server.store.ports.workers import Topic
from bough_server.store.sql.notifications import Notifier
from tests.support.databases import on_postgres
from tests.support.log_readings import answer_of
from tests.support.run_harness import RunHarness
from tests.support.session_agents import Floor, Run, harness

CANCEL = policy_pb2.RunPolicy(on_disconnect=policy_pb2.DISCONNECT_POLICY_CANCEL)
CANCEL.disconnect_grace.FromSeconds(1)


def _patience(it: RunHarness, run: Run) -> float:
    """How long a run goes on without a follower from now, in seconds."""
    live = it.live(run.run_id)
    assert live is not None
    assert live.grace is not None
    return live.grace.when() - asyncio.get_running_loop().time()


async def _followed_once(it: RunHarness, run: Run) -> None:
    async with aclosing(it.follow(run)) as log:
        async for _ in log:
            return


async def test_a_client_that_changes_servers_is_reported_to_the_owner_at_once(tmp_path: Path) -> None:
    floor, heard = Floor(), asyncio.Event()
    with on_postgres(tmp_path):
        async with AsyncExitStack() as stack:
            one, other = [await stack.enter_async_context(harness(tmp_path, floor)) for _ in range(2)]
            for server in (one, other):
                await server.runs.recover()
            run = await one.start("speaker", "a", policy=CANCEL)
            await floor.began["a"].wait()
            await _followed_once(one, run)
            one.store.notifier.subscribe(Topic.FOLLOWED, lambda _: heard.set())
            following = asyncio.create_task(other.log(run))
            await heard.wait()
            assert _patience(one, run) > REMOTE_FOLLOWER_SECONDS - 1
            floor.let("a")
            assert answer_of(await following) == "saw a"


async def test_runs_of_a_server_that_hears_nothing_of_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor = Floor()
    async with harness(tmp_path, floor) as it:
        run = await it.start("speaker", "a", policy=CANCEL)
        await floor.began["a"].wait()
        await _followed_once(it, run)
        assert _patience(it, run) <= 1
        monkeypatch.setattr(Notifier, "is_connected", False)
        reporting = asyncio.create_task(RemoteFollowers(it.dependencies, it.runs.supervisor.live_runs).report())
        await asyncio.sleep(0)
        assert _patience(it, run) > REMOTE_FOLLOWER_SECONDS
        reporting.cancel()
