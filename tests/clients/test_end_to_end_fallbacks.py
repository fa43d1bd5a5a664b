"""An answer that breaks off in mid-stream and is completed by a fallback model, from sockets of models to the caller's.

Both models are called by the real `openai` package, each at its own server.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bough import AsyncClient, StepText, collect
from bough.v1 import event_pb2, execution_pb2, follow_pb2, invocation_pb2
from bough_server.app import open_server
from bough_server.settings import Settings
from tests.clients.cli_process import bough
from tests.support.log_laws import check_laws
from tests.support.model_scenarios import TEXT
from tests.support.model_server import serving_model
from tests.support.projects import llm, openai_model, write_project

BROKEN_OFF = "word0 word1 word2 "
TEAM = (llm("talker", model="first"), llm("lead", calls=["talker"], model="desk"))


@asynccontextmanager
async def _team(folder: Path, fault: str) -> AsyncIterator[str]:
    """The address of a server whose model `first` breaks off and falls back to `second`; a third model leads."""
    async with serving_model(fault) as first, serving_model("plain") as second, serving_model("desk") as desk:
        config = write_project(
            folder,
            *TEAM,
            models={
                "default": {"alias": "desk"},
                "desk": openai_model(desk.base_url),
                "first": openai_model(first.base_url, fallbacks=["second"]),
                "second": openai_model(second.base_url),
            },
        )
        async with open_server(Settings.load(config, port=0)) as address:
            yield address
        assert (first.count, second.count) == (1, 1)


def _spoken(events: tuple[event_pb2.AgentEvent, ...], agent: str) -> dict[int, str]:
    """The text of an agent's deltas, by attempt."""
    said: dict[int, str] = {}
    for event in events:
        if event.agent == agent and event.WhichOneof("payload") in ("llm_output_text_delta", "sub_agent_partial"):
            text = event.llm_output_text_delta.text or event.sub_agent_partial.text
            said[event.attempt] = said.get(event.attempt, "") + text
    return said


@pytest.mark.parametrize("fault", ["cut", "drop", "error-event"])
async def test_the_answer_is_the_second_models_and_nothing_of_the_first_ones(tmp_path: Path, fault: str) -> None:
    async with _team(tmp_path, fault) as address, AsyncClient(address, timeout=30) as client:
        run = await collect(client.run("talker", "What is it?"))
        tree = await client.get_invocation(run.run_id, options=invocation_pb2.InvocationOptions(include_steps=True))
        messages = [message async for message in client.sessions.list_messages(run.session_id)]
    check_laws(run.events)
    (root,) = tree.agents
    assert _spoken(run.events, "talker") == {1: BROKEN_OFF, 2: TEXT}
    (step,) = tree.steps
    whole = StepText(
        invocation_id=root.invocation_id, agent="talker", step_id=step.step_id, step_index=0, attempt=2, text=TEXT
    )
    assert (run.state, run.answer, run.texts) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, TEXT, (whole,))
    (retrying,) = [event.llm_retrying for event in run.events if event.HasField("llm_retrying")]
    assert (retrying.next_model, retrying.delay.ToNanoseconds()) == ("second", 0)
    assert [step.attempt for step in tree.steps] == [step.attempt for step in run.steps] == [2]
    assert tree.final_response == run.message
    assert {message.position: message.parts[0].text for message in messages} == {1: "What is it?", 2: TEXT}
    assert root.usage.model_calls == 2


async def test_a_summary_of_a_sub_agent_gives_the_same_whole_text_as_the_log(tmp_path: Path) -> None:
    async with _team(tmp_path, "cut") as address, AsyncClient(address, timeout=30) as client:
        summary = await collect(client.run("lead", "What is it?", view=follow_pb2.EVENT_VIEW_SUMMARY))
        log = await collect(client.watch(summary.run_id))
    assert _spoken(summary.events, "talker") == {1: BROKEN_OFF, 2: TEXT}
    assert not any(event.HasField("llm_retrying") and event.agent == "talker" for event in summary.events)
    assert summary.texts == log.texts
    assert {text.agent: (text.attempt, text.text) for text in summary.texts} == {"talker": (2, TEXT), "lead": (1, TEXT)}
    (ended,) = [event.sub_agent_completed for event in summary.events if event.HasField("sub_agent_completed")]
    assert (ended.output.parts[0].text, summary.answer) == (TEXT, TEXT)


async def test_the_commands_print_the_answer_once_and_say_what_happened(tmp_path: Path) -> None:
    async with _team(tmp_path, "cut") as address:
        port = int(address.rpartition(":")[2])
        ran = await bough("run", "talker", "What is it?", port=port)
        plain = await bough("events", "last", port=port)
        models = await bough("models", "list", port=port)
    assert (ran.code, models.code) == (0, 0)
    assert [line.split() for line in models.out.splitlines()] == [
        ["model", "provider", "at", "the", "provider", "fallbacks"],
        ["default", "openai", "m", "-"],
        ["desk", "openai", "m", "-"],
        ["first", "openai", "m", "second"],
        ["second", "openai", "m", "-"],
    ]
    lines = ran.out.splitlines()
    assert (lines[0], lines[1][:45]) == ("● talker", "│ ↻ continuing with second: bad response: The")
    assert (ran.out.count("word0 "), ran.out.count("word49")) == (1, 1)
    (retried,) = [line for line in plain.out.splitlines() if "llm.retrying" in line]
    assert "(attempt 2) bad_response: " in retried
    answer = [line for line in plain.out.splitlines() if "run.completed" in line]
    assert len(answer) == 1


async def test_the_command_that_prints_the_answer_alone_prints_it_alone(tmp_path: Path) -> None:
    async with _team(tmp_path, "cut") as address:
        ran = await bough("run", "talker", "What?", "--output", "answer", port=int(address.rpartition(":")[2]))
    assert (ran.code, ran.out) == (0, f"{TEXT}\n")
