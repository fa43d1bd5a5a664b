"""A folder with a configuration, as an operator writes it: agents, a script, tools; nothing is started here."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

TOOLS = '''"""Tools that tests can hold and count from outside."""

import asyncio
import os
from collections.abc import AsyncIterator

from bough_server import tool


@tool
async def wait_at(port: int) -> str:
    """Waits at a gate until it is opened."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()


@tool
async def print_lines(count: int, width: int) -> AsyncIterator[str]:
    """Prints numbered lines."""
    for number in range(count):
        yield f"{number:07}".ljust(width - 1, ".") + "\\n"


@tool
def look_up(topic: str) -> str:
    """Looks a topic up."""
    return f"There is a note on {topic}."
'''

Definition = Mapping[str, object]


def llm(
    name: str, *, calls: Sequence[str] = (), tools: Sequence[str] = (), model: str = "", **rest: object
) -> dict[str, object]:
    """A definition of an LLM agent with the agents that it may call and its tools."""
    definition: dict[str, object] = {
        "name": name,
        "description": f"Does what {name} does.",
        "llm": {"model": model, "instruction": f"You are {name}.", "tools": [{"name": one} for one in tools]},
    }
    if calls:
        definition["sub_agents"] = [{"agent": one} for one in calls]
    return {**definition, **rest}


def write_project(
    folder: Path,
    *definitions: Definition,
    script: Mapping[str, Sequence[object]] | None = None,
    model: Mapping[str, object] | None = None,
    **sections: object,
) -> Path:
    """Writes a configuration into a folder; gives its path.

    The default model is the given one, else one that says what the script says. The database is `bough.db` there, and
    survives a killed process only, which is what tests can see.
    """
    (folder / "team_tools.py").write_text(TOOLS, encoding="utf-8")
    (folder / "agents.yaml").write_text("".join(f"---\n{json.dumps(one)}\n" for one in definitions), encoding="utf-8")
    (folder / "script.yaml").write_text(json.dumps({"agents": script or {}}), encoding="utf-8")
    settings: dict[str, object] = {
        "storage": {"url": "bough.db", "durability": "process"},
        "agents": ["agents.yaml"],
        "python": ["team_tools"],
        "models": {"default": model or {"provider": "scripted", "script": "script.yaml"}},
        **sections,
    }
    config = folder / "bough.yaml"
    config.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return config


def openai_model(base_url: str, **rest: object) -> dict[str, object]:
    """A model behind Chat Completions, never asked twice unless the test says so."""
    return {"provider": "openai", "model": "m", "base_url": base_url, "retries": 0, **rest}
