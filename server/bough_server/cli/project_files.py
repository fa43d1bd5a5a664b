"""Files of a new project: a team of two agents with a tool, a script that answers for the model, and a test."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_SETTINGS: Final = """\
# A team of agents. Paths are relative to this file; `bough schema bough.yaml` has every setting.
agents: [agents/*.yaml]
python: [weather_tools]
models:
  # What agents use that name no model; `bough chat --model openai` uses another one without an edit.
  default: {alias: scripted}
  # Answers from a file: free, always the same, without a network. For trying out a team and for its tests.
  scripted: {provider: scripted, script: script.yaml}
  # Any server with OpenAI's API; `base_url` is its address. `api_key_env` is the NAME of the variable with the key.
  openai: {provider: openai, model: gpt-5-mini, api_key_env: OPENAI_API_KEY}
limits:
  # Of a whole run, sub-agents included.
  default: {model_calls: 50, wall_duration: 10m}
"""

_GUIDE: Final = """\
# The agent that users talk to. Its model sees the linked agent as the tool call_forecaster.
name: guide
description: Plans a day out.
llm:
  instruction: Ask the forecaster about the weather, then suggest one thing to do.
sub_agents:
  - agent: forecaster
"""

_FORECASTER: Final = """\
# No `model`: it uses its caller's.
name: forecaster
description: Knows the weather of any place.
llm:
  instruction: Look the weather up and report it in one sentence.
  tools:
    # A function in weather_tools.py.
    - {name: weather, max_calls_per_run: 3, timeout: 10s}
"""

_TOOLS: Final = '''\
"""The team's tools: Python functions. A model sees their names, type hints and docstrings, and nothing else."""

from bough_server import tool


@tool
def weather(place: str) -> str:
    """Returns the weather of a place.

    Args:
        place: A city, such as "Oslo".
    """
    return f"It is 21 degrees and dry in {place}."
'''

_SCRIPT: Final = """\
# What the scripted model answers, whatever it is asked: for each agent, one entry for each call of its model.
# The tools are real; only the model's words are scripted.
agents:
  guide:
    - calls: [{name: call_forecaster, arguments: {message: "How is the weather in Oslo?"}}]
    - "It stays dry: walk along the harbor, then go for a swim."
  forecaster:
    - calls: [{name: weather, arguments: {place: Oslo}}]
    - It is 21 degrees and dry in Oslo.
"""

_TEST: Final = '''\
"""The team's tests. `pytest` runs them on the script, without a network and without a key."""


def test_the_guide_asks_the_forecaster(bough_team):
    run = bough_team().run("guide", "What can I do in Oslo today?")

    assert run.answer == "It stays dry: walk along the harbor, then go for a swim."
    assert run.tree == ["guide", "  forecaster (weather)"]
    assert run.calls("weather") == [{"place": "Oslo"}]


def test_a_forecast_that_fails_is_reported_to_the_guide(bough_team):
    script = {
        "guide": [{"calls": [{"name": "call_forecaster", "arguments": {"message": "Oslo"}}]}, "I cannot say."],
        "forecaster": [{"error": {"reason": "UNAVAILABLE"}}],
    }
    run = bough_team(script).run("guide", "What can I do in Oslo today?")

    assert run.answer == "I cannot say."
    assert run.tree == ["guide", "  forecaster: failed"]
'''

PROJECT_FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bough.yaml": _SETTINGS,
        "agents/guide.yaml": _GUIDE,
        "agents/forecaster.yaml": _FORECASTER,
        "weather_tools.py": _TOOLS,
        "script.yaml": _SCRIPT,
        "test_team.py": _TEST,
    }
)
"""The text of each file by its path in the project."""
