"""Histories that are more than a model takes: what its requests hold, what is recorded, and what later runs see."""

import json
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2
from bough_server.models.model import ModelRequest
from bough_server.models.tokens import request_tokens
from bough_server.tools.tool import tool
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.run_harness import RunHarness, names
from tests.support.teams import call, calls, llm, open_team, script

LONG = "word " * 80
"""About 100 tokens."""


def window(max_tokens: int, reserve: int = 0) -> agent_pb2.HistoryPolicy:
    return agent_pb2.HistoryPolicy(
        sliding_window=agent_pb2.SlidingWindow(max_tokens=max_tokens, reserve_tokens=reserve)
    )


def summarize(max_tokens: int, *, keep_recent_exchanges: int | None = None, model: str = "") -> agent_pb2.HistoryPolicy:
    made = agent_pb2.Summarization(max_tokens=max_tokens, keep_recent_exchanges=keep_recent_exchanges, model=model)
    return agent_pb2.HistoryPolicy(summarize=made)


def with_history(definition: agent_pb2.AgentDefinition, policy: agent_pb2.HistoryPolicy) -> agent_pb2.AgentDefinition:
    definition.history.CopyFrom(policy)
    return definition


def told(request: ModelRequest) -> list[str]:
    return [text_of(message) for message in request.messages]


async def talk(harness: RunHarness, agent: str, *said: str) -> list[list[event_pb2.AgentEvent]]:
    """Turns of one session; each keeps the laws and replays."""
    logs: list[list[event_pb2.AgentEvent]] = []
    for text in said:
        logs.append(await harness.turn(agent, text, session_id=logs[0][0].session_id if logs else ""))
        await check_replay(harness, logs[-1])
    return logs


ANSWERS = script(
    **{"p": [{"text": f"answer {LONG}", "usage": {"input_tokens": 9}}], "p.summary": ["It was about words."]}
)


async def test_a_window_leaves_out_the_oldest_exchanges_whole(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, ANSWERS, with_history(llm("p"), window(500, 100)), heard=heard) as harness:
        logs = await talk(harness, "p", *(f"{number} {LONG}" for number in range(5)))
    assert [len(request.messages) for request in heard] == [1, 3, 3, 3, 3]
    assert all(request_tokens(request) <= 400 for request in heard)
    assert [text[0] for text in told(heard[-1])] == ["3", "a", "4"]
    assert not having(logs[-1], "history_compacted")


async def test_without_overflow_everything_is_sent(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, ANSWERS, llm("p"), heard=heard) as harness:
        await talk(harness, "p", *(f"{number} {LONG}" for number in range(4)))
    assert [len(request.messages) for request in heard] == [1, 3, 5, 7]


async def test_what_alone_is_too_long_is_sent_as_it_is(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, ANSWERS, with_history(llm("p"), window(100)), heard=heard) as harness:
        await talk(harness, "p", "short", LONG * 5)
    assert told(heard[-1]) == [LONG * 5]


async def test_the_oldest_exchanges_are_summarized_once_and_the_summary_goes_on(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, ANSWERS, with_history(llm("p"), summarize(500)), heard=heard) as harness:
        logs = await talk(harness, "p", *(f"{number} {LONG}" for number in range(4)))
        messages = [one.message for one in await harness.messages(logs[0][0].session_id)]
        ledger = await harness.store.usage.list_for_run(logs[2][0].run_id)
        tree = await harness.tree(logs[2], include_steps=True)
    assert [request.agent for request in heard] == ["p", "p", "p.summary", "p", "p"]
    assert [line for line in names(logs[2]) if "delta" not in line] == [
        "p: run.started",
        "p: llm.started",
        "p: llm.completed",
        "p: control.history_compacted",
        "p: llm.started",
        "p: llm.completed",
        "p: step.completed",
        "p: run.completed",
    ]
    compacted = having(logs[2], "history_compacted")[0]
    assert (compacted.effect_key, compacted.step_id) == ("s0.compact", "")
    assert [event.step_id for event in logs[2][1:3]] == ["", ""]
    assert compacted.history_compacted.summary.summary_range == message_pb2.SummaryRange(
        from_position=1, to_position=4, scope=message_pb2.HISTORY_SCOPE_SESSION
    )
    assert compacted.history_compacted.run_message_count == 0
    summary = "For context: a summary of the conversation so far: It was about words."
    assert [text[0] for text in told(heard[3])] == ["F", "2"]
    assert told(heard[3])[0] == summary
    assert [text[0] for text in told(heard[4])] == ["F", "2", "a", "3"]
    assert [message_pb2.MessageKind.Name(one.kind)[13:] for one in messages[4:7]] == ["USER", "SUMMARY", "ASSISTANT"]
    assert messages[5].summary_range == compacted.history_compacted.summary.summary_range
    assert (messages[5].author, text_of(messages[5]), messages[5].position) == ("p", "It was about words.", 6)
    assert tree.agents[0].step_count == 1
    assert tree.agents[0].usage.model_calls == 2
    assert sorted(entry.usage.model_calls_without_usage for entry in ledger) == [0, 1]
    assert len(tree.steps) == 1


async def test_a_summary_is_charged_to_whom_it_is_made_for_and_at_its_own_model_s_price(tmp_path: Path) -> None:
    turns = script(**{"p": [LONG], "p.summary": [{"text": "Short.", "usage": {"input_tokens": 5, "output_tokens": 2}}]})
    async with open_team(tmp_path, turns, with_history(llm("p"), summarize(250, model="cheap"))) as harness:
        logs = await talk(harness, "p", f"1 {LONG}", f"2 {LONG}")
        ledger = await harness.store.usage.list_for_run(logs[1][0].run_id)
    assert [(entry.agent, entry.model, entry.usage.cost_nanos, entry.sequence) for entry in ledger] == [
        ("p", "cheap", 9_000, 3),
        ("p", "default", 0, 9),
    ]
    assert having(logs[1], "llm_started")[0].llm_started.model == "cheap"
    assert logs[1][-1].run_completed.usage.model_calls == 2
    assert logs[1][-1].run_completed.usage.input_tokens == 5


async def test_the_next_summary_is_made_of_the_last_one_and_what_came_after_it(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, ANSWERS, with_history(llm("p"), summarize(500)), heard=heard) as harness:
        logs = await talk(harness, "p", *(f"{number} {LONG}" for number in range(8)))
    asked = [text_of(request.messages[0]) for request in heard if request.agent == "p.summary"]
    assert len(asked) == 3
    assert "a summary of the conversation so far: It was about words." in asked[1]
    assert "[user] 2 word" in asked[1]
    assert "[user] 0 word" not in asked[1]
    made = [event.history_compacted for log in logs for event in having(log, "history_compacted")]
    stood_for = [one.summary.summary_range for one in made]
    assert [(one.from_position, one.to_position) for one in stood_for] == [(1, 4), (1, 9), (1, 14)]


async def test_a_failing_summary_fails_no_agent(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    fault = {"text": "x", "error": {"reason": "UNAVAILABLE", "usage": {"input_tokens": 2}}}
    turns = script(**{"p": [f"answer {LONG}"], "p.summary": [fault]})
    async with open_team(tmp_path, turns, with_history(llm("p"), summarize(300)), heard=heard) as harness:
        logs = await talk(harness, "p", *(f"{number} {LONG}" for number in range(3)))
        ledger = await harness.store.usage.list_for_run(logs[2][0].run_id)
    assert answer_of(logs[2]).startswith("answer")
    assert [text[0] for text in told(heard[-1])] == ["2"]
    assert not having(logs[2], "history_compacted")
    failed = having(logs[2], "llm_failed")[0]
    assert (failed.effect_key, failed.llm_failed.error.reason) == (
        "s0.compact",
        error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
    )
    answered = having(logs[2], "llm_completed")[0]
    assert [entry.sequence for entry in ledger] == [failed.sequence, answered.sequence]


async def test_a_request_that_cannot_be_made_is_the_failure_of_its_call(tmp_path: Path) -> None:
    broken = with_history(llm("p"), window(100))
    broken.llm.instruction = "You know {{state.nothing}}."
    async with open_team(tmp_path, ANSWERS, broken) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert [event.effect_key for event in having(log, "llm_failed")] == ["s0.m"]


async def test_a_summary_that_says_nothing_is_none(tmp_path: Path) -> None:
    turns = script(**{"p": [f"answer {LONG}"], "p.summary": [""]})
    async with open_team(tmp_path, turns, with_history(llm("p"), summarize(300))) as harness:
        logs = await talk(harness, "p", f"0 {LONG}", f"1 {LONG}", f"2 {LONG}")
    assert not any(having(log, "history_compacted") for log in logs)
    assert answer_of(logs[2]).startswith("answer")


async def test_a_bound_below_what_a_summary_is_asked_with_leaves_out_and_asks_for_none(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, ANSWERS, with_history(llm("p"), summarize(10)), heard=heard) as harness:
        logs = await talk(harness, "p", "0", "1")
    assert [(request.agent, told(request)) for request in heard] == [("p", ["0"]), ("p", ["1"])]
    assert not having(logs[1], "history_compacted")


async def test_other_agents_see_no_summaries_and_go_on_seeing_what_they_stand_for(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(
        **{"p": [calls(call("call_c", message="c, now.")), f"answer {LONG}"], "p.summary": ["Short."], "c": ["c says"]}
    )
    team = (with_history(llm("p", links=["c"]), summarize(500)), llm("c"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        logs = await talk(harness, "p", *(f"{number} {LONG}" for number in range(3)))
    assert having(logs[2], "history_compacted")
    seen = [told(request) for request in heard if request.agent == "c"][-1]
    assert not [text for text in seen if "summary" in text or text == "Short."]
    assert [text[0] for text in seen if text[0].isdigit()] == ["0", "1", "2"]


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what}: {LONG}"


def _looking(count: int) -> list[object]:
    return [calls(call("look", what=f"leaf {number}")) for number in range(count)]


async def test_within_a_run_older_steps_go_and_what_was_told_stays(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    seen = script(p=[*_looking(2), "Done."])
    policy = window(400)
    async with open_team(
        tmp_path, seen, with_history(llm("p", tools=["look"]), policy), tools=[look], heard=heard
    ) as harness:
        log = await harness.turn("p", "Look at all.")
        await check_replay(harness, log)
    for request in heard:
        assert told(request)[0] == "Look at all."
        asked = [part.tool_call.call_id for one in request.messages for part in one.parts if part.tool_call.call_id]
        given = [part.tool_result.call.call_id for one in request.messages for part in one.parts]
        assert asked == [call_id for call_id in given if call_id]


async def test_steps_of_a_run_are_summarized_and_stay_so_for_their_invocation(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    first = calls(call("look", what="leaf"), call("look", what="bark"))
    turns = script(**{"p": [first, *_looking(1), "Done."], "p.summary": ["All is red."]})
    team = with_history(llm("p", tools=["look"], max_steps=3), summarize(350))
    async with open_team(tmp_path, turns, team, tools=[look], heard=heard) as harness:
        log = await harness.turn("p", "Look at all.")
        await check_replay(harness, log)
        session = await harness.messages(log[0].session_id)
    stood_for = [event.history_compacted for event in having(log, "history_compacted")]
    assert [(one.summary.summary_range.to_position, one.run_message_count) for one in stood_for][:1] == [(0, 4)]
    after = [request for request in heard if any("All is red." in text for text in told(request))]
    assert told(after[0])[:2] == ["For context: a summary of the conversation so far: All is red.", "Look at all."]
    assert [one.message.position for one in session] == list(range(1, len(session) + 1))
    assert "tool" in text_of(heard[2].messages[0])


async def test_a_branch_s_summary_is_not_for_who_sees_the_whole_session(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    branch = summarize(250)
    branch.scope = message_pb2.HISTORY_SCOPE_BRANCH
    turns = script(
        **{
            "p": [
                {"when": "narrow", "calls": [call("call_c", message=f"c, {LONG}")]},
                {"when": "narrow", "text": "Done."},
            ],
            "c": [f"c says {LONG}"],
            "c.summary": ["c's own."],
        }
    )
    team = (llm("p", links=[agent_pb2.AgentLink(agent="c", history=branch)]), with_history(llm("c"), summarize(4000)))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        logs = await talk(harness, "p", "narrow 0", "narrow 1", "narrow 2")
        await talk_on(harness, "c", logs[0][0].session_id)
    assert any(having(log, "history_compacted") for log in logs)
    shown = [told(request) for request in heard if request.agent == "c"]
    assert any("c's own." in text for text in shown[-2])
    assert not any("c's own." in text for text in shown[-1])


async def talk_on(harness: RunHarness, agent: str, session_id: str) -> None:
    log = await harness.turn(agent, "And you?", session_id=session_id)
    await check_replay(harness, log)


@pytest.mark.parametrize("is_once", [True, False])
async def test_a_summary_made_earlier_in_a_run_serves_later_invocations_of_its_agent(
    tmp_path: Path, is_once: bool
) -> None:
    """Of another agent of the same run it does not."""
    turns = {
        "p": [
            {"when": "first", "text": f"long {LONG * 3}"},
            {"when": "then", "calls": [call("call_c", message="c one")]},
            {"when": "then", "calls": [call("call_c" if is_once else "call_d", message="two")]},
            {"when": "then", "text": "Done."},
        ],
        **{name: ["I see."] for name in "cd"},
        **{f"{name}.summary": ["The past."] for name in "cd"},
    }
    team = [with_history(llm(name), summarize(250)) for name in "cd"]
    async with open_team(tmp_path, json.dumps({"agents": turns}), llm("p", links=["c", "d"]), *team) as harness:
        logs = await talk(harness, "p", "first", "then")
    assert [event.agent for event in having(logs[1], "history_compacted")] == (["c"] if is_once else ["c", "d"])
