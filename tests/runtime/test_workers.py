"""Two workers on one store: commands to the other one's runs, and who may write where a lease is lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from bough.v1 import agent_service_pb2, event_pb2, execution_pb2, input_pb2, message_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RunParked, StorageFailed
from bough_server.identity import Principal, WholeTenant
from bough_server.runs.commands import RemoteCommands
from bough_server.runs.runs import Runs
from bough_server.runtime.agent import Context
from bough_server.store.ports.log import NewRun
from bough_server.store.ports.runs import RunRow
from bough_server.store.ports.workers import RunCommand
from tests.store.evaluation_logs import MadeEvaluation
from tests.store.logs import delta, records
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.session_agents import QUEUE
from tests.support.teams import Scripts

ANNE = Principal(tenant_id="local", user_id="anne")


def beside(harness: RunHarness, worker: str) -> RunHarness:
    """Another worker on the same store."""
    return replace(harness, runs=Runs(replace(harness.dependencies, worker=worker)))


@agent(description="Asks.")
async def asker(ctx: Context, input: message_pb2.Message) -> str:
    return str(await ctx.ask("well?"))


@agent(description="Says the same.")
async def echo(ctx: Context, input: message_pb2.Message) -> str:
    return input.parts[0].text


class Slow:
    """An agent whose tool waits, and counts its calls."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.calls = 0

    def agent(self) -> FunctionAgent:
        @agent(description="Takes its time.")
        async def slow(ctx: Context, input: message_pb2.Message) -> str:
            async def wait() -> int:
                self.calls += 1
                own = self.calls
                self.began.set()
                await self.may_end.wait()
                return own

            return f"call {await ctx.step('wait', wait)}"

        return slow


async def test_a_cancel_of_another_workers_run_reaches_it_by_letter(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as mine:
        theirs = beside(mine, "the-other")
        await mine.runs.recover()
        await theirs.runs.recover()
        run = await mine.start("slow")
        await slow.began.wait()
        await theirs.runs.cancel(
            ANNE, run.run_id, note="It takes too long.", scope=WholeTenant(tenant_id=ANNE.tenant_id)
        )
        log = await mine.log(run)
        check_laws(log)
        assert await mine.store.mailbox.take(run.run_id) == []
        await theirs.runs.close()
    assert having(log, "cancel_requested")[0].cancel_requested == event_pb2.CancelRequested(
        reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="anne", note="It takes too long."
    )
    assert log[-1].run_cancelled.cancel_reason == execution_pb2.CANCEL_REASON_CALLER
    assert not having(log, "run_resumed")


async def test_an_answer_to_another_workers_run_reaches_it_by_letter(tmp_path: Path) -> None:
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[asker]) as mine:
        theirs = beside(mine, "the-other")
        await mine.runs.recover()
        await theirs.runs.recover()
        run = await mine.start("asker")
        asked = await mine.until_interrupted(run)
        request = having(asked, "input_requested")[0].input_requested.request
        await theirs.resume(run, input_pb2.InputAnswer(input_id=request.input_id, value_json='"good"'))
        log = await theirs.log(run)
        await check_replay(mine, log)
        await theirs.runs.close()
    assert answer_of(log) == "good"
    assert having(log, "run_resumed")[0].run_resumed.owner == mine.dependencies.worker


async def test_a_command_that_fails_unexpectedly_is_dropped_and_the_next_are_carried_out(tmp_path: Path) -> None:
    slow, seen, is_last = Slow(), list[str](), asyncio.Event()

    async def act(record: RunRow, command: RunCommand) -> None:
        assert command.cancel is not None
        seen.append(command.cancel.note)
        if command.cancel.note == "bad":
            raise KeyError("bad")
        if command.cancel.note == "last":
            is_last.set()
            await asyncio.Event().wait()

    async def is_elsewhere(record: RunRow) -> bool:
        if record.run.run_id == lost.run_id:
            raise ValueError("unreadable")
        return False

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as harness:
        lost, run = await harness.start("slow"), await harness.start("slow")
        mailbox = harness.store.mailbox
        own = [(run.run_id, note) for note in ("bad", "good", "last")]
        for run_id, note in [(lost.run_id, "lost"), *own]:
            cancel = event_pb2.CancelRequested(requested_by="anne", note=note)
            await mailbox.post(RunCommand(command_id=0, run_id=run_id, cancel=cancel))
        with structlog.testing.capture_logs() as logged:
            reading = asyncio.create_task(RemoteCommands(harness.dependencies).serve(act, is_elsewhere))
            last = asyncio.create_task(is_last.wait())
            await asyncio.wait({reading, last}, return_when=asyncio.FIRST_COMPLETED)
            assert not reading.done(), "the reader continues"
            reading.cancel()
        left = [await mailbox.take(run_id) for run_id in (lost.run_id, run.run_id)]
    assert seen == ["bad", "good", "last"]
    errors = [(line["event"], line["run_id"], repr(line["exc_info"])) for line in logged if "exc_info" in line]
    assert errors == [
        ("commands not carried out", lost.run_id, "ValueError('unreadable')"),
        ("command failed, and is dropped", run.run_id, "KeyError('bad')"),
    ]
    assert [[one.cancel.note for one in each if one.cancel] for each in left] == [["lost"], ["last"]]


async def test_a_command_to_an_evaluation_is_left_to_its_own_reader(tmp_path: Path) -> None:
    made, seen, is_done = MadeEvaluation(), list[str](), asyncio.Event()

    async def act(record: RunRow, command: RunCommand) -> None:
        seen.append(record.run.run_id)
        is_done.set()

    async def is_elsewhere(record: RunRow) -> bool:
        return False

    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as harness:
        run, mailbox = await harness.start("slow"), harness.store.mailbox
        await harness.store.log.create_evaluation(made.new())
        for one in (made.evaluation_id, run.run_id):
            await mailbox.post(RunCommand(command_id=0, run_id=one, cancel=event_pb2.CancelRequested()))
        reading = asyncio.create_task(RemoteCommands(harness.dependencies).serve(act, is_elsewhere))
        await is_done.wait()
        reading.cancel()
        assert len(await mailbox.take(made.evaluation_id)) == 1
    assert seen == [run.run_id]


async def test_commands_are_read_although_the_storage_failed_when_the_worker_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, failures = Slow(), [StorageFailed("The disk is gone.")]
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as harness:
        arrivals = harness.store.mailbox.arrivals

        async def failing_once() -> AsyncIterator[str]:
            if failures:
                raise failures.pop()
            async for run_id in arrivals():
                yield run_id

        monkeypatch.setattr(harness.store.mailbox, "arrivals", failing_once)
        await harness.runs.recover()
        run = await harness.start("slow")
        cancel = event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="anne")
        await harness.store.mailbox.post(RunCommand(command_id=0, run_id=run.run_id, cancel=cancel))
        log = await harness.log(run)
    assert log[-1].HasField("run_cancelled")


async def test_an_answer_by_letter_brings_its_callers_deadline(tmp_path: Path) -> None:
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[asker]) as mine:
        theirs = beside(mine, "the-other")
        await mine.runs.recover()
        await theirs.runs.recover()
        run = await mine.start("asker")
        request = having(await mine.until_interrupted(run), "input_requested")[0].input_requested.request
        answer = input_pb2.InputAnswer(input_id=request.input_id, value_json='"good"')
        deadline = mine.clock.now_ns() + 3600 * 10**9
        resuming = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=[answer])
        await theirs.runs.resume(ME, resuming, deadline_time_ns=deadline)
        (resumed,) = having(await theirs.log(run), "run_resumed")
        await theirs.runs.close()
    assert (resumed.run_resumed.owner, resumed.run_resumed.deadline_time.ToNanoseconds()) == (
        mine.dependencies.worker,
        deadline,
    )


async def test_a_queued_run_begins_when_another_workers_run_gives_up_the_session(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent(), echo]) as mine:
        theirs = beside(mine, "the-other")
        await mine.runs.recover()
        await theirs.runs.recover()
        holder = await mine.start("slow")
        await slow.began.wait()
        harnesses = (theirs, mine, theirs)
        waiting = [await each.start("echo", session_id=holder.session_id, policy=QUEUE) for each in harnesses]
        slow.may_end.set()
        async with asyncio.timeout(30):
            logs = [await each.log(run) for each, run in zip(harnesses, waiting, strict=True)]
        for log in logs:
            await check_replay(mine, log)
        await theirs.runs.close()
    assert [answer_of(log) for log in logs] == ["hello"] * 3
    assert [having(log, "run_dequeued")[0].run_dequeued.session_cut for log in logs] == [2, 4, 6]


async def test_a_queued_run_begins_when_a_run_that_could_not_be_followed_is_over(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent(), echo]) as mine:
        theirs = beside(mine, "the-other")
        await mine.runs.recover()
        await theirs.runs.recover()
        holder = await mine.start("slow")
        await slow.began.wait()
        waiting = await theirs.start("echo", session_id=holder.session_id, policy=QUEUE)
        mine.store.log.fail_readers(holder.run_id, RunParked("The code is missing."))
        slow.may_end.set()
        async with asyncio.timeout(30):
            log = await theirs.log(waiting)
        await theirs.runs.close()
    assert answer_of(log) == "hello"


async def test_a_worker_without_its_lease_loses_its_runs_and_writes_nothing_more(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as mine:
        theirs = beside(mine, "the-other")
        await mine.runs.recover()
        run = await mine.start("slow")
        await slow.began.wait()
        await mine.store.leases.release(mine.dependencies.worker)
        slow.began.clear()
        assert await theirs.runs.recover() == 1
        await slow.began.wait()
        slow.may_end.set()
        await mine.until_over(run)
        log = await theirs.log(run)
        await check_replay(mine, log)
        await theirs.runs.close()
    assert answer_of(log) == "call 2"
    assert len(having(log, "value_recorded")) == 1
    assert [event.run_resumed.owner for event in having(log, "run_resumed")] == ["the-other"]


async def test_a_run_that_is_being_created_while_its_worker_loses_its_lease_is_stopped_before_others_may_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, creating, may_create = Slow(), asyncio.Event(), asyncio.Event()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as mine:
        create, begin = mine.store.log.create, mine.store.leases.begin
        executed = list[int]()

        async def late(new_run: NewRun) -> None:
            await create(new_run)
            creating.set()
            await may_create.wait()

        async def noted(worker: str) -> None:
            executed.append(len(mine.executed()))
            starting.append(asyncio.create_task(mine.start("slow")))
            await asyncio.sleep(0)
            await begin(worker)

        monkeypatch.setattr(mine.store.log, "create", late)
        monkeypatch.setattr(mine.store.leases, "begin", noted)
        starting = [asyncio.create_task(mine.start("slow"))]
        await creating.wait()
        losing = asyncio.create_task(mine.runs.worker.replace_lease())
        await asyncio.sleep(0)
        may_create.set()
        await losing
        runs = [await one for one in starting]
        owners = [(await mine.store.runs.get(ME, run.run_id)).owner for run in runs]
        assert (executed, owners) == ([0], ["", mine.dependencies.worker])
        assert [live.run_id for live in mine.executed()] == [runs[1].run_id]


async def test_a_letter_that_its_dead_owner_never_read_is_carried_out_by_who_comes_next(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(
        tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()], worker="the-first"
    ) as harness:
        run = await harness.start("slow")
        await slow.began.wait()
        cancel = event_pb2.CancelRequested(
            reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="anne", note="Enough.", by_run_id="the-next"
        )
        await harness.store.mailbox.post(RunCommand(command_id=0, run_id=run.run_id, cancel=cancel))
        await harness.crash()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        check_laws(log)
        assert await harness.store.mailbox.take(run.run_id) == []
    request = having(log, "cancel_requested")[0].cancel_requested
    assert request == cancel
    assert log[-1].HasField("run_cancelled")


async def test_a_run_above_the_bound_is_accepted_and_executed_by_who_has_room(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent(), echo]) as mine:
        bounded = replace(mine, runs=Runs(replace(mine.dependencies, worker="bounded", max_live_runs=1)))
        await bounded.runs.recover()
        first = await bounded.start("slow")
        await slow.began.wait()
        second = await bounded.start("echo")
        behind = await bounded.start("echo", session_id=first.session_id, policy=QUEUE)
        assert {(await mine.store.runs.get(ME, run.run_id)).owner for run in (second, behind)} == {""}
        theirs = beside(mine, "the-other")
        await theirs.runs.recover()
        log = await bounded.log(second)
        await check_replay(mine, log)
        assert answer_of(log) == "hello"
        (resumed,) = having(log, "run_resumed")
        assert (resumed.run_resumed.owner, resumed.run_resumed.cause) == (
            "the-other",
            event_pb2.RESUME_CAUSE_TAKEOVER,
        )
        slow.may_end.set()
        assert [answer_of(await theirs.log(run)) for run in (first, behind)] == ["call 1", "hello"]
        await theirs.runs.close()
        await bounded.runs.close()


async def test_a_run_above_the_bound_waits_for_its_own_server_where_there_is_no_other(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent(), echo]) as mine:
        bounded = replace(mine, runs=Runs(replace(mine.dependencies, worker="bounded", max_live_runs=1)))
        await bounded.runs.recover()
        runs = [await bounded.start("slow") for _ in range(3)]
        await slow.began.wait()
        assert [len(bounded.executed()), slow.calls] == [1, 1]
        cancelled = await bounded.runs.cancel(ME, runs[2].run_id)
        assert cancelled.run.state == execution_pb2.EXECUTION_STATE_CANCELLED
        slow.may_end.set()
        assert [answer_of(await bounded.log(run)) for run in runs[:2]] == ["call 1", "call 2"]
        await bounded.runs.close()


async def test_runs_that_wait_for_their_session_take_no_room_of_those_that_they_wait_for(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent(), echo]) as mine:
        bounded = replace(mine, runs=Runs(replace(mine.dependencies, worker="bounded", max_live_runs=1)))
        await mine.store.leases.begin("bounded")
        first = await bounded.start("slow")
        await slow.began.wait()
        holder = await bounded.start("echo")
        theirs = replace(mine, runs=Runs(replace(mine.dependencies, worker="the-other", max_live_runs=1)))
        behind = await theirs.start("echo", session_id=holder.session_id, policy=QUEUE)
        assert {record.run_id for record in theirs.executed()} == {behind.run_id}
        await theirs.runs.recover()
        async with asyncio.timeout(10):
            assert [answer_of(await theirs.log(run)) for run in (holder, behind)] == ["hello"] * 2
        slow.may_end.set()
        assert answer_of(await bounded.log(first)) == "call 1"
        await theirs.runs.close()
        await bounded.runs.close()


async def test_a_worker_claims_no_more_runs_than_it_has_room_for(tmp_path: Path) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as mine:
        bounded = replace(mine, runs=Runs(replace(mine.dependencies, worker="bounded", max_live_runs=2)))
        await mine.store.leases.begin("bounded")
        for _ in range(2):
            await bounded.start("slow")
        runs = [await bounded.start("slow") for _ in range(4)]
        theirs = replace(mine, runs=Runs(replace(mine.dependencies, worker="the-other", max_live_runs=1)))
        await theirs.runs.recover()
        while not theirs.executed():
            await mine.store.leases.renew("the-other")  # behind all claims that are under way
        owners = [(await mine.store.runs.get(ME, run.run_id)).owner for run in runs]
        assert owners == ["the-other", "", "", ""]
        slow.may_end.set()
        async with asyncio.timeout(30):
            for run in runs:
                await theirs.log(run)
        await theirs.runs.close()
        await bounded.runs.close()


async def test_a_run_whose_former_owner_writes_until_it_is_taken_over_is_taken_over_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as mine:
        run = await mine.start("slow")
        await slow.began.wait()
        theirs = beside(mine, "the-other")
        takeover = theirs.runs.supervisor.takeover
        real, tries = takeover.continue_run, 0

        async def late(record: RunRow, *args: Any, **options: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries == 1:
                after = record.run.last_sequence
                await mine.store.log.append(run.run_id, epoch=1, log_events=records([delta()], after=after))
            return await real(record, *args, **options)

        monkeypatch.setattr(takeover, "continue_run", late)
        await mine.store.leases.release(mine.dependencies.worker)
        slow.began.clear()
        await theirs.runs.recover()
        await slow.began.wait()
        slow.may_end.set()
        log = await theirs.log(run)
        await theirs.runs.close()
    assert (tries, answer_of(log)) == (2, "call 2")


async def test_a_cancel_that_the_owner_drops_is_sent_again(tmp_path: Path) -> None:
    slow, dropped = Slow(), list[int]()
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[slow.agent()]) as mine:
        theirs = beside(mine, "the-other")

        async def drop_first() -> None:
            """Drop the first command, as an owner does that fails to carry it out, and then act as one."""
            async for run_id in mine.store.mailbox.arrivals():
                for command in await mine.store.mailbox.take(run_id):
                    dropped.append(command.command_id)
                    await mine.store.mailbox.delete_command(command.command_id)
                    return

        run = await mine.start("slow")
        await slow.began.wait()
        dropping = asyncio.create_task(drop_first())
        cancelling = asyncio.create_task(
            theirs.runs.cancel(ANNE, run.run_id, note="It takes too long.", scope=WholeTenant(tenant_id=ANNE.tenant_id))
        )
        await dropping
        await mine.runs.recover()
        await cancelling
        log = await mine.log(run)
        check_laws(log)
        await theirs.runs.close()
    assert len(dropped) == 1
    assert [event.cancel_requested.note for event in having(log, "cancel_requested")] == ["It takes too long."]
