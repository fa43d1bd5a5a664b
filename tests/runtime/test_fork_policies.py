"""Forks that replace the policy: it holds from there on, and what they share is not judged by it."""

import asyncio
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from bough.v1 import error_pb2, execution_pb2, policy_pb2
from bough_server.runs.admission import RunDefaults
from tests.runtime.test_flows import FAILS
from tests.runtime.test_transfers import to, transfer
from tests.support.fork_agents import TEAM, TURNS, World, open_forked, place, run_of
from tests.support.log_readings import answer_of, check_replay, having, results_of
from tests.support.run_harness import ME
from tests.support.teams import call, calls, llm, open_team, script

ABORT = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)
BACKGROUND = policy_pb2.RunPolicy(background=True)
SOON = 2**62
"""A deadline in a hundred years."""


def within(**limits: int) -> policy_pb2.RunPolicy:
    made = policy_pb2.Limits()
    for name, limit in limits.items():
        setattr(made, name, limit)
    return policy_pb2.RunPolicy(limits=made)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_policy_replaces_the_origins_as_a_whole_under_the_servers_maxima(tmp_path: Path, world: World) -> None:
    defaults = RunDefaults(maximum=policy_pb2.Limits(tool_calls=50))
    origins = within(model_calls=9, tokens=10**6)
    async with open_team(tmp_path, TURNS, *TEAM, tools=world.tools(), defaults=defaults) as harness:
        origin = await harness.turn("p", policy=origins)
        log = await harness.log(await harness.fork(run_of(origin), 1, policy=within(tool_calls=100)))
        same = await harness.log(await harness.fork(run_of(origin), 1))
        await check_replay(harness, log)
    policy = having(log, "run_forked")[0].run_forked.policy
    assert policy == policy_pb2.RunPolicy(
        limits=policy_pb2.Limits(model_calls=500, tool_calls=50),
        on_disconnect=policy_pb2.DISCONNECT_POLICY_CANCEL,
        disconnect_grace=Duration(seconds=30),
        on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE,
    )
    assert not having(same, "run_forked")[0].run_forked.HasField("policy")


@pytest.mark.parametrize("policy", [None, BACKGROUND], ids=["the origin's", "background"])
async def test_a_background_fork_has_no_deadline(
    tmp_path: Path, world: World, policy: policy_pb2.RunPolicy | None
) -> None:
    reached, may_end = asyncio.Event(), asyncio.Event()
    is_held = False

    async def hold(agent: str, turn: int, chunk: int) -> None:
        if is_held:
            reached.set()
            await may_end.wait()

    async with open_team(tmp_path, TURNS, *TEAM, tools=world.tools(), gate=hold) as harness:
        origin = await harness.turn("p")
        is_held = True
        fork = await harness.fork(run_of(origin), 1, policy=policy, deadline_time_ns=SOON)
        await reached.wait()
        row = (await harness.runs.get(ME, fork.run_id)).run
        may_end.set()
        log = await harness.log(fork)
        ended = (await harness.runs.get(ME, fork.run_id)).run
    forked = having(log, "run_forked")[0].run_forked
    is_background = policy is not None
    assert forked.HasField("deadline_time") is not is_background
    assert row.HasField("deadline_time") is fork.HasField("deadline_time") is not is_background
    assert ended.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


async def test_the_fork_of_a_background_run_may_have_a_deadline_again(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p", policy=BACKGROUND)
        late = await harness.log(
            await harness.fork(run_of(origin), 1, policy=within(model_calls=9), deadline_time_ns=1)
        )
        same = await harness.log(await harness.fork(run_of(origin), 1, deadline_time_ns=1))
        await check_replay(harness, late)
    assert late[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert answer_of(same) == "Done."


async def test_a_failure_in_what_is_shared_is_judged_by_the_policy_of_then(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="one")), calls(call("call_c", message="two")), "Done."], c=[FAILS])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), llm("c")) as harness:
        origin = await harness.turn("p")
        assert answer_of(origin) == "Done."
        (first, _) = having(origin, "sub_agent_failed")
        for cut in range(1, len(origin)):
            log = await harness.log(await harness.fork(run_of(origin), cut, policy=ABORT))
            await check_replay(harness, log)
            failed = having(log, "sub_agent_failed")
            if cut < first.sequence:
                assert len(failed) == 1, "the first failure aborts"
            if cut < having(origin, "sub_agent_failed")[1].sequence:
                assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
            else:
                assert answer_of(log) == "Done."
            again = await harness.log(await harness.fork(run_of(log), len(log) - 1))
            assert again[-1].WhichOneof("payload") == log[-1].WhichOneof("payload"), "a fork has its origin's policy"


async def test_limits_below_what_is_shared_refuse_only_what_follows(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        nothing = within(model_calls=0, tool_calls=0, transfers=0, depth=0)
        for cut in range(1, len(origin)):
            log = await harness.log(await harness.fork(run_of(origin), cut, policy=nothing))
            await check_replay(harness, log)
            if cut < having(origin, "llm_started")[-1].sequence:
                assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
            else:
                assert answer_of(log) == "Done."


async def test_transfers_in_what_is_shared_count_and_are_not_refused(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"))], b=[calls(transfer("c"))], c=["From c."])
    team = (llm("a", links=[to("b")]), llm("b", links=[to("c")]), llm("c"))
    async with open_team(tmp_path, turns, *team) as harness:
        origin = await harness.turn("a")
        for limit in (0, 1):
            cut = place(origin, "sub_agent_started")
            log = await harness.log(await harness.fork(run_of(origin), cut, policy=within(transfers=limit)))
            await check_replay(harness, log)
            assert len(having(log, "agent_transferred")) == 1
            assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED


async def test_a_fork_that_is_lost_goes_on_under_its_own_policy(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="one")), calls(call("call_c", message="two")), "Done."], c=[FAILS])
    reached = asyncio.Event()
    is_held = False

    async def hold(agent: str, turn: int, chunk: int) -> None:
        if is_held and agent == "p" and turn == 1:
            reached.set()
            await asyncio.Event().wait()

    team = (llm("p", links=["c"]), llm("c"))
    async with open_team(tmp_path, turns, *team, gate=hold) as harness:
        origin = await harness.turn("p")
        is_held = True
        cut = place(origin, "sub_agent_failed") + 1
        fork = await harness.fork(run_of(origin), cut, policy=ABORT)
        await reached.wait()
        await harness.crash()
    async with open_team(tmp_path, turns, *team) as harness:
        await harness.runs.recover()
        log = await harness.log(fork)
        await check_replay(harness, log)
    assert len(having(log, "sub_agent_failed")) == 2
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert len(results_of(log)) == 2
