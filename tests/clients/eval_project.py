"""A small team and its eval sets, for the commands that evaluate."""

from pathlib import Path

from tests.support.projects import llm, write_project

ANSWER = "Take the boat to the islands."
TRIPS = f"""\
name: trips
agent: guide
cases:
  - id: oslo
    turns:
      - user: What shall I do in Oslo?
        expect:
          answer: {{exact: {ANSWER}}}
          tools: [{{name: look_up, arguments: {{topic: oslo}}}}]
          agents: [guide]
  - id: bergen
    turns: [{{user: And in Bergen, expect: {{answer: {{contains: [boat]}}}}}}]
"""
SLOW = "name: slow\nagent: sleeper\ncases: [{id: oslo, turns: [{user: Hm}]}, {id: bergen, turns: [{user: Hm}]}]\n"
"""Cases that take a minute each."""


def write_team(folder: Path, **sections: object) -> Path:
    """Write the team's project; return its configuration."""
    look_up = {"name": "look_up", "arguments": {"topic": "oslo"}}
    return write_project(
        folder,
        llm("guide", tools=["look_up"]),
        llm("sleeper"),
        script={"guide": [{"calls": [look_up]}, ANSWER], "sleeper": [{"text": "Done.", "delay_ms": 60_000}]},
        **sections,
    )


def write_set(folder: Path, *changes: tuple[str, str], text: str = TRIPS) -> str:
    """Write a set with texts replaced by others; return its path."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "set.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)
