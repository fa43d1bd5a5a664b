"""Sessions that a run holds: what becomes of the next one, in every policy, over commands, crashes and restarts."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from bough.v1 import agent_service_pb2, error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RequestIdReused, SessionBusy
from bough_server.runtime.context import Context
from tests.support.house import ME, House, names, open_house
from tests.support.laws import check_laws
from tests.support.readings import answer_of, check_replay, having, text_of
from tests.support.teams import Scripts

Run = agent_service_pb2.Run
QUEUE = policy_pb2.RunPolicy(on_busy_session=policy_pb2.ON_BUSY_SESSION_QUEUE)
CANCEL_INTERRUPTED = policy_pb2.RunPolicy(on_busy_session=policy_pb2.ON_BUSY_SESSION_CANCEL_INTERRUPTED)


class Floor:
    """An agent that waits until it may speak, and one that asks; each answers with the conversation that it sees."""

    def __init__(self) -> None:
        self.may_speak: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.began: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def agents(self) -> Sequence[FunctionAgent]:
        @agent(description="Speaks when it may.")
        async def speaker(ctx: Context, input: message_pb2.Message) -> str:
            text = text_of(input)

            async def wait() -> None:
                self.began[text].set()
                await self.may_speak[text].wait()

            await ctx.step("wait", wait)
            told = (text_of(one) if one.role == message_pb2.ROLE_USER else "." for one in ctx.history())
            return " ".join(["saw", *told])

        @agent(description="Asks.")
        async def asker(ctx: Context, input: message_pb2.Message) -> str:
            return str(await ctx.ask(text_of(input)))

        return speaker, asker

    def let(self, *texts: str) -> None:
        """Lets these speak."""
        for text in texts:
            self.may_speak[text].set()


@pytest.fixture
def floor() -> Floor:
    return Floor()


def house(folder: Path, floor: Floor) -> AbstractAsyncContextManager[House]:
    return open_house(folder, models=Scripts("agents: {}"), code_agents=floor.agents())


async def queued(it: House, session_id: str, *texts: str) -> list[Run]:
    return [await it.start("speaker", text, session_id=session_id, policy=QUEUE) for text in texts]


def answer_to(request: input_pb2.InputRequest, value: str) -> input_pb2.InputAnswer:
    return input_pb2.InputAnswer(request_id=request.request_id, value_json=f'"{value}"')


async def state_of(it: House, run: Run) -> event_pb2.State.ValueType:
    return (await it.runs.get(ME, run.run_id)).run.state


ORDER = ["saw a", "saw a . b", "saw a . b . c"]


async def test_a_run_that_is_refused_is_told_who_holds_its_session_and_leaves_nothing(
    tmp_path: Path, floor: Floor
) -> None:
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        with pytest.raises(SessionBusy) as refused:
            await it.start("speaker", "b", session_id=holder.session_id)
        assert [one.run.run_id for one in await it.store.runs.open_runs()] == [holder.run_id]
        floor.let("a")
        await it.log(holder)
    assert refused.value.details == {"session_id": holder.session_id, "run_id": holder.run_id}


async def test_queued_runs_begin_first_in_first_out_and_each_sees_those_before_it(tmp_path: Path, floor: Floor) -> None:
    floor.let("a", "b", "c")
    floor.may_speak["a"].clear()
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, "b", "c")
        assert [await state_of(it, run) for run in waiting] == [event_pb2.STATE_PENDING] * 2
        floor.let("a")
        logs = [await it.log(run) for run in (holder, *waiting)]
        messages = await it.messages(holder.session_id)
        for log in logs:
            await check_replay(it, log)
    assert [answer_of(log) for log in logs] == ORDER
    assert names(logs[1])[:3] == ["speaker: run.started", "speaker: run.queued", "speaker: run.dequeued"]
    assert [log[1].run_queued.behind_run_id for log in logs[1:]] == [holder.run_id, holder.run_id]
    assert [log[2].run_dequeued.session_cut for log in logs[1:]] == [2, 4]
    assert [one.message.position for one in messages] == [1, 2, 3, 4, 5, 6]
    assert [text_of(one.message) for one in messages][::2] == ["a", "b", "c"]


@pytest.mark.parametrize("is_killed", [True, False])
async def test_queued_runs_keep_their_order_over_a_restart(tmp_path: Path, floor: Floor, is_killed: bool) -> None:
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, "b", "c", "d")
        await floor.began["a"].wait()
        if is_killed:
            await it.crash()
        else:
            await it.runs.drain(0)
    floor.let("a", "b", "c", "d")
    async with house(tmp_path, floor) as it:
        assert await it.runs.recover() == 4
        logs = [await it.log(run) for run in (holder, *waiting)]
        for log in logs:
            await check_replay(it, log)
    assert [answer_of(log) for log in logs][:3] == ORDER
    assert [having(log, "run_dequeued")[0].run_dequeued.session_cut for log in logs[1:]] == [2, 4, 6]
    ends = [log[-1].time.ToNanoseconds() for log in logs]
    assert ends == sorted(ends)


@pytest.mark.parametrize("events_before", [2, 3, 4, 5])
async def test_a_queued_run_that_is_killed_after_any_of_its_events_ends_as_it_would_have(
    tmp_path: Path, floor: Floor, events_before: int
) -> None:
    floor.let("a", "c")
    floor.may_speak["a"].clear()
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        second, third = await queued(it, holder.session_id, "b", "c")
        if events_before > 2:
            floor.let("a")
        if events_before > 3:
            floor.let("b")
        seen = 0
        async for event in it.follow(second):
            seen = event.sequence
            if seen == events_before:
                break
        await it.crash()
    floor.let("a", "b")
    async with house(tmp_path, floor) as it:
        await it.runs.recover()
        logs = [await it.log(run) for run in (holder, second, third)]
        for log in logs:
            await check_replay(it, log)
    assert [answer_of(log) for log in logs] == ORDER
    assert [len(having(log, "run_dequeued")) for log in logs] == [0, 1, 1]


@pytest.mark.parametrize("is_recovered", [False, True])
async def test_a_queued_run_that_is_cancelled_never_begins_and_lets_the_next_through(
    tmp_path: Path, floor: Floor, is_recovered: bool
) -> None:
    floor.let("b", "c")
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, "b", "c")
        if is_recovered:
            await it.crash()
        else:
            logs = await cancel_the_first(it, floor, holder, waiting)
    if is_recovered:
        async with house(tmp_path, floor) as it:
            await it.runs.recover()
            for run in waiting:
                await until_resumed(it, run, 1)
            logs = await cancel_the_first(it, floor, holder, waiting)
    expected = ["run_started", "run_queued", "run_resumed", "cancel_requested", "run_cancelled"]
    assert [event.WhichOneof("payload") for event in logs[1]] == [
        kind for kind in expected if is_recovered or kind != "run_resumed"
    ]
    assert answer_of(logs[2]) == "saw a . c"


async def cancel_the_first(
    it: House, floor: Floor, holder: Run, waiting: Sequence[Run]
) -> list[list[event_pb2.AgentEvent]]:
    record = await it.runs.cancel(ME, waiting[0].run_id)
    assert record.run.run_id == waiting[0].run_id
    cancelled = await it.log(waiting[0])
    check_laws(cancelled)
    await it.until_over(waiting[0])
    assert await state_of(it, waiting[0]) == event_pb2.STATE_CANCELLED
    assert await state_of(it, waiting[1]) == event_pb2.STATE_PENDING
    floor.let("a")
    return [await it.log(holder), cancelled, await it.log(waiting[1])]


async def test_a_queued_runs_deadline_passes_while_it_waits(tmp_path: Path, floor: Floor) -> None:
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        soon = time.time_ns() + 20_000_000
        late = await it.start("speaker", "b", session_id=holder.session_id, policy=QUEUE, deadline_time_ns=soon)
        log = await it.log(late)
        check_laws(log)
        floor.let("a")
        await it.log(holder)
        again = await it.start("speaker", "a", session_id=holder.session_id)
        await it.log(again)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert not having(log, "run_dequeued")


async def test_a_deadline_that_passes_while_no_server_is_there_ends_a_queued_run_without_its_turn(
    tmp_path: Path, floor: Floor
) -> None:
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        soon = time.time_ns() + 50_000_000
        late = await it.start("speaker", "b", session_id=holder.session_id, policy=QUEUE, deadline_time_ns=soon)
        await it.crash()
    floor.let("a")
    async with house(tmp_path, floor) as it:
        await pass_the_time(it, soon)
        await it.runs.recover()
        log = await it.log(late)
        check_laws(log)
        assert answer_of(await it.log(holder)) == "saw a"
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert not having(log, "run_dequeued")


async def test_a_queued_run_that_nobody_follows_any_more_is_cancelled(tmp_path: Path, floor: Floor) -> None:
    policy = policy_pb2.RunPolicy(on_busy_session=policy_pb2.ON_BUSY_SESSION_QUEUE, disconnect_grace=Duration())
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        left = await it.start("speaker", "b", session_id=holder.session_id, policy=policy)
        (kept,) = await queued(it, holder.session_id, "c")
        follower = it.follow(left)
        await anext(follower)
        await follower.aclose()
        await it.until_over(left)
        floor.let("a", "c")
        assert answer_of(await it.log(kept)) == "saw a . c"
        log = await it.log(left)
    assert [event.WhichOneof("payload") for event in log][2:] == ["cancel_requested", "run_cancelled"]
    assert log[2].cancel_requested.reason == event_pb2.CANCEL_REASON_DISCONNECTED


@pytest.mark.parametrize("is_recovered", [False, True])
async def test_the_time_that_a_run_waits_for_its_session_is_none_of_its_wall_duration(
    tmp_path: Path, floor: Floor, is_recovered: bool
) -> None:
    policy = policy_pb2.RunPolicy(on_busy_session=policy_pb2.ON_BUSY_SESSION_QUEUE)
    policy.limits.wall_duration.FromMilliseconds(300)
    floor.let("b")
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await it.start("speaker", "b", session_id=holder.session_id, policy=policy)
        until = time.time_ns() + 320_000_000
        if is_recovered:
            await it.crash()
        else:
            await pass_the_time(it, until)
            floor.let("a")
            log = await it.log(waiting)
    if is_recovered:
        async with house(tmp_path, floor) as it:
            await it.runs.recover()
            await pass_the_time(it, until)
            floor.let("a")
            log = await it.log(waiting)
    assert answer_of(log) == "saw a . b"


async def pass_the_time(it: House, until_ns: int) -> None:
    await it.clock.sleep(max(0.0, (until_ns - time.time_ns()) / 1e9))


async def test_restarts_while_a_run_waits_for_its_session_are_none_of_its_recoveries(
    tmp_path: Path, floor: Floor
) -> None:
    async with house(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        asked = await it.until_interrupted(holder)
        (waiting,) = await queued(it, holder.session_id, "b")
    floor.let("b")
    for times in range(1, 7):
        async with house(tmp_path, floor) as it:
            await it.runs.recover()
            await until_resumed(it, waiting, times)
    async with house(tmp_path, floor) as it:
        await it.runs.recover()
        await it.resume(holder, answer_to(having(asked, "input_requested")[0].input_requested.request, "yes"))
        log = await it.log(waiting)
        await check_replay(it, log)
    assert answer_of(log) == "saw a For context: [asker] said: yes. b"
    assert len(having(log, "run_resumed")) == 7


async def until_resumed(it: House, run: Run, times: int) -> None:
    """Waits until a run has been taken over so many times."""
    follower = it.follow(run)
    async for event in follower:
        times -= event.HasField("run_resumed")
        if not times:
            break
    await follower.aclose()


async def test_runs_wait_behind_one_that_asks_until_it_is_answered(tmp_path: Path, floor: Floor) -> None:
    floor.let("b")
    async with house(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        asked = await it.until_interrupted(holder)
        await it.until_over(holder)
        (waiting,) = await queued(it, holder.session_id, "b")
        assert not floor.began["b"].is_set()
        await it.resume(holder, answer_to(having(asked, "input_requested")[0].input_requested.request, "yes"))
        assert answer_of(await it.log(waiting)) == "saw a For context: [asker] said: yes. b"


async def test_a_run_that_waits_for_input_gives_way_to_one_that_may_cancel_it(tmp_path: Path, floor: Floor) -> None:
    floor.let("b")
    async with house(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        await it.until_interrupted(holder)
        await it.until_over(holder)
        next_run = await it.start("speaker", "b", session_id=holder.session_id, policy=CANCEL_INTERRUPTED)
        assert answer_of(await it.log(next_run)) == "saw a b"
        log = await it.log(holder)
        check_laws(log)
    assert log[-2].cancel_requested.reason == event_pb2.CANCEL_REASON_CALLER
    assert log[-1].HasField("run_cancelled")


async def test_a_run_that_is_going_gives_way_to_nobody(tmp_path: Path, floor: Floor) -> None:
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        with pytest.raises(SessionBusy) as refused:
            await it.start("speaker", "b", session_id=holder.session_id, policy=CANCEL_INTERRUPTED)
        floor.let("a")
        assert answer_of(await it.log(holder)) == "saw a"
    assert refused.value.details["run_id"] == holder.run_id


async def test_a_run_with_others_behind_it_gives_way_to_nobody(tmp_path: Path, floor: Floor) -> None:
    floor.let("b", "c")
    async with house(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        asked = await it.until_interrupted(holder)
        await it.until_over(holder)
        waiting = await queued(it, holder.session_id, "b", "c")
        with pytest.raises(SessionBusy) as refused:
            await it.start("speaker", "d", session_id=holder.session_id, policy=CANCEL_INTERRUPTED)
        assert await state_of(it, holder) == event_pb2.STATE_INPUT_REQUIRED
        await it.resume(holder, answer_to(having(asked, "input_requested")[0].input_requested.request, "yes"))
        yes = "For context: [asker] said: yes."
        assert [answer_of(await it.log(run)) for run in waiting] == [f"saw a {yes} b", f"saw a {yes} b . c"]
    assert refused.value.details["run_id"] == holder.run_id


@pytest.mark.parametrize("policy", [None, QUEUE, CANCEL_INTERRUPTED])
async def test_two_runs_at_once_on_one_session_never_both_hold_it(
    tmp_path: Path, floor: Floor, policy: policy_pb2.RunPolicy | None
) -> None:
    floor.let("a")
    async with house(tmp_path, floor) as it:
        first = await it.turn("speaker", "a")
        session_id = first[0].session_id
        starting = [it.start("speaker", text, session_id=session_id, policy=policy) for text in ("b", "c")]
        started = await asyncio.gather(*starting, return_exceptions=True)
        floor.let("b", "c")
        runs = [one for one in started if isinstance(one, Run)]
        logs = [await it.log(run) for run in runs]
        for log in logs:
            await check_replay(it, log)
    if policy is QUEUE:
        assert len(runs) == 2
        assert sorted(len(having(log, "run_dequeued")) for log in logs) == [0, 1]
    else:
        assert [type(one) for one in started if not isinstance(one, Run)] == [SessionBusy]
    one, *rest = sorted(logs, key=lambda log: len(answer_of(log)))
    assert len(rest) == (policy is QUEUE)
    assert answer_of(one) in ("saw a . b", "saw a . c")


@pytest.mark.parametrize("policy", [QUEUE, CANCEL_INTERRUPTED, None])
async def test_two_requests_at_once_with_one_id_make_one_run_in_a_held_session(
    tmp_path: Path, floor: Floor, policy: policy_pb2.RunPolicy | None
) -> None:
    floor.let("b")
    async with house(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        await it.until_interrupted(holder)
        await it.until_over(holder)
        starting = [
            it.start("speaker", "b", session_id=holder.session_id, policy=policy, request_id="r") for _ in range(3)
        ]
        started = await asyncio.gather(*starting, return_exceptions=True)
        if policy is None:
            assert [type(one) for one in started] == [SessionBusy] * 3
            return
        await it.runs.cancel(ME, holder.run_id)
        runs = [one for one in started if isinstance(one, Run)]
        assert len(runs) == 3
        assert len({run.run_id for run in runs}) == 1
        assert answer_of(await it.log(runs[0])) == "saw a b"


async def test_two_requests_at_once_with_one_id_and_other_content_make_one_run_and_one_refusal(
    tmp_path: Path, floor: Floor
) -> None:
    floor.let("a", "b")
    async with house(tmp_path, floor) as it:
        starting = [it.start("speaker", text, request_id="r") for text in ("a", "b")]
        started = await asyncio.gather(*starting, return_exceptions=True)
        (run,) = [one for one in started if isinstance(one, Run)]
        (refused,) = [one for one in started if isinstance(one, RequestIdReused)]
        await it.log(run)
    assert refused.details == {"run_id": run.run_id}


async def test_a_session_with_runs_that_hold_it_or_wait_for_it_is_not_deleted(tmp_path: Path, floor: Floor) -> None:
    floor.let("b")
    async with house(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        await it.until_interrupted(holder)
        await it.until_over(holder)
        with pytest.raises(SessionBusy) as refused:
            await it.store.sessions.delete(ME, holder.session_id)
        assert refused.value.details["run_id"] == holder.run_id
        floor.may_speak["b"].clear()
        (waiting,) = await queued(it, holder.session_id, "b")
        await it.runs.cancel(ME, holder.run_id)
        await floor.began["b"].wait()
        with pytest.raises(SessionBusy) as refused:
            await it.store.sessions.delete(ME, holder.session_id)
        assert refused.value.details["run_id"] == waiting.run_id
        floor.let("b")
        await it.log(waiting)
        await it.until_over(waiting)
        await it.store.sessions.delete(ME, holder.session_id)
        assert await it.messages(holder.session_id) == []


async def test_sixty_four_runs_may_wait_and_the_next_is_refused_until_one_has_left(
    tmp_path: Path, floor: Floor
) -> None:
    async with house(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, *(str(number) for number in range(64)))
        with pytest.raises(SessionBusy) as refused:
            await queued(it, holder.session_id, "too many")
        assert refused.value.details["run_id"] == holder.run_id
        await it.runs.cancel(ME, waiting[10].run_id)
        await it.log(waiting[10])
        (last,) = await queued(it, holder.session_id, "last")
        floor.let("a", "last", *(str(number) for number in range(64)))
        log = await it.log(last)
    said = [str(number) for number in range(64) if number != 10]
    assert having(log, "run_dequeued")[0].run_dequeued.session_cut == 2 * (1 + len(said))
    assert answer_of(log).split()[-1] == "last"
