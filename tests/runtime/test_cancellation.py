"""Cancelling: at once, twice, too late, with threads and parallel children; every open thing is ended once."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2, policy_pb2, usage_pb2
from bough_server.agents.function import agent
from bough_server.errors import NotFound
from bough_server.identity import Principal, WholeTenant
from bough_server.log import events
from bough_server.runtime.agent import Context
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.sql.writer import CommitHooks
from bough_server.tools.tool import tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of
from tests.support.run_harness import ME, RunHarness, names
from tests.support.teams import call, calls, llm, open_team, script

PASSTHROUGH = policy_pb2.RunPolicy(deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()))
ABORT = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)


async def forever() -> None:
    await asyncio.Event().wait()


class Hold:
    """A gate that holds agents' models at a piece and says when they are there."""

    def __init__(self, *agents: str, chunk: int = 0) -> None:
        self._chunk = chunk
        self.reached = {name: asyncio.Event() for name in agents}

    async def __call__(self, agent: str, turn: int, chunk: int) -> None:
        if agent in self.reached and chunk == self._chunk:
            self.reached[agent].set()
            await forever()

    async def all_reached(self) -> None:
        for event in self.reached.values():
            await event.wait()


async def test_a_run_is_cancelled_once_however_often_it_is_asked(tmp_path: Path) -> None:
    hold = Hold("p")
    async with open_team(tmp_path, script(p=["never"]), llm("p"), gate=hold) as harness:
        run = await harness.start("p")
        await hold.all_reached()
        await asyncio.gather(*(harness.runs.cancel(ME, run.run_id) for _ in range(3)))
        log = await harness.log(run)
        again = await harness.runs.cancel(ME, run.run_id)
        await check_replay(harness, log)
    assert len(having(log, "cancel_requested")) == 1
    assert again.run.state == execution_pb2.EXECUTION_STATE_CANCELLED
    assert again.run.last_sequence == len(log)


async def test_a_cancelled_run_says_why_and_who_asked_for_it(tmp_path: Path) -> None:
    hold = Hold("c")
    turns = script(p=[calls(call("call_c", message="x"))], c=["never"])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), llm("c"), gate=hold) as harness:
        run = await harness.start("p")
        await hold.all_reached()
        anne = Principal(tenant_id=ME.tenant_id, user_id="anne")
        await harness.runs.cancel(anne, run.run_id, note="Wrong file.", scope=WholeTenant(tenant_id=ME.tenant_id))
        log = await harness.log(run)
        await check_replay(harness, log)
    assert having(log, "cancel_requested")[0].cancel_requested == event_pb2.CancelRequested(
        reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="anne", note="Wrong file."
    )
    assert having(log, "sub_agent_failed")[0].sub_agent_failed.cancel_reason == execution_pb2.CANCEL_REASON_CALLER
    assert log[-1].run_cancelled.cancel_reason == execution_pb2.CANCEL_REASON_CALLER


async def test_what_is_below_a_run_whose_deadline_passed_is_cancelled_for_that(tmp_path: Path) -> None:
    hold = Hold("c")
    clock = HeldClock()
    turns = script(p=[calls(call("call_c", message="x"))], c=["never"])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), llm("c"), gate=hold, clock=clock) as harness:
        run = await harness.start("p", deadline_time_ns=clock.now_ns() + 10**8)
        await hold.all_reached()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert having(log, "sub_agent_failed")[0].sub_agent_failed.cancel_reason == execution_pb2.CANCEL_REASON_DEADLINE
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert having(log, "cancel_requested")[0].cancel_requested.requested_by == ""


async def test_cancelling_a_run_that_has_ended_changes_nothing(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=["Done."]), llm("p")) as harness:
        log = await harness.turn("p")
        record = await harness.runs.cancel(ME, log[0].run_id)
        assert await harness.log(record.run) == log
    assert record.run.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


async def test_another_tenants_run_is_not_found_by_a_cancellation(tmp_path: Path) -> None:
    hold = Hold("p")
    async with open_team(tmp_path, script(p=["never"]), llm("p"), gate=hold) as harness:
        run = await harness.start("p")
        await hold.all_reached()
        with pytest.raises(NotFound):
            await harness.runs.cancel(Principal(tenant_id="other", user_id="other"), run.run_id)
        assert (await harness.runs.get(ME, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_RUNNING


async def test_a_cancellation_is_durable_when_it_is_answered(tmp_path: Path) -> None:
    hold = Hold("p")
    async with open_team(tmp_path, script(p=["never"]), llm("p"), gate=hold) as harness:
        run = await harness.start("p")
        await hold.all_reached()
        record = await harness.runs.cancel(ME, run.run_id)
        stored = await harness.store.log.read(run.run_id)
    assert events.CANCEL_REQUESTED in {event.kind for event in stored}
    assert record.run.last_sequence >= 3


async def test_a_run_whose_time_is_up_before_it_begins_ends_by_it(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=["never"]), llm("p")) as harness:
        run = await harness.start("p", deadline_time_ns=time.time_ns() - 1)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert having(log, "cancel_requested")[0].cancel_requested.reason == execution_pb2.CANCEL_REASON_DEADLINE


async def test_no_delta_follows_a_cancellation(tmp_path: Path) -> None:
    """A model that has its next piece ready when the run is sealed, in the very turn of the loop."""
    harnesses: list[RunHarness] = []
    begun = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if chunk == 1:
            begun.set()
            (live,) = harnesses[0].executed()
            while not live.execution.cancellation.is_closed(""):  # noqa: ASYNC110 # the very turn of the loop is wanted
                await asyncio.sleep(0)

    turns = script(p=[{"chunks": ["One ", "two ", "three ", "four."]}])
    async with open_team(tmp_path, turns, llm("p"), gate=gate) as harness:
        harnesses.append(harness)
        run = await harness.start("p", policy=PASSTHROUGH)
        await begun.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert names(log)[2:] == [
        "p: llm.output_text.delta",
        "p: control.cancel_requested",
        "p: llm.failed",
        "p: step.failed",
        "p: run.cancelled",
    ]


async def test_tools_in_threads_do_not_hold_a_cancelled_run(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    inside, release = asyncio.Event(), threading.Event()

    @tool
    def stuck() -> str:
        """Hangs in a thread."""
        loop.call_soon_threadsafe(inside.set)
        release.wait(30)
        return "too late"

    turns = script(p=[calls(call("stuck"), call("stuck")), "never"])
    async with open_team(tmp_path, turns, llm("p", tools=["stuck"]), tools=[stuck]) as harness:
        run = await harness.start("p")
        await inside.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        release.set()
        await check_replay(harness, log)
        assert await harness.log(run) == log
    assert [result.error.reason for result in results_of(log)] == [error_pb2.ERROR_REASON_CANCELLED] * 2
    assert events.name_of(log[-1]) == "agent.run.cancelled"


FAN = script(
    p=[calls(call("call_a", message="a"), call("call_b", message="b"), call("call_c", message="c")), "Done."],
    a=["from a"],
    b=["from b"],
    c=["from c"],
)


async def test_a_cancelled_run_ends_children_at_once_and_keeps_what_had_ended(tmp_path: Path) -> None:
    hold = Hold("b", "c")
    team = (llm("p", links=["a", "b", "c"]), llm("a"), llm("b"), llm("c"))
    async with open_team(tmp_path, FAN, *team, gate=hold) as harness:
        run = await harness.start("p")
        log = []
        async for event in harness.follow(run):
            log.append(event)
            if event.agent == "p" and event.HasField("tool_completed"):
                await hold.all_reached()
                await harness.runs.cancel(ME, run.run_id)
        tree = await harness.tree(log)
        await check_replay(harness, log)
    step = having(log, "step_failed")[-1].step_failed.step
    reasons = [result.error.reason for result in step.tool_results]
    assert reasons == [0, error_pb2.ERROR_REASON_CANCELLED, error_pb2.ERROR_REASON_CANCELLED]
    states = {one.name: one.state for one in tree.agents}
    assert states == {
        "p": execution_pb2.EXECUTION_STATE_CANCELLED,
        "a": execution_pb2.EXECUTION_STATE_SUCCEEDED,
        "b": execution_pb2.EXECUTION_STATE_CANCELLED,
        "c": execution_pb2.EXECUTION_STATE_CANCELLED,
    }


async def test_a_sibling_that_fails_while_another_is_being_ended_leaves_nothing_open(tmp_path: Path) -> None:
    """a aborts p and ends b first; c fails meanwhile and would abort p as well."""
    b_waits, b_is_ended = asyncio.Event(), asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "a":
            await b_waits.wait()
        if agent == "b":
            b_waits.set()
            try:
                await forever()
            finally:
                b_is_ended.set()
        if agent == "c":
            await b_is_ended.wait()

    failing = {"text": "x", "error": {"reason": "UNAVAILABLE", "after_chunks": 1}}
    turns = script(
        p=[calls(call("call_a", message="a"), call("call_b", message="b"), call("call_c", message="c")), "never"],
        a=[failing],
        b=["never"],
        c=[failing],
    )
    team = (llm("p", links=["a", "b", "c"]), llm("a"), llm("b"), llm("c"))
    async with open_team(tmp_path, turns, *team, gate=gate) as harness:
        log = await harness.turn("p", policy=ABORT)
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert len(results_of(log)) == 3


async def test_a_child_that_ends_in_the_moment_its_time_is_up_leaves_its_caller_going(tmp_path: Path) -> None:
    clock, answer = HeldClock(), asyncio.Event()

    @agent(description="Answers when it is told to.")
    async def slow(ctx: Context, input: message_pb2.Message) -> str:
        await answer.wait()
        return "just in time"

    link = agent_pb2.AgentLink(agent="slow")
    link.limits.wall_duration.FromSeconds(5)
    turns = script(p=[calls(call("call_slow", message="go")), "Going on."])
    async with open_team(tmp_path, turns, llm("p", links=[link]), code_agents=[slow], clock=clock) as harness:
        run = await harness.start("p")
        assert await clock.next_sleep() == 5
        answer.set()
        clock.advance(5)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Going on."


async def test_a_run_that_is_cancelled_in_the_moment_it_is_accepted_ends(tmp_path: Path) -> None:
    hold = Hold("p")
    is_open, accepted, released = threading.Event(), threading.Event(), threading.Event()

    def committed() -> None:
        if is_open.is_set():
            accepted.set()
            released.wait(30)

    hooks = CommitHooks(after=committed)
    async with open_team(tmp_path, script(p=["never"]), llm("p"), gate=hold, hooks=hooks) as harness:
        is_open.set()
        starting = asyncio.create_task(harness.start("p"))
        await asyncio.to_thread(accepted.wait)
        (run,), _ = await harness.store.runs.list(ME, RunFilter(), Page(size=2))
        cancelling = asyncio.create_task(harness.runs.cancel(ME, run.run_id))
        for _ in range(3):
            await harness.runs.get(ME, run.run_id)
        released.set()
        await cancelling
        log = await harness.log(await starting)
        await check_replay(harness, log)
    assert log[-1].HasField("run_cancelled")
    assert len(having(log, "cancel_requested")) == 1


async def test_a_cancelled_model_call_is_charged_what_its_provider_had_said(tmp_path: Path) -> None:
    hold = Hold("p", chunk=1)
    turns = script(p=[{"chunks": ["One ", "two."], "usage": {"input_tokens": 7, "output_tokens": 2}}])
    async with open_team(tmp_path, turns, llm("p"), gate=hold) as harness:
        run = await harness.start("p")
        await hold.all_reached()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        (entry,) = await harness.store.usage.list_for_run(run.run_id)
        await check_replay(harness, log)
    (failed,) = having(log, "llm_failed")
    assert (entry.sequence, entry.usage.input_tokens, entry.usage.output_tokens) == (failed.sequence, 7, 2)
    used = log[-1].run_cancelled.tree_usage
    assert (used.model_calls, used.model_calls_without_usage, used.input_tokens) == (1, 0, 7)


async def test_a_model_call_that_is_cancelled_before_its_first_attempt_was_not_sent(tmp_path: Path) -> None:
    begun, released = threading.Event(), threading.Event()
    commits = iter(range(100))

    def before() -> None:
        if next(commits) == 2:  # after those of the worker's lease and of the run's start
            begun.set()
            released.wait(30)

    hooks = CommitHooks(before=before)
    async with open_team(tmp_path, script(p=["never"]), llm("p"), hooks=hooks) as harness:
        run = await harness.start("p")
        live = harness.live(run.run_id)
        assert live is not None
        await asyncio.to_thread(begun.wait)
        cancelling = asyncio.create_task(harness.runs.cancel(ME, run.run_id))
        while not live.is_over:  # reads go on while the commit is held; the timeout of the test ends a wait in vain
            await harness.runs.get(ME, run.run_id)
        released.set()
        await cancelling
        log = await harness.log(run)
        entries = await harness.store.usage.list_for_run(run.run_id)
        await check_replay(harness, log)
    (failed,) = having(log, "llm_failed")
    assert (having(log, "llm_started") != [], failed.llm_failed.not_sent, list(entries)) == (True, True, [])
    assert log[-1].run_cancelled.usage == usage_pb2.Usage()
