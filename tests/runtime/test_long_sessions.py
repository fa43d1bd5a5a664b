"""Sessions of many turns with sub-agents: every request stays within its window, and what matters is remembered."""

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import pytest

from bough.v1 import agent_pb2, event_pb2, follow_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.log.views import Selection
from bough_server.models.model import (
    AttemptMeter,
    Deltas,
    Model,
    ModelRequest,
    Price,
    RetryPolicy,
    TextDelta,
    ToolCallDelta,
)
from bough_server.models.tokens import request_tokens
from bough_server.runtime.visible_history import VisibleHistory
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.run_harness import open_harness
from tests.support.teams import llm

TURNS: Final = 50
BOUND: Final = 600
RESERVE: Final = 100
WORD: Final = re.compile(r"code word is (\w+)")
FILLER: Final = "and so on " * 12


class Attentive:
    """A model that says what it can read in its request, calls a clerk once a turn, and keeps what it was asked."""

    name, provider, model, config_digest = "default", "scripted", "attentive", ""
    retry, price = RetryPolicy(retries=0), Price(input_per_million=1, output_per_million=1)
    fallbacks: Sequence[str] = ()

    def __init__(self) -> None:
        self.heard: list[ModelRequest] = []

    async def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncIterator[Deltas | step_pb2.LlmResponse]:
        """An answer that depends on the request alone."""
        self.heard.append(request)
        found = WORD.search("\n".join(map(text_of, request.messages)))
        kept = f"The code word is {found[1]}." if found else "Nothing."
        knows = f"It is {found[1]}." if found else "I know no such word."
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        if request.agent == "lead" and request.messages[-1].role != message_pb2.ROLE_TOOL:
            call = message_pb2.ToolCall(name="call_clerk", arguments_json=f'{{"message": "{FILLER}"}}')
            call.provider_call_id = f"call-{len(self.heard)}"
            yield (ToolCallDelta(0, call.arguments_json, call.provider_call_id, call.name),)
            message.parts.add(tool_call=call)
        else:
            text = kept if request.agent.endswith(".summary") else f"{knows} {FILLER}"
            yield (TextDelta(text),)
            message.parts.add(text=text)
        used = usage_pb2.Usage(input_tokens=request_tokens(request), output_tokens=10)
        yield step_pb2.LlmResponse(provider="scripted", model="attentive", message=message, usage=used)

    async def close(self) -> None:
        """Nothing is open."""


class OneModel:
    """A configuration of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def get(self, name: str) -> Model:
        """That one."""
        return self._model

    def list(self) -> list[model_pb2.ModelInfo]:
        """That one."""
        return [model_pb2.ModelInfo(name="default")]


def team(policy: agent_pb2.HistoryPolicy) -> list[agent_pb2.AgentDefinition]:
    members = [llm("lead", links=["clerk"]), llm("clerk")]
    for member in members:
        member.history.CopyFrom(policy)
    return members


async def fifty_turns(
    folder: Path, policy: agent_pb2.HistoryPolicy
) -> tuple[list[ModelRequest], list[list[event_pb2.AgentEvent]], list[message_pb2.Message]]:
    """What the models were asked in a session of 50 turns, the logs of its runs, and its messages."""
    model = Attentive()
    logs: list[list[event_pb2.AgentEvent]] = []
    async with open_harness(folder, models=OneModel(model), definitions=team(policy)) as harness:
        for turn in range(TURNS):
            said = "The code word is cedar. Keep it." if not turn else f"Turn {turn}: what is it? {FILLER}"
            logs.append(await harness.turn("lead", said, session_id=logs[0][0].session_id if logs else ""))
        for log in logs[:: TURNS // 7]:
            await check_replay(harness, log)
        ledger = [len(await harness.store.usage.list_for_run(log[0].run_id)) for log in logs]
        messages = [one.message for one in await harness.messages(logs[0][0].session_id)]
    assert sum(ledger) == len(model.heard), "every call of a model is charged once"
    return model.heard, logs, messages


def check_bounds(heard: Sequence[ModelRequest], bound: int) -> None:
    """Asserts that no request is longer than it may be, and that in each every call has its result."""
    for request in heard:
        assert request_tokens(request) <= bound
        asked = [part.tool_call.call_id for one in request.messages for part in one.parts if part.HasField("tool_call")]
        given = [
            part.tool_result.call.call_id
            for one in request.messages
            for part in one.parts
            if part.HasField("tool_result")
        ]
        assert asked == given


@pytest.mark.timeout(60)
async def test_fifty_turns_stay_within_a_sliding_window_which_forgets(tmp_path: Path) -> None:
    window = agent_pb2.SlidingWindow(max_tokens=BOUND, reserve_tokens=RESERVE)
    heard, logs, _ = await fifty_turns(tmp_path, agent_pb2.HistoryPolicy(sliding_window=window))
    check_bounds(heard, BOUND - RESERVE)
    assert {request.agent for request in heard} == {"lead", "clerk"}
    assert answer_of(logs[1]).startswith("It is cedar.")
    assert answer_of(logs[-1]).startswith("I know no such word.")
    assert min(request_tokens(request) for request in heard[30:]) > BOUND // 3, "what fits is sent"


@pytest.mark.timeout(60)
async def test_fifty_turns_stay_within_a_window_by_summaries_which_remember(tmp_path: Path) -> None:
    summarize = agent_pb2.Summarization(max_tokens=BOUND, keep_recent_exchanges=1)
    heard, logs, messages = await fifty_turns(tmp_path, agent_pb2.HistoryPolicy(summarize=summarize))
    check_bounds(heard, BOUND)
    assert {request.agent for request in heard} == {"lead", "clerk", "lead.summary", "clerk.summary"}
    assert all(answer_of(log).startswith("It is cedar.") for log in logs)
    said = [one for request in heard[-20:] if request.agent == "lead" for one in map(text_of, request.messages)]
    assert not any(text.startswith("The code word is cedar. Keep it.") for text in said), "only the summary says so"
    made = [event for log in logs for event in having(log, "history_compacted")]
    kept = [one for one in messages if one.kind == message_pb2.MESSAGE_KIND_SUMMARY]
    assert [one.message_id for one in kept] == [event.history_compacted.summary.message_id for event in made]
    assert len(made) < TURNS, "a summary serves several turns"
    assert [one.position for one in messages] == list(range(1, len(messages) + 1))
    shown = Selection(follow_pb2.EVENT_VIEW_SUMMARY, ())
    partials = [one for log in logs for event in log if (one := shown.apply(event)) is not None]
    assert not any("cedar" in event.sub_agent_partial.text for event in partials if event.agent == "lead")
    assert {event.agent for event in partials if event.HasField("history_compacted")} == {"lead"}


class Counting(Attentive):
    """The same with another tokenizer, which makes three tokens of every two of the estimate."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """The tokens of a request."""
        return request_tokens(request) * 3 // 2


@pytest.mark.parametrize("overflow", ["sliding_window", "summarize"])
async def test_a_model_s_own_tokenizer_measures_its_window(tmp_path: Path, overflow: str) -> None:
    policy = agent_pb2.HistoryPolicy()
    getattr(policy, overflow).max_tokens = 900
    model = Counting()
    async with open_harness(tmp_path, models=OneModel(model), definitions=team(policy)) as harness:
        log = await harness.turn("lead", f"The code word is cedar. {FILLER}")
        for turn in range(8):
            log = await harness.turn("lead", f"{turn}: what is it? {FILLER}", session_id=log[0].session_id)
        await check_replay(harness, log)
    check_bounds(model.heard, 600)
    assert max(request_tokens(request) for request in model.heard) > 400, "what fits is sent"
    assert answer_of(log).startswith("It is cedar." if overflow == "summarize" else "I know no such word.")


async def test_no_history_is_built_while_a_log_is_handed_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = agent_pb2.HistoryPolicy(summarize=agent_pb2.Summarization(max_tokens=300))
    model = Attentive()
    async with open_harness(tmp_path, models=OneModel(model), definitions=team(policy)) as harness:
        first = await harness.turn("lead", f"The code word is cedar. {FILLER}")
        log = await harness.turn("lead", f"What is it? {FILLER}", session_id=first[0].session_id)
        assert having(log, "history_compacted")

        def built(_: VisibleHistory) -> NoReturn:
            raise AssertionError("a history was built")

        monkeypatch.setattr(VisibleHistory, "list_all_visible", built)
        await check_replay(harness, log)
