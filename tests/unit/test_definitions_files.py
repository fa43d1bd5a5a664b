"""Definitions in files: patterns, reading, problems with file, line and field."""

from pathlib import Path

import pytest

from bough_server.agents.loading import (
    definition_files,
    drop_reported_problems,
    load_sources,
    read_sources,
    source_problems,
)
from bough_server.agents.validation import Known
from bough_server.errors import ConfigurationError


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "a.yaml").write_text(
        "name: lead\ndescription: Leads.\nllm: {model: default}\nsub_agents:\n- agent: writer\n- agent: absent\n"
    )
    (folder / "b.yaml").write_text("name: writer\ndescription: Writes.\nllm: {}\n---\nname: editor\nllm: {}\n")
    return tmp_path


def test_patterns_find_files_once_and_in_order(desk: Path) -> None:
    a, b = desk / "agents" / "a.yaml", desk / "agents" / "b.yaml"
    assert definition_files(["agents/b.yaml", "agents/*.yaml"], desk) == [b, a]
    assert definition_files([f"{desk}/agents/*.yaml"], Path("/")) == [a, b]


def test_a_pattern_that_finds_nothing_is_named(desk: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        definition_files(["agents/*.yml"], desk)
    assert refused.value.message == f"agents/*.yml: No agent definition file matches; looked in {desk}."


def test_what_definitions_mean_is_judged_over_all_files_with_their_lines(desk: Path) -> None:
    sources = load_sources(definition_files(["agents/*.yaml"], desk))
    assert [source.definition.name for source in sources] == ["lead", "writer", "editor"]
    assert [str(problem) for problem in source_problems(sources, Known(models=["default"]))] == [
        f"{desk}/agents/a.yaml:6: sub_agents[1].agent: There is no agent 'absent'. There is editor, lead, writer.",
        f"{desk}/agents/b.yaml:5: description: is required: models choose the agent by it.",
    ]


def test_how_they_are_written_is_judged_over_all_files(desk: Path) -> None:
    (desk / "agents" / "a.yaml").write_text("nam: lead\n")
    (desk / "agents" / "c.yaml").write_text("# nothing yet\n")
    files = definition_files(["agents/*.yaml"], desk)
    _, problems = read_sources(files)
    assert [str(problem) for problem in problems] == [
        f"{desk}/agents/a.yaml:1: nam: There is no such field. Did you mean 'name'?",
        f"{desk}/agents/c.yaml:1: The file defines no agent.",
    ]
    with pytest.raises(ConfigurationError) as refused:
        load_sources(files)
    assert refused.value.message.splitlines() == [str(problem) for problem in problems]


def test_what_cannot_be_read_is_not_said_to_be_missing_as_well(desk: Path) -> None:
    broken = desk / "agents" / "c.yaml"
    broken.write_text(
        "name: c\ndescription: C.\nloop: {max_iterations: many}\nsub_agents: [7, {agent: gone}]\n---\n- a list\n"
    )
    sources, problems = read_sources([broken])
    judged = drop_reported_problems(source_problems(sources, Known(models=["default"])), problems)
    assert [(each.line, each.field) for each in problems] == [(3, "loop.max_iterations"), (4, "sub_agents[0]"), (6, "")]
    assert [(each.line, each.field) for each in judged] == [(4, "sub_agents[1].agent")]
