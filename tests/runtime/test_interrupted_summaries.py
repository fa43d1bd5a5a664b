"""A summary that is being made when something happens to its run: a cancel, a limit, a fork, lanes beside it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.models.model import ModelRequest
from bough_server.models.tokens import request_tokens
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import Overheard, call, calls, llm, open_team, script

LONG = "word " * 80
POLICY = agent_pb2.HistoryPolicy(summarize=agent_pb2.Summarization(max_tokens=300))
TALK = script(**{"p": [f"answer {LONG}"], "p.summary": ["It was about words."]})


def summarizing(name: str = "p") -> agent_pb2.AgentDefinition:
    definition = llm(name)
    definition.history.CopyFrom(POLICY)
    return definition


async def past(harness: RunHarness, name: str = "p") -> str:
    """A session with a turn in it."""
    log = await harness.turn(name, f"0 {LONG}")
    return log[0].session_id


@pytest.mark.parametrize("chunk", [0, 2])
async def test_a_cancel_ends_a_summary_s_call_and_leaves_none(tmp_path: Path, chunk: int) -> None:
    arrived = asyncio.Event()

    async def gate(agent: str, turn: int, number: int) -> None:
        if agent == "p.summary" and number == chunk:
            arrived.set()
            await asyncio.Event().wait()

    async with open_team(tmp_path, TALK, summarizing(), gate=gate) as harness:
        session_id = await past(harness)
        run = await harness.start("p", f"1 {LONG}", session_id=session_id)
        await arrived.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        await check_replay(harness, log)
        messages = await harness.messages(session_id)
    assert log[-1].HasField("run_cancelled")
    assert [(event.effect_key, event.step_id) for event in having(log, "llm_failed")] == [("s0.compact", "")]
    assert not having(log, "step_failed")
    assert message_pb2.MESSAGE_KIND_SUMMARY not in {one.message.kind for one in messages}


async def test_a_summary_that_was_under_way_is_gone_on_with_however_its_history_is_counted_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = asyncio.Event()
    scale = 10

    async def count_tokens(_: Overheard, request: ModelRequest) -> int | None:
        return request_tokens(request) * scale

    async def gate(agent: str, turn: int, number: int) -> None:
        if agent == "p.summary":
            arrived.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(Overheard, "count_tokens", count_tokens, raising=False)
    definition = summarizing()
    definition.history.summarize.max_tokens = 2500
    async with open_team(tmp_path, TALK, definition, gate=gate) as harness:
        session_id = await past(harness)
        run = await harness.start("p", f"1 {LONG}", session_id=session_id)
        await arrived.wait()
        await harness.crash()
    scale = 1
    async with open_team(tmp_path, TALK, definition) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    [made] = having(log, "history_compacted")
    assert [event.llm_retrying.reason for event in having(log, "llm_retrying")] == [event_pb2.RETRY_REASON_RECOVERED]
    assert made.history_compacted.summary.summary_range.to_position == 2


async def test_a_summary_is_a_model_call_of_its_run_s_limits(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, TALK, summarizing(), heard=heard) as harness:
        session_id = await past(harness)
        one = policy_pb2.RunPolicy(limits=policy_pb2.Limits(model_calls=1))
        refused = await harness.turn("p", f"1 {LONG}", session_id=session_id, policy=one)
        none = policy_pb2.RunPolicy(limits=policy_pb2.Limits(model_calls=0))
        unmade = await harness.turn("p", f"2 {LONG}", session_id=session_id, policy=none)
        for log in (refused, unmade):
            await check_replay(harness, log)
    assert [request.agent for request in heard] == ["p", "p.summary"]
    assert refused[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert [event.effect_key for event in having(refused, "history_compacted")] == ["s0.compact"]
    assert [event.effect_key for event in having(refused, "llm_failed")] == ["s0.m"]
    assert [event.effect_key for event in having(unmade, "llm_failed")][-1:] == ["s0.m"]


async def test_a_fork_behind_a_summary_goes_on_with_it_and_one_before_it_makes_its_own(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, TALK, summarizing(), heard=heard) as harness:
        session_id = await past(harness)
        log = await harness.turn("p", f"1 {LONG}", session_id=session_id)
        [made] = having(log, "history_compacted")
        run = await harness.runs.get(ME, log[0].run_id)
        del heard[:]
        behind = await harness.log(await harness.fork(run.run, made.sequence))
        assert [request.agent for request in heard] == ["p"]
        before = await harness.log(await harness.fork(run.run, 1))
        assert [request.agent for request in heard] == ["p", "p.summary", "p"]
        answers = await harness.log(await harness.fork(run.run, made.sequence - 1))
        assert [request.agent for request in heard[3:]] == ["p"], "the summary is made of the answer that is there"
        for fork in (behind, before, answers):
            await check_replay(harness, fork)
            [again] = having(fork, "history_compacted")
            assert again.history_compacted.summary.parts == made.history_compacted.summary.parts
            kinds = [one.message.kind for one in await harness.messages(fork[0].session_id)]
            assert kinds.count(message_pb2.MESSAGE_KIND_SUMMARY) == 1
            assert [one.message.position for one in await harness.messages(fork[0].session_id)] == [1, 2, 3, 4, 5]


async def test_lanes_of_code_each_have_a_summary_of_what_they_see(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []

    async def speak(own: Context) -> str:
        response = await own.model(lambda: ModelRequest(messages=own.history()))
        answer = text_of(response.message)
        said = own.history()
        assert ("For context: a summary" in text_of(said[0])) is any("summary" in text_of(one) for one in said)
        return answer

    @agent(name="code", description="Asks twice at once, then once more.")
    async def code(ctx: Context, input: message_pb2.Message) -> str:
        both = await ctx.gather(speak, speak)
        return " ".join([*both, await speak(ctx)])

    code.definition.history.CopyFrom(POLICY)
    turns = script(**{"code": ["Yes."], "code.summary": ["All about words."], "p": [f"answer {LONG}"]})
    async with open_team(tmp_path, turns, llm("p"), code_agents=[code], heard=heard) as harness:
        session_id = await past(harness)
        await harness.turn("p", f"more {LONG}", session_id=session_id)
        log = await harness.turn("code", "Go.", session_id=session_id)
        await check_replay(harness, log)
    assert answer_of(log) == "Yes. Yes. Yes."
    made = sorted(event.effect_key for event in having(log, "history_compacted"))
    assert made == ["e0.0/s0.compact", "e0.1/s0.compact"], "what lanes have summarized serves who joined them"
    assert [request.agent for request in heard if request.agent.startswith("code")].count("code.summary") == 2


async def test_lanes_of_code_begin_with_the_summary_that_stood_when_they_forked(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    @tool
    def look(what: str) -> str:
        """Looks something up."""
        return LONG

    async def see(own: Context) -> None:
        seen.append([text_of(message) for message in own.history()])

    @agent(name="code", description="Looks again and again, then asks twice at once.", tools=["look"])
    async def code(ctx: Context, input: message_pb2.Message) -> str:
        for _ in range(4):
            response = await ctx.model(lambda: ModelRequest(messages=ctx.history(), tools=ctx.offers()))
            await ctx.tools([part.tool_call for part in response.message.parts])
        await see(ctx)
        await ctx.gather(see, see)
        return "Seen."

    code.definition.history.CopyFrom(POLICY)
    turns = script(**{"code": [calls(call("look", what="leaf"))] * 4, "code.summary": ["All about words."]})
    async with open_team(tmp_path, turns, code_agents=[code], tools=[look]) as harness:
        log = await harness.turn("code", "Go.")
        await check_replay(harness, log)
    assert having(log, "history_compacted")
    assert seen[0][0].startswith("For context: a summary")
    assert seen[:3] == [seen[0]] * 3


def sent(log: Sequence[event_pb2.AgentEvent]) -> list[str]:
    return [event.effect_key for event in having(log, "llm_started")]


async def test_a_model_call_without_a_bound_is_preceded_by_nothing(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=[calls(), "Done."]), llm("p")) as harness:
        log = await harness.turn("p")
    assert [key.rpartition(".")[2] for key in sent(log)] == ["m", "m"]
