"""The configuration of the growth and followers cases: agents on a scripted model, which costs next to nothing."""

import json
from pathlib import Path
from typing import Final

from bench.desk_team import LOOKUP

ANSWER: Final = "A bough is a main branch of a tree, larger than a twig and smaller than the trunk itself. " * 4
STEPS: Final = 211
"""The steps of the agent `stepper`; each but the last calls a tool."""

WORDS: Final = 500
"""The words of the agent `speaker`, each of them a delta."""

WORD_MS: Final = 4
"""Milliseconds between two of them: time for every follower to get each by itself."""

_TOOLS: Final = '''"""The tool of the benchmark's agents."""

from bough_server import tool
from bench import desk_team


@tool
async def lookup(query: str) -> str:
    """Looks a topic up."""
    return await desk_team.lookup(query)
'''


def write_growth_project(folder: Path, *, storage: str = "bench.db") -> Path:
    """Writes the configuration into a folder; gives its path."""
    (folder / "growth_tools.py").write_text(_TOOLS, encoding="utf-8")
    (folder / "script.json").write_text(json.dumps({"agents": _turns()}), encoding="utf-8")
    (folder / "agents.yaml").write_text("---\n".join(json.dumps(one) + "\n" for one in _definitions()))
    config = folder / "bough.yaml"
    settings = {
        "storage": {"url": storage, "durability": "disk"},
        "agents": ["agents.yaml"],
        "python": ["growth_tools"],
        "models": {"default": {"provider": "scripted", "script": "script.json"}},
    }
    config.write_text(json.dumps(settings), encoding="utf-8")
    return config


def _turns() -> dict[str, list[object]]:
    text = "I look a further branch of this tree up. "
    looks = [
        {"text": text, "calls": [{"name": LOOKUP["function"]["name"], "arguments": {"query": f"branch {number}"}}]}
        for number in range(STEPS - 1)
    ]
    speech = {"chunks": [f"word{number} " for number in range(WORDS)], "delay_ms": WORD_MS}
    return {"clerk": [ANSWER], "stepper": [*looks, "That is what we know."], "speaker": [speech]}


def _definitions() -> list[dict[str, object]]:
    agents: dict[str, dict[str, object]] = {
        "clerk": {},
        "stepper": {"tools": [{"name": "lookup"}], "max_steps": STEPS + 1},
        "speaker": {},
    }
    return [
        {"name": name, "description": f"The {name}.", "llm": {"instruction": f"You are a {name}.", **fields}}
        for name, fields in agents.items()
    ]
