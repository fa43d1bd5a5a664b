"""Turns of sessions: who holds a session, what a request id finds, who follows, and what a server leaves behind."""

import asyncio
import gc
import sqlite3
import time
import weakref
from contextlib import closing, suppress
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from bough.v1 import agent_service_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.errors import InvalidRequest, NotFound, RequestIdReused, ServerStopping, SessionBusy
from bough_server.observability.tracing import Parent
from bough_server.runtime.agent import Context
from bough_server.store.ports.runs import Page
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.open_runs import open_runs
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, llm, open_team, script


class Hold:
    """A gate that holds a model at its first piece until it is released."""

    def __init__(self, agent: str = "p") -> None:
        self._agent = agent
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, agent: str, turn: int, chunk: int) -> None:
        if agent == self._agent:
            self.reached.set()
            await self.released.wait()


def leaving(seconds: float, **policy: object) -> policy_pb2.RunPolicy:
    made = policy_pb2.RunPolicy(**policy)  # type: ignore[arg-type]
    made.disconnect_grace.FromNanoseconds(int(seconds * 1e9))
    return made


DONE = script(p=["Done."])


async def test_a_session_runs_one_turn_at_a_time_and_names_the_one_that_goes(tmp_path: Path) -> None:
    hold = Hold()
    async with open_team(tmp_path, DONE, llm("p"), gate=hold) as harness:
        run = await harness.start("p")
        with pytest.raises(SessionBusy) as busy:
            await harness.start("p", session_id=run.session_id)
        hold.released.set()
        await harness.log(run)
        again = await harness.turn("p", session_id=run.session_id)
    assert busy.value.details["run_id"] == run.run_id
    assert answer_of(again) == "Done."


async def test_a_run_that_is_over_is_freed_without_a_collection(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="x")), "Done."], c=["Yes."])
    team = llm("p", links=["c"]), llm("c")
    hold = Hold("c")
    async with open_team(tmp_path, turns, *team, gate=hold) as harness:
        run = await harness.start("p")
        await hold.reached.wait()
        live = harness.live(run.run_id)
        assert live is not None
        execution = weakref.ref(live.execution)
        del live
        gc.disable()
        try:
            hold.released.set()
            await harness.log(run)
            await harness.until_over(run)
            async with asyncio.timeout(5):
                while execution() is not None:  # noqa: ASYNC110 # the tasks of the run end in the next turns of the loop
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_positions_of_a_session_go_on_without_gaps_over_turns_that_fail_too(tmp_path: Path) -> None:
    turns = script(
        p=[
            {"when": "fail", "text": "x", "error": {"reason": "UNAVAILABLE"}},
            {"when": "ask", "calls": [call("call_c", message="hi")]},
            {"when": "ask", "text": "Asked."},
        ],
        c=["hello"],
    )
    async with open_team(tmp_path, turns, llm("p", links=["c"]), llm("c")) as harness:
        first = await harness.turn("p", "ask")
        session = first[0].session_id
        await harness.turn("p", "fail", session_id=session)
        third = await harness.turn("p", "ask", session_id=session)
        stored = await harness.messages(session)
        await check_replay(harness, third)
    assert [one.message.position for one in stored] == list(range(1, 10))
    assert [text_of(one.message) for one in stored] == [
        *("ask", "hi", "hello", "Asked."),
        "fail",
        *("ask", "hi", "hello", "Asked."),
    ]
    assert third[0].run_started.session_cut == 5


async def test_an_unknown_session_or_agent_is_not_found(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        with pytest.raises(NotFound, match="session 'nowhere'"):
            await harness.start("p", session_id="nowhere")
        with pytest.raises(NotFound, match="agent 'absent'"):
            await harness.start("absent")
        assert await open_runs(harness.store) == []


async def test_an_input_over_256_kib_is_refused_and_one_of_256_is_not(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        with pytest.raises(InvalidRequest) as refused:
            await harness.start("p", "x" * 256 * 1024)
        log = await harness.turn("p", "x" * (256 * 1024 - 8))
    assert [violation.field for violation in refused.value.violations] == ["input.parts"]
    assert answer_of(log) == "Done."


async def test_the_same_request_finds_its_run_again_and_again(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        runs = await asyncio.gather(*(harness.start("p", request_id="r-1") for _ in range(4)))
        await harness.log(runs[0])
        late = await harness.start("p", request_id="r-1")
        with pytest.raises(RequestIdReused) as reused:
            await harness.start("p", "something else", request_id="r-1")
    assert {run.run_id for run in (*runs, late)} == {runs[0].run_id}
    assert late.state == execution_pb2.EXECUTION_STATE_SUCCEEDED
    assert reused.value.details == {"run_id": runs[0].run_id}


async def test_the_same_request_at_once_in_one_session_finds_one_run(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        session = (await harness.turn("p"))[0].session_id
        runs = await asyncio.gather(*(harness.start("p", session_id=session, request_id="r") for _ in range(4)))
        await harness.log(runs[0])
    assert len({run.run_id for run in runs}) == 1


async def test_a_run_that_is_left_without_a_grace_is_cancelled_at_once(tmp_path: Path) -> None:
    hold = Hold()
    async with open_team(tmp_path, DONE, llm("p"), gate=hold) as harness:
        run = await harness.start("p", policy=leaving(0))
        follower = harness.follow(run)
        await anext(follower)
        await hold.reached.wait()
        await follower.aclose()
        await harness.until_over(run)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert log[-1].WhichOneof("payload") == "run_cancelled"
    assert having(log, "cancel_requested")[0].cancel_requested.reason == execution_pb2.CANCEL_REASON_DISCONNECTED


@pytest.mark.parametrize("policy", [{"on_disconnect": policy_pb2.DISCONNECT_POLICY_CONTINUE}, {"background": True}])
async def test_a_run_that_may_go_on_alone_does(tmp_path: Path, policy: dict[str, object]) -> None:
    hold = Hold()
    async with open_team(tmp_path, DONE, llm("p"), gate=hold) as harness:
        run = await harness.start("p", policy=leaving(0, **policy))
        follower = harness.follow(run)
        await anext(follower)
        await hold.reached.wait()
        await follower.aclose()
        hold.released.set()
        log = await harness.log(run)
    assert answer_of(log) == "Done."


async def test_a_run_is_left_only_when_its_last_follower_is_gone(tmp_path: Path) -> None:
    hold = Hold()
    async with open_team(tmp_path, DONE, llm("p"), gate=hold) as harness:
        run = await harness.start("p", policy=leaving(0))
        first, second = harness.follow(run), harness.follow(run)
        await anext(first)
        await anext(second)
        await first.aclose()
        await hold.reached.wait()
        hold.released.set()
        log = [event async for event in second]
    assert log[-1].HasField("run_completed")


async def test_who_comes_back_in_time_keeps_the_run_and_the_grace_begins_afresh(tmp_path: Path) -> None:
    hold = Hold()
    async with open_team(tmp_path, DONE, llm("p"), gate=hold) as harness:
        run = await harness.start("p", policy=leaving(3600))
        live = harness.live(run.run_id)
        assert live is not None
        graces: list[asyncio.TimerHandle | None] = []
        for _ in range(2):
            follower = harness.follow(run)
            await anext(follower)
            assert live.grace is None
            await follower.aclose()
            graces.append(live.grace)
        hold.released.set()
        log = await harness.log(run)
    first, second = graces
    assert first is not None
    assert first.cancelled()
    assert second is not None
    assert second.when() > first.when()
    assert answer_of(log) == "Done."


async def test_a_run_that_has_ended_waits_for_no_follower(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        run = await harness.start("p", policy=leaving(3600))
        live = harness.live(run.run_id)
        assert live is not None
        follower = harness.follow(run)
        async for event in follower:
            if event.HasField("run_completed"):
                break
        await harness.until_over(run)
        await follower.aclose()
    assert live.grace is None


async def test_a_server_that_drains_lets_runs_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    hold = Hold()
    async with open_team(tmp_path, DONE, llm("p"), gate=hold) as harness:
        run = await harness.start("p")
        await hold.reached.wait()
        draining = asyncio.create_task(harness.runs.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(ServerStopping):
            await harness.start("p")
        hold.released.set()
        await draining
        log = await harness.log(run)
    assert answer_of(log) == "Done."


TEAM = script(p=[calls(call("call_c", message="a"), call("call_c", message="b")), "Done."], c=["never"])


async def test_a_drained_run_that_does_not_end_in_time_is_gone_on_with_by_the_next_server(tmp_path: Path) -> None:
    hold = Hold("c")
    team = (llm("p", links=["c"]), llm("c"))
    async with open_team(tmp_path, TEAM, *team, gate=hold) as harness:
        run = await harness.start("p")
        await hold.reached.wait()
        await harness.runs.drain(0)
        with pytest.raises(ServerStopping):
            await harness.log(run)
        assert (await harness.runs.get(ME, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_RUNNING
    async with open_team(tmp_path, TEAM, *team) as harness:
        assert await harness.runs.recover() == 1
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."


async def test_what_a_dead_server_left_open_is_gone_on_with_and_its_session_is_free(tmp_path: Path) -> None:
    hold = Hold("c")
    team = (llm("p", links=["c"]), llm("c"))
    async with open_team(tmp_path, TEAM, *team, gate=hold) as harness:
        run = await harness.start("p")
        seen = []
        async for event in harness.follow(run):
            seen.append(event)
            if [event.agent for event in having(seen, "llm_started")].count("c") == 2:
                break
        await harness.crash()
    async with open_team(tmp_path, TEAM, *team) as harness:
        assert await harness.runs.recover() == 1
        log = await harness.log(run)
        await harness.until_over(run)
        assert await harness.runs.recover() == 0
        await check_replay(harness, log)
        record = await harness.runs.get(ME, run.run_id)
        again = await harness.turn("p", session_id=run.session_id)
    assert log[: len(seen)] == seen
    assert sorted(names(log)[len(seen) : len(seen) + 3]) == ["c: llm.retrying", "c: llm.retrying", "p: run.resumed"]
    assert {event.attempt for event in having(log, "llm_completed") if event.agent == "c"} == {2}
    assert record.run.state == execution_pb2.EXECUTION_STATE_SUCCEEDED
    assert again[0].run_started.session_cut == 2 + 2 * len(having(log, "sub_agent_started"))


async def test_a_session_that_cannot_be_read_starts_no_run_and_its_request_can_be_made_again(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        session = (await harness.turn("p"))[0].session_id
        with closing(sqlite3.connect(tmp_path / "bough.db", isolation_level=None)) as intruder:
            ((sound,),) = intruder.execute("SELECT data FROM messages WHERE position = 1")
            intruder.execute("UPDATE messages SET data = x'ff' WHERE position = 1")
            with pytest.raises(DecodeError):
                await harness.start("p", session_id=session, request_id="r-1")
            assert await open_runs(harness.store) == []
            intruder.execute("UPDATE messages SET data = ? WHERE position = 1", (sound,))
        again = await harness.start("p", session_id=session, request_id="r-1")
        log = await harness.log(again)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."


async def test_a_start_that_looked_for_its_request_while_the_server_began_to_stop_is_refused(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        starting = asyncio.create_task(harness.start("p", request_id="r-1"))
        await asyncio.sleep(0)
        await harness.runs.drain(0)
        with pytest.raises(ServerStopping):
            await starting
        assert await open_runs(harness.store) == []


@pytest.mark.parametrize(
    ("deadline", "reason", "end"),
    [
        (False, execution_pb2.CANCEL_REASON_CALLER, "run_cancelled"),
        (True, execution_pb2.CANCEL_REASON_DEADLINE, "run_failed"),
    ],
)
async def test_a_run_whose_cancellation_was_requested_before_its_server_died_ends_cancelled(
    tmp_path: Path, deadline: bool, reason: execution_pb2.CancelReason.ValueType, end: str
) -> None:
    release = asyncio.Event()

    @agent(description="Does not stop when it is told to.")
    async def stubborn(ctx: Context, input: message_pb2.Message) -> str:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        return "too late"

    async with open_team(tmp_path, DONE, code_agents=[stubborn]) as harness:
        run = await harness.start("stubborn", deadline_time_ns=time.time_ns() - 1 if deadline else None)
        if not deadline:
            await harness.runs.cancel(ME, run.run_id)
        async for event in harness.follow(run):
            if event.HasField("cancel_requested"):
                break
        await harness.crash()
        release.set()
    async with open_team(tmp_path, DONE, code_agents=[stubborn]) as harness:
        assert await harness.runs.recover() == 1
        log = await harness.log(run)
        await check_replay(harness, log)
    assert [event.WhichOneof("payload") for event in log] == ["run_started", "cancel_requested", end]
    assert log[1].cancel_requested.reason == reason


async def test_unknown_fields_of_a_request_are_not_recorded(tmp_path: Path) -> None:
    unknown = b"\xfa\x3e\x80\x08" + b"x" * 1024  # field 1007, 1,024 bytes
    request = agent_service_pb2.RunRequest(
        agent="p", input=message_pb2.Message(parts=[message_pb2.Part(text="hello")]), policy=policy_pb2.RunPolicy()
    )
    request.input.MergeFromString(unknown)
    request.policy.MergeFromString(unknown)
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        record = await harness.runs.start(ME, request, deadline_time_ns=None, trace=Parent.current())
        log = await harness.log(record.run)
    assert log[0].ByteSize() < 1_024


async def test_a_page_of_long_messages_ends_before_it_is_too_large_and_none_is_left_out(tmp_path: Path) -> None:
    async with open_team(tmp_path, DONE, llm("p")) as harness:
        first = await harness.turn("p", "0" + "x" * 250_000)
        for number in range(1, 6):
            await harness.turn("p", f"{number}" + "x" * 250_000, session_id=first[0].session_id)
        listed: list[int] = []
        token = ""
        while token or not listed:
            page, token = await harness.store.sessions.list_messages(
                ME, first[0].session_id, Page(size=1_000, token=token)
            )
            assert sum(message.ByteSize() for message in page) < 1_100_000
            listed += [message.position for message in page]
    assert listed == list(range(12, 0, -1))
