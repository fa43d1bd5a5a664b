"""The desk of the benchmark: a lead, three specialists and one tool, as a configuration and for the bare loop alike."""

import json
from pathlib import Path
from typing import Any, Final

QUESTION: Final = "What do we know about boughs, and what should a visitor be told of them?"
SPECIALISTS: Final = ("botanist", "carpenter", "historian")
INSTRUCTIONS: Final = {
    "lead": "You lead a desk. Ask every specialist, then answer with what they told you.",
    **{name: f"You are the {name} of a desk. Look the topic up once, then answer." for name in SPECIALISTS},
}
LOOKUP: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a topic up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
_TOOLS: Final = '''"""The tool of the benchmark's desk."""

from bough_server import tool
from bench import desk_team


@tool
async def lookup(query: str) -> str:
    """Looks a topic up."""
    return await desk_team.lookup(query)
'''


async def lookup(query: str) -> str:
    """What there is to say about a topic."""
    return f"A bough is a main branch of a tree. You asked for {query}."


def write_project(
    folder: Path, *, base_url: str, paced_base_url: str = "", durability: str = "disk", storage: str = "bench.db"
) -> Path:
    """Writes a configuration of the desk into a folder; gives its path.

    The agent `lead` and its sub-agents use the model server at `base_url`, `paced_lead` that at `paced_base_url`.
    """
    (folder / "bench_tools.py").write_text(_TOOLS, encoding="utf-8")
    (folder / "agents.yaml").write_text("---\n".join(json.dumps(one) + "\n" for one in _definitions()))
    config = folder / "bough.yaml"
    settings = {
        "storage": {"url": storage, "durability": durability},
        "agents": ["agents.yaml"],
        "python": ["bench_tools"],
        "models": {
            "default": {"provider": "openai", "model": "m", "base_url": base_url},
            "paced": {"provider": "openai", "model": "m", "base_url": paced_base_url or base_url},
        },
    }
    config.write_text(json.dumps(settings), encoding="utf-8")
    return config


def _definitions() -> list[dict[str, object]]:
    leads: list[dict[str, object]] = [
        {
            "name": name,
            "description": "Answers with what its specialists know.",
            "llm": {"model": model, "instruction": INSTRUCTIONS["lead"]},
            "sub_agents": [{"agent": name} for name in SPECIALISTS],
        }
        for name, model in (("lead", "default"), ("paced_lead", "paced"))
    ]
    specialists: list[dict[str, object]] = [
        {
            "name": name,
            "description": f"Answers as the {name}.",
            "llm": {"instruction": INSTRUCTIONS[name], "tools": [{"name": "lookup"}]},
        }
        for name in SPECIALISTS
    ]
    return [*leads, *specialists]
