"""Runs that create the session that they name, and request ids, which belong to a user."""

import asyncio
from pathlib import Path

import pytest

from bough.v1 import policy_pb2
from bough_server.errors import NotFound, RequestIdReused, SessionBusy
from bough_server.identity import Principal
from bough_server.store.opening import rebuild_projections
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.run_harness import EVERYONE, ME
from tests.support.session_agents import CANCEL_INTERRUPTED, QUEUE, Floor, Run, harness

CHAT = "chat-1"
ANNE = Principal(tenant_id="local", user_id="anne")
STRANGER = Principal(tenant_id="other", user_id="local")


@pytest.fixture
def floor() -> Floor:
    floor = Floor()
    floor.let("a", "b", "c")
    return floor


async def test_a_run_creates_the_session_that_it_names_and_the_next_continues_it(tmp_path: Path, floor: Floor) -> None:
    async with harness(tmp_path, floor) as it:
        with pytest.raises(NotFound):
            await it.start("speaker", "a", session_id=CHAT)
        logs = [await it.log(await it.start("speaker", text, session_id=CHAT, creates=True)) for text in "ab"]
        for log in logs:
            await check_replay(it, log)
        session = await it.store.sessions.get(ME, CHAT)
    assert [answer_of(log) for log in logs] == ["saw a", "saw a . b"]
    assert [log[0].run_started.session_cut for log in logs] == [0, 2]
    assert (session.session_id, session.user_id) == (CHAT, "local")
    rebuild_projections(f"sqlite:///{tmp_path / 'bough.db'}")
    async with harness(tmp_path, floor) as it:
        log = await it.log(await it.start("speaker", "c", session_id=CHAT, creates=True))
    assert answer_of(log) == "saw a . b . c"


async def test_a_run_without_a_session_gets_a_new_one_whatever_it_says_of_missing_ones(
    tmp_path: Path, floor: Floor
) -> None:
    async with harness(tmp_path, floor) as it:
        runs = [await it.start("speaker", "a", creates=True) for _ in range(2)]
        for run in runs:
            await it.log(run)
    assert runs[0].session_id != runs[1].session_id


@pytest.mark.parametrize("policy", [None, QUEUE, CANCEL_INTERRUPTED])
async def test_of_two_runs_that_create_a_session_at_once_one_does(
    tmp_path: Path, floor: Floor, policy: policy_pb2.RunPolicy | None
) -> None:
    for text in "ab":
        floor.may_speak[text].clear()
    async with harness(tmp_path, floor) as it:
        starting = [it.start("speaker", text, session_id=CHAT, creates=True, policy=policy) for text in "ab"]
        started = await asyncio.gather(*starting, return_exceptions=True)
        floor.let("a", "b")
        runs = [one for one in started if isinstance(one, Run)]
        logs = [await it.log(run) for run in runs]
    if policy is QUEUE:
        assert sorted(len(answer_of(log).split()) for log in logs) == [2, 4], "one continues what the other began"
    else:
        assert len(logs) == 1
        assert [type(one) for one in started if not isinstance(one, Run)] == [SessionBusy]


async def test_a_session_of_another_tenant_is_another_session(tmp_path: Path, floor: Floor) -> None:
    async with harness(tmp_path, floor) as it:
        mine = await it.start("speaker", "a", session_id=CHAT, creates=True)
        floor.may_speak["b"].clear()
        theirs = await it.start("speaker", "b", session_id=CHAT, creates=True, principal=STRANGER)
        waiting = await it.start("speaker", "c", session_id=CHAT, principal=STRANGER, policy=QUEUE)
        assert answer_of(await it.log(mine)) == "saw a"
        again = await it.log(await it.start("speaker", "a", session_id=CHAT))
        floor.let("b")
        await it.until_over(theirs)
        await it.until_over(waiting)
        seen = await it.store.sessions.messages(STRANGER, CHAT, through=2**31)
    assert answer_of(again) == "saw a . a"
    assert [text_of(one.message) for one in seen] == ["b", "saw b", "c", "saw b . c"]


async def test_a_run_says_which_user_started_it(tmp_path: Path, floor: Floor) -> None:
    async with harness(tmp_path, floor) as it:
        log = await it.log(await it.start("speaker", "a", session_id=CHAT, creates=True))
        annes = await it.log(await it.start("speaker", "b", session_id="annes", creates=True, principal=ANNE))
        fork = await it.log(await it.fork(Run(run_id=annes[0].run_id), 1, principal=ME))
        rows = [(await it.runs.get(EVERYONE, each[0].run_id)).run.user_id for each in (log, annes, fork)]
    assert [each[0].run_started.user_id for each in (log, annes, fork)] == ["local", "anne", "anne"]
    assert having(fork, "run_forked")[0].run_forked.user_id == "local"
    assert rows == ["local", "anne", "local"]


async def test_a_request_id_belongs_to_its_user(tmp_path: Path, floor: Floor) -> None:
    async with harness(tmp_path, floor) as it:
        mine = await it.start("speaker", "a", request_id="r")
        annes = await it.start("speaker", "b", request_id="r", principal=ANNE)
        again = await it.start("speaker", "b", request_id="r", principal=ANNE)
        with pytest.raises(RequestIdReused) as refused:
            await it.start("speaker", "a", request_id="r", principal=ANNE)
        for run in (mine, annes):
            await it.log(run)
        fork = await it.fork(mine, 1, request_id="f")
        other = await it.fork(mine, 1, request_id="f", principal=ANNE)
        await it.log(fork)
        await it.log(other)
    assert mine.run_id != annes.run_id == again.run_id
    assert refused.value.details == {"run_id": annes.run_id}
    assert fork.run_id != other.run_id
