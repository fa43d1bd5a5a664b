"""When loops are done: by a condition or by a value of the state, asked after every round."""

from pathlib import Path

import pytest

from bough.v1 import agent_pb2, event_pb2, execution_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.functions import Snapshot, condition
from bough_server.runtime.agent import Context
from tests.support.composite_agents import composite
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script


def until(*links: str | agent_pb2.AgentLink, rounds: int = 9, **condition: str) -> agent_pb2.AgentDefinition:
    """A loop with a condition: `predicate` or `state`."""
    loop = agent_pb2.LoopAgent(max_iterations=rounds, until=agent_pb2.LoopUntil(**condition))
    return composite("l", links, loop=loop)


@agent
async def counts(ctx: Context, input: message_pb2.Message) -> str:
    """Counts its rounds in the state."""
    ctx.state["count"] = ctx.state.get("count", 0) + 1
    ctx.state["review"] = {"done": ctx.state["count"] == 2}
    return f"Round {ctx.state['count']}."


async def rounds_and_reason(harness: RunHarness, log: list[event_pb2.AgentEvent]) -> tuple[int, str]:
    tree = await harness.tree(log)
    reason = execution_pb2.EndReason.Name(tree.agents[0].end_reason).removeprefix("END_REASON_")
    return len(list(having(log, "loop_iteration_started"))), reason


async def test_a_loop_ends_after_the_round_whose_condition_holds(tmp_path: Path) -> None:
    asked: list[tuple[int | None, int]] = []

    @condition
    def enough(snapshot: Snapshot) -> bool:
        asked.append((snapshot.iteration, snapshot.state["count"]))
        assert snapshot.message is None
        assert text_of(snapshot.history[-1]).startswith("For context: [counts] said: Round")
        return text_of(snapshot.input) == "Go." and bool(snapshot.state["count"] == 3)

    parts = {"code_agents": [counts], "functions": [enough]}
    async with open_team(tmp_path, script(), until("counts", predicate="enough"), **parts) as harness:
        log = await harness.turn("l", "Go.")
        assert asked == [(0, 1), (1, 2), (2, 3)]
        assert await rounds_and_reason(harness, log) == (3, "ANSWERED")
        await check_replay(harness, log)
    assert answer_of(log) == "Round 3."
    assert not any("condition" in str(event) for event in log), "nothing of it is recorded"


async def test_what_a_condition_is_shown_stays_as_it_was_when_it_was_asked(tmp_path: Path) -> None:
    kept: list[Snapshot] = []

    @condition
    def enough(snapshot: Snapshot) -> bool:
        kept.append(snapshot)
        return snapshot.iteration == 2

    parts = {"code_agents": [counts], "functions": [enough]}
    async with open_team(tmp_path, script(), until("counts", predicate="enough"), **parts) as harness:
        await harness.turn("l", "Go.")
    assert [len(snapshot.history) for snapshot in kept] == [2, 3, 4]
    assert [snapshot.state["count"] for snapshot in kept] == [1, 2, 3]


async def test_a_loop_ends_after_the_round_that_makes_a_path_true(tmp_path: Path) -> None:
    async with open_team(
        tmp_path, script(), until("counts", state_path="review.done"), code_agents=[counts]
    ) as harness:
        log = await harness.turn("l")
        assert await rounds_and_reason(harness, log) == (2, "ANSWERED")
        await check_replay(harness, log)
        again = await harness.turn("l", session_id=log[0].session_id)
        assert await rounds_and_reason(harness, again) == (9, "ITERATIONS_EXHAUSTED")
        await check_replay(harness, again)


@pytest.mark.parametrize("value", [1, "true", {"a": True}, None])
async def test_only_jsons_true_ends_it(tmp_path: Path, value: object) -> None:
    turns = script(a=[calls(call("set_state", key="done", value=value)), "Said.", "Again."])
    team = [until("a", rounds=2, state_path="done"), llm("a", tools=["set_state"])]
    async with open_team(tmp_path, turns, *team) as harness:
        assert await rounds_and_reason(harness, await harness.turn("l")) == (2, "ITERATIONS_EXHAUSTED")


async def test_it_is_asked_after_a_round_even_where_it_held_before(tmp_path: Path) -> None:
    turns = script(a=[calls(call("set_state", key="done", value=True)), "Said.", "Again."])
    team = [until("a", state_path="done"), llm("a", tools=["set_state"])]
    async with open_team(tmp_path, turns, *team) as harness:
        first = await harness.turn("l")
        second = await harness.turn("l", session_id=first[0].session_id)
        assert await rounds_and_reason(harness, second) == (1, "ANSWERED")


async def test_the_last_round_that_is_done_is_no_round_too_few(tmp_path: Path) -> None:
    async with open_team(
        tmp_path, script(), until("counts", rounds=2, state_path="review.done"), code_agents=[counts]
    ) as it:
        assert await rounds_and_reason(it, await it.turn("l")) == (2, "ANSWERED")


async def test_a_condition_that_raises_fails_its_loop_and_its_replay(tmp_path: Path) -> None:
    @condition
    def broken(snapshot: Snapshot) -> bool:
        return bool(snapshot.state["nothing"])

    team = [composite("s", ["l"], sequence=agent_pb2.SequenceAgent()), until("counts", predicate="broken")]
    async with open_team(tmp_path, script(), *team, code_agents=[counts], functions=[broken]) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    failed = next(iter(having(log, "sub_agent_failed"))).sub_agent_failed.error
    assert (failed.agent, failed.message) == ("l", "The condition 'broken' raised KeyError: 'nothing'.")
    assert log[-1].HasField("run_failed")


async def test_a_condition_that_says_otherwise_in_a_replay_is_found(tmp_path: Path) -> None:
    answers = [False, True]
    fickle = condition(name="fickle")(lambda _: answers.pop(0))
    team = [until("counts", predicate="fickle")]
    async with open_team(tmp_path, script(), *team, code_agents=[counts], functions=[fickle]) as harness:
        log = await harness.turn("l")
        answers[:] = [True]
        replayed = await harness.replay(log)
    assert "loop_iteration_started" in replayed.divergence or "l1" in replayed.divergence
