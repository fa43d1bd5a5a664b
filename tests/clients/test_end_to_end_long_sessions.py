"""A long session from the model's socket to the caller's: every request that arrives stays within the agent's window.

The model is called by the real `openai` package. Requests are checked as received, and messages as a client lists them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from bough import AsyncClient, collect
from bough.v1 import event_pb2, execution_pb2, message_pb2
from bough_server.app import open_server
from bough_server.settings import Settings
from tests.support.log_laws import check_laws
from tests.support.model_scenarios import Reply, Request, calling, chunk, ending, offered, results
from tests.support.model_server import ModelServer, serving_model
from tests.support.projects import llm, openai_model, write_project

TURNS: Final = 24
BOUND: Final = 700
WORD: Final = "The code word is cedar."
FILLER: Final = "and so on " * 20
POLICIES: Final[Mapping[str, Mapping[str, object]]] = {
    "sliding_window": {"sliding_window": {"max_tokens": BOUND + 100, "reserve_tokens": 100}},
    "summarize": {"summarize": {"max_tokens": BOUND, "keep_recent_exchanges": 2}},
}


def _is_of_summary(request: Request) -> bool:
    return "Summarize it in at most" in str(request["messages"][-1]["content"])


def _attentive(request: Request) -> Reply:
    """Calls the clerk once in each run, keeps the code word in its summaries, and reports whether it can read it."""
    if "call_clerk" in offered(request) and not results(request):
        return calling([("call_clerk", json.dumps({"message": FILLER}))])
    knows = WORD in json.dumps(request["messages"])
    known = WORD if _is_of_summary(request) else f"It is cedar. {FILLER}"
    said = known if knows else f"Nothing. {FILLER}"
    return Reply(pieces=(chunk({"role": "assistant", "content": said}), *ending("stop")))


def _tokens(request: Request) -> int:
    """Count tokens as four bytes each, without the frame around messages."""
    said = [str(message.get("content") or "") + _called(message) for message in request["messages"]]
    tools = [tool["function"] for tool in request.get("tools", ())]
    return (len("".join(said)) + sum(len(tool["name"] + tool["description"]) for tool in tools)) // 4


def _called(message: Mapping[str, Any]) -> str:
    return "".join(call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls") or ())


def check_accepted(request: Request) -> None:
    """Assert that a provider accepts it: it begins with a user message, and every call is followed by its result."""
    roles = [message["role"] for message in request["messages"] if message["role"] != "system"]
    assert roles[0] == "user"
    waiting: list[str] = []
    for message in request["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
            continue
        assert not waiting
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
    assert not waiting


async def _talk(
    folder: Path, overflow: str, model: ModelServer
) -> tuple[list[Sequence[event_pb2.AgentEvent]], list[str], list[message_pb2.Message]]:
    """The events of the runs of one session, its answers, and its messages as ListMessages returns them."""
    team = [llm(name, history=POLICIES[overflow], calls=calls) for name, calls in (("lead", ["clerk"]), ("clerk", []))]
    config = write_project(folder, *team, models={"default": openai_model(model.base_url)})
    logs: list[Sequence[event_pb2.AgentEvent]] = []
    answers: list[str] = []
    async with open_server(Settings.load(config, port=0)) as address, AsyncClient(address, timeout=30) as client:
        for turn in range(TURNS):
            said = f"Turn {turn}: what is it? {FILLER}" if turn else f"{WORD} Keep it."
            session_id = logs[0][0].session_id if logs else ""
            run = await collect(client.run("lead", said, session_id=session_id))
            assert run.state == execution_pb2.EXECUTION_STATE_SUCCEEDED
            check_laws(run.events)
            logs.append(run.events)
            answers.append(run.answer)
        listed = [message async for message in client.sessions.list_messages(logs[0][0].session_id)]
        messages = sorted(listed, key=lambda message: message.position)
    return logs, answers, messages


@pytest.mark.timeout(60)
@pytest.mark.parametrize("overflow", ["sliding_window", "summarize"])
async def test_every_request_of_a_long_session_that_arrives_is_within_the_window(tmp_path: Path, overflow: str) -> None:
    arrived: list[Request] = []

    def answer(request: Request) -> Reply:
        arrived.append(request)
        return _attentive(request)

    async with serving_model(answer) as model:
        logs, answers, messages = await _talk(tmp_path, overflow, model)
    for request in arrived:
        check_accepted(request)
        assert _tokens(request) <= BOUND
    assert max(map(_tokens, arrived)) > BOUND // 2, "what fits is sent"
    compacted = [event.history_compacted for log in logs for event in log if event.HasField("history_compacted")]
    summaries = [message for message in messages if message.kind == message_pb2.MESSAGE_KIND_SUMMARY]
    assert [one.message_id for one in summaries] == [one.summary.message_id for one in compacted]
    assert len([request for request in arrived if _is_of_summary(request)]) == len(compacted)
    assert [message.position for message in messages] == list(range(1, len(messages) + 1))
    if overflow == "summarize":
        assert 0 < len(compacted) < TURNS
        assert {one.author for one in summaries} == {"lead", "clerk"}
        assert all(text.startswith("It is cedar.") for text in answers)
        assert all(0 < one.summary_range.to_position < one.position for one in summaries)
    else:
        assert not compacted
        assert answers[-1].startswith("Nothing.")
