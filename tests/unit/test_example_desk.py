"""The example desk: its files are read, fit together, and do what they teach."""

from pathlib import Path

from bough.v1 import agent_pb2, policy_pb2
from bough_server.agents.loading import definition_files, load_python, load_sources, source_problems
from bough_server.agents.validation import Known
from bough_server.settings import Settings

DESK = Path(__file__).parents[2] / "examples" / "desk"


def test_the_desks_definitions_fit_together() -> None:
    settings = Settings.load(DESK / "bough.yaml")
    parts = load_python(settings.python, settings.folder)
    sources = load_sources(definition_files(settings.agents, settings.folder))
    known = Known(tools=[each.name for each in parts.tools], models=settings.models)
    assert source_problems(sources, known) == []
    team = {source.definition.name: source.definition for source in sources}
    assert list(team) == ["lead", "researcher", "writer"]
    assert list(team["lead"].sub_agents) == [
        agent_pb2.AgentLink(agent="researcher"),
        agent_pb2.AgentLink(agent="writer", on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT),
    ]
    assert [each.name for each in team["researcher"].llm.tools] == ["search_notes"]


def test_one_word_chooses_the_desks_model() -> None:
    for name in ("local", "scripted", "openai"):
        settings = Settings.load(DESK / "bough.yaml", default_model=name)
        assert settings.models["default"].alias == name


def test_the_desks_notes_are_found_by_topic_and_by_word() -> None:
    settings = Settings.load(DESK / "bough.yaml")
    [search_notes] = load_python(settings.python, settings.folder).tools
    assert search_notes("leaves").startswith("leaves: In autumn")
    assert search_notes("What moves the tides?").startswith("tides: ")
    assert search_notes("volcanoes") == "No note on 'volcanoes'. There are notes on leaves, tides, bridges, trees."
