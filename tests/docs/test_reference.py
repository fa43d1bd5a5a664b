"""The reference has every field and every setting, and the index every decision; what is generated is current."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer.main
from pydantic import BaseModel
from typer.core import TyperCommand, TyperGroup

from bough.v1 import agent_pb2, eval_set_pb2
from bough_server.cli.program import make_program
from bough_server.models.config import ModelSection
from bough_server.settings import Environment, Settings
from bough_server.settings_sections import (
    LimitSet,
    LimitsSection,
    RunsSection,
    ServerSection,
    StorageSection,
    TelemetrySection,
)
from docs.generate.__main__ import find_stale, generate_files
from docs.generate.settings import describe_fields

ROOT = Path(__file__).parents[2]
AGENT_FIELDS = (ROOT / "docs/reference/agent-fields.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
BOUGH_YAML = (ROOT / "docs/reference/bough-yaml.md").read_text(encoding="utf-8")
SECTIONS: tuple[type[BaseModel], ...] = (
    Environment,
    LimitSet,
    LimitsSection,
    ModelSection,
    RunsSection,
    ServerSection,
    Settings,
    StorageSection,
    TelemetrySection,
)


def test_what_is_committed_is_what_would_be_generated() -> None:
    assert find_stale(generate_files()) == {}


def test_a_file_that_differs_or_is_missing_is_reported_with_its_lines() -> None:
    files = generate_files()
    changed = files["docs/reference/bough-yaml.md"].replace("# bough.yaml", "# Settings", 1)

    differences = find_stale({"docs/reference/bough-yaml.md": changed, "docs/reference/missing.md": "# Missing\n"})

    assert differences["docs/reference/bough-yaml.md"].splitlines()[3:5] == ["-# bough.yaml", "+# Settings"]
    assert differences["docs/reference/missing.md"].endswith("+# Missing")


def test_every_command_and_every_option_is_in_the_reference() -> None:
    rows = section(CLI, "Commands").splitlines()
    for name, command in _commands(typer.main.get_command(make_program())).items():
        row = next((row for row in rows if row.startswith(f"| `bough {name}")), "")
        assert row, f"bough {name} is missing"
        for below in _commands(command):
            assert re.search(rf"`(bough {name} )?{below}\b", row), f"bough {name} {below} is missing"
        for each in [command, *_commands(command).values()]:
            options = {
                option
                for parameter in each.params
                if not parameter.hidden
                for option in parameter.opts
                if option.startswith("--")
            }
            assert sorted(option for option in options if option not in CLI) == []


def _commands(command: TyperCommand | TyperGroup) -> Mapping[str, TyperCommand | TyperGroup]:
    return command.commands if isinstance(command, TyperGroup) else {}


def test_every_field_of_a_definition_is_in_the_reference() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section(AGENT_FIELDS, "AgentDefinition"), re.MULTILINE)

    fields = [field.name.removesuffix("_json") for field in agent_pb2.AgentDefinition.DESCRIPTOR.fields]
    assert rows[: len(fields)] == fields


def test_every_message_and_field_of_an_eval_set_is_in_its_reference() -> None:
    page = (ROOT / "docs/reference/eval-sets.md").read_text(encoding="utf-8")

    for message in eval_set_pb2.DESCRIPTOR.message_types_by_name.values():
        rows = set(re.findall(r"^\| `(\w+)` \|", section(page, message.name), re.MULTILINE))
        assert {field.name.removesuffix("_json") for field in message.fields} <= rows, message.name
    headings = {heading.lower() for heading in re.findall(r"^##+ (\w+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", page)) <= headings


def test_values_of_an_enum_are_in_the_reference_once_and_without_their_prefix() -> None:
    assert section(AGENT_FIELDS, "LinkMode").splitlines()[2:] == [
        "| value | meaning |",
        "|---|---|",
        "| not set | TOOL; TRANSFER for members of a supervisor or a swarm. |",
        "| `TOOL` | By a tool `call_<name>` whose result is the agent's answer. |",
        "| `TRANSFER` | By `transfer_to_agent`: the agent answers instead of the caller. |",
        "",
    ]
    headings = re.findall(r"^##+ (.*)$", AGENT_FIELDS, re.MULTILINE)
    assert len(headings) == len(set(headings))


def test_links_within_the_reference_lead_to_its_headings() -> None:
    headings = {heading.lower() for heading in re.findall(r"^##+ (\w+)$", AGENT_FIELDS, re.MULTILINE)}

    assert set(re.findall(r"\]\(#([^)]*)\)", AGENT_FIELDS)) <= headings


def test_settings_are_in_the_reference_with_their_values_and_defaults() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]* \| [^|]*?) \| ", BOUGH_YAML, re.MULTILINE))

    assert rows["server.port"] == "whole number, 0 to 65535 | `50051`"
    assert rows["server.drain_grace"] == "duration | `10s`"
    assert rows["storage.url"] == "text | `var/bough.db`"
    assert rows["models.NAME.provider"] == "`openai`, `anthropic`, `gemini`, `scripted` or `local` | "
    assert rows["models.NAME.breaker.cooldown"] == "duration | `15s`"
    assert rows["limits.default.model_calls"] == "whole number | `500`"
    assert rows["runs.deltas.max_interval"] == "duration | "


def test_every_setting_has_a_description_and_a_row() -> None:
    keys = set(re.findall(r"^\| `([\w.]+)` \|", BOUGH_YAML, re.MULTILINE))
    describe_fields()

    assert [f"{each.__name__}.{name}" for each, name in undescribed()] == []
    assert {key.partition(".")[0] for key in keys if not key.isupper()} - VARIABLES == set(Settings.model_fields)
    assert {name for key in keys if key.startswith("models.NAME.") for name in [key.split(".")[2]]} == set(
        ModelSection.model_fields
    )
    assert keys >= VARIABLES


VARIABLES = {f"BOUGH_{name.upper()}" for name in Environment.model_fields} | {"NO_COLOR"}


def undescribed() -> Iterator[tuple[type[BaseModel], str]]:
    for each in SECTIONS:
        for name, field in each.model_fields.items():
            if not field.description:
                yield each, name


def section(page: str, heading: str) -> str:
    """A section of a page, without its heading."""
    found = re.search(rf"^##+ {heading}$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_every_decision_is_in_the_index_once_by_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = [page for page in sorted(folder.glob("*.md")) if page.name != "README.md"]
    titles = {page.name: page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ") for page in pages}
    listed = re.findall(r"- \[(.*)\]\((.*)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted((name, title) for title, name in listed) == list(titles.items())
