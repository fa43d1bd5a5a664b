"""The configuration of the score and evaluate cases, and what they expect; the model is scripted."""

import json
from pathlib import Path
from typing import Final

from bench.growth_project import ANSWER
from bough.v1 import eval_set_pb2

STEPS: Final = 41
"""The steps of the agent `searcher`; each but the last calls a tool. Its run has about 300 events."""

_TOOLS: Final = '''"""The tool of the benchmark's agents."""

from bough_server import tool


@tool
async def lookup(query: str) -> str:
    """Looks a topic up."""
    return f"There is a note on {query}."
'''


def write_eval_project(folder: Path) -> Path:
    """Writes the configuration into a folder; gives its path."""
    (folder / "eval_tools.py").write_text(_TOOLS, encoding="utf-8")
    calls = [{"name": "lookup", "arguments": {"query": "boughs"}}]
    looks = [{"text": "I look it up. ", "calls": calls} for _ in range(STEPS - 1)]
    script = {"agents": {"clerk": [ANSWER], "searcher": [*looks, ANSWER]}}
    (folder / "script.json").write_text(json.dumps(script), encoding="utf-8")
    llm = {"clerk": {}, "searcher": {"tools": [{"name": "lookup"}], "max_steps": STEPS + 1}}
    definitions = [
        {"name": name, "description": f"The {name}.", "llm": {"instruction": f"You are a {name}.", **fields}}
        for name, fields in llm.items()
    ]
    (folder / "agents.yaml").write_text("---\n".join(json.dumps(one) + "\n" for one in definitions))
    settings = {
        "storage": {"url": "bench.db", "durability": "disk"},
        "agents": ["agents.yaml"],
        "python": ["eval_tools"],
        "models": {"default": {"provider": "scripted", "script": "script.json"}},
    }
    config = folder / "bough.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")
    return config


def metrics() -> list[eval_set_pb2.EvalMetric]:
    """Trajectory, tree and budget."""
    return [
        eval_set_pb2.EvalMetric(tool_trajectory=eval_set_pb2.ToolTrajectoryMetric()),
        eval_set_pb2.EvalMetric(agent_trajectory=eval_set_pb2.AgentTrajectoryMetric()),
        eval_set_pb2.EvalMetric(budget=eval_set_pb2.BudgetMetric(errors=0)),
    ]


def expected(agent: str, *, calls: int) -> eval_set_pb2.EvalExpectation:
    """One agent that looks something up so often."""
    return eval_set_pb2.EvalExpectation(
        tools=[eval_set_pb2.ExpectedTool(name="lookup")] * calls, agents=[eval_set_pb2.ExpectedAgent(name=agent)]
    )
