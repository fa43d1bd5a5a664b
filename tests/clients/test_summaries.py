"""A session whose agent summarizes, as a user sees it: `bough run`, `bough replay`, messages, and a bad policy."""

from collections.abc import Mapping
from pathlib import Path

from google.protobuf import json_format

from bough.v1 import event_pb2
from tests.clients.cli_process import bough, server_of
from tests.support.projects import llm, write_project

LONG = "word " * 100
SCRIPT = {"lead": [f"I see. {LONG}"], "lead.summary": [{"text": "They spoke of words.", "usage": {"input_tokens": 3}}]}


def project(folder: Path, history: Mapping[str, object]) -> Path:
    return write_project(folder, llm("lead", history=history), script=SCRIPT)


async def test_a_summary_is_recorded_replayed_and_not_taken_for_the_answer(tmp_path: Path) -> None:
    config = project(tmp_path, {"summarize": {"max_tokens": 350}})
    async with server_of(config) as port:
        first = await bough("run", "lead", f"One. {LONG}", "--output", "json", port=port)
        assert first.code == 0, first.err
        session_id = json_format.Parse(first.out.splitlines()[0], event_pb2.AgentEvent()).session_id
        second = await bough("run", "lead", f"Two. {LONG}", "--session", session_id, "--output", "json", port=port)
        log = [json_format.Parse(line, event_pb2.AgentEvent()) for line in second.out.splitlines()]
        compacted = [event.history_compacted for event in log if event.HasField("history_compacted")]
        ranges = [one.summary.summary_range for one in compacted]
        assert [(one.from_position, one.to_position) for one in ranges] == [(1, 2)]
        assert "".join(part.text for part in log[-1].run_completed.final_answer.parts) == f"I see. {LONG}"
        third = await bough("run", "lead", f"Three. {LONG}", "--session", session_id, port=port)
        assert third.code == 0, third.err
        assert third.out.count("They spoke of words.") == 1
        assert "summarized messages 1 to 5 of the session: They spoke of words." in third.out
        replayed = await bough("--config", str(config), "replay", log[0].run_id, port=port)
        assert (replayed.code, "nothing diverged" in replayed.out) == (0, True), replayed.out
        tree = await bough("tree", log[0].run_id, "--json", port=port)
        assert tree.code == 0, tree.err
        assert '"modelCalls": 2' in tree.out
        assert '"stepCount": 1' in tree.out


async def test_a_policy_without_a_bound_is_refused_with_its_field(tmp_path: Path) -> None:
    config = project(tmp_path, {"summarize": {"keep_recent_exchanges": 2}})
    said = await bough("--config", str(config), "agents", "validate", str(tmp_path / "agents.yaml"))
    assert said.code != 0
    assert "history.summarize.max_tokens" in said.out + said.err
