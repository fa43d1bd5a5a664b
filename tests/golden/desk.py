"""The golden desk: a small team, and its log and tree as files with ids and times masked.

`python -m tests.golden.desk` writes the files anew, after a change that is meant to change them: read their diff.
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message

from bough.v1 import agent_pb2, policy_pb2
from bough_server.tools.tool import tool
from tests.support.log_readings import check_replay, masked
from tests.support.teams import call, calls, llm, open_team, script

FOLDER: Final = Path(__file__).parent
LOG: Final = FOLDER / "desk_log.json"
TREE: Final = FOLDER / "desk_tree.json"

TURNS = script(
    lead=[
        calls(
            call("call_researcher", message="Why do leaves turn red?"),
            reasoning="Facts first.",
            usage={"input_tokens": 96, "output_tokens": 14},
        ),
        calls(
            call("call_writer", message="Write it."),
            call("call_checker", message="Check it."),
            text="Now the text.",
            usage={"input_tokens": 148, "cached_input_tokens": 90, "output_tokens": 31},
        ),
        {"text": "Trees make a red of their own.", "usage": {"input_tokens": 205, "output_tokens": 34}},
    ],
    researcher=[
        calls(call("search_notes", topic="leaves"), call("search_notes", topic=7)),
        {"text": "Anthocyanins are red.", "usage": {"input_tokens": 118, "output_tokens": 24}},
    ],
    writer=[
        {
            "chunks": ["Trees make ", "a red of their own."],
            "usage": {"input_tokens": 72, "output_tokens": 34},
            "error": {"reason": "TRANSPORT", "after_chunks": 1, "times": 1, "usage": {"input_tokens": 72}},
        }
    ],
    checker=[{"text": "never", "error": {"reason": "UNAVAILABLE"}}],
)


@tool
def search_notes(topic: str) -> dict[str, str]:
    """Searches the desk's notes."""
    return {topic: "Anthocyanins are red."}


def team() -> list[agent_pb2.AgentDefinition]:
    """A lead, a researcher with a tool, a writer whose model fails once, and a checker that fails."""
    return [
        llm("lead", links=["researcher", "writer", "checker"], parallel_tools=False),
        llm("researcher", tools=["search_notes"], parallel_tools=False),
        llm("writer"),
        llm("checker"),
    ]


def joined() -> policy_pb2.RunPolicy:
    """Deltas joined by their number alone, so that no clock decides how many there are."""
    policy = policy_pb2.RunPolicy()
    policy.deltas.aggregated.max_chars = 10_000
    policy.deltas.aggregated.max_interval.FromSeconds(10)
    return policy


async def recorded() -> tuple[str, str]:
    """The desk's log and tree as the text of the two files, after both kept the laws and replayed."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_team(Path(folder), TURNS, *team(), tools=[search_notes]) as harness:
            log = await harness.turn("lead", "Why do leaves turn red?", policy=joined())
            tree = await harness.tree(log, include_steps=True)
            await check_replay(harness, log)
    return text_of(masked(log)), text_of(masked([tree]))


def text_of(messages: Sequence[Message]) -> str:
    """Messages as one JSON text, in their own order of fields."""
    return json.dumps(plain(messages), indent=1, ensure_ascii=False) + "\n"


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the values of their JSON."""
    return [json_format.MessageToDict(message) for message in messages]


def read(path: Path) -> list[dict[str, Any]]:
    """The values of a golden file."""
    values: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return values


if __name__ == "__main__":
    for path, text in zip((LOG, TREE), asyncio.run(recorded()), strict=True):
        path.write_text(text, encoding="utf-8")
