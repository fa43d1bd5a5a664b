"""The reference tables of docs/ match the code: errors, events, settings and layers; links lead somewhere."""

import re
import tomllib
from pathlib import Path

from google.rpc import code_pb2

from bough.v1 import error_pb2
from bough.v1.event_pb2 import AgentEvent
from bough_server.errors import CallError
from bough_server.log.events import NAME_OF_KIND

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([a-z, ]+) \| ([A-Z_]*) ?\|", re.MULTILINE)
METADATA = re.compile(r"^\| `([A-Z_]+)` \|.*\|([^|]*)\|$", re.MULTILINE)


def test_every_error_reason_is_in_the_table_once() -> None:
    rows = [name for name, _, _ in ROW.findall(_text("docs/reference/errors.md"))]

    known = [name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.DESCRIPTOR.values_by_name]

    assert rows == [name for name in known if name != "UNSPECIFIED"]


def test_the_table_gives_the_code_of_every_failed_call() -> None:
    codes = {
        name: code
        for name, where, code in ROW.findall(_text("docs/reference/errors.md"))
        if "call" in where.split(", ")
    }

    errors: list[type[CallError]] = [CallError]
    for error in errors:
        errors += error.__subclasses__()
    raised = {_name(error): code_pb2.Code.Name(error.code) for error in errors}

    # One more is raised with another reason: a page token of another listing.
    assert codes == {**raised, "INVALID_PAGE_TOKEN": "INVALID_ARGUMENT"}


def test_the_table_names_the_metadata_that_the_schema_promises() -> None:
    schema = _text("proto/bough/v1/error.proto").partition("enum ErrorReason {")[2]
    documented = dict(METADATA.findall(_text("docs/reference/errors.md").partition("| ErrorReason |")[2]))

    promised = {}
    for comment, name in re.findall(r"((?: *//.*\n)+) *ERROR_REASON_([A-Z_]+) =", schema):
        said = " ".join(line.strip(" /") for line in comment.splitlines())
        keys = re.search(r"Metadata(, [^:]*)?: (.*)", said)
        promised[name] = {key for key in _METADATA_KEYS if keys and re.search(rf"\b{key}\b", keys[2])}

    assert {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in documented.items()} == {
        name: keys for name, keys in promised.items() if name != "UNSPECIFIED"
    }
    assert set().union(*promised.values()) == _METADATA_KEYS


def test_every_event_is_in_the_reference_once_with_its_payload() -> None:
    rows = re.findall(r"^\| `(agent\.[a-z_.]+)` \| `([a-z_]+)` \|", _text("docs/reference/events.md"), re.MULTILINE)

    payloads = AgentEvent.DESCRIPTOR.oneofs_by_name["payload"].fields
    assert rows == [(NAME_OF_KIND[field.number], field.name) for field in payloads]


def test_links_between_pages_lead_to_files_and_headings() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]

    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not _leads_somewhere(page, link)] == []


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in {re.sub(r"[^a-z0-9 _-]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_house_in_the_docs_has_the_layers_that_are_enforced() -> None:
    contracts = tomllib.loads(_text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    enforced = {name for layer in layers for name in re.split(r" *[|:] *", layer)}

    rows = re.findall(r"^\| (`.*?`) \|", _text("docs/explanation/architecture.md"), re.MULTILINE)

    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} == enforced


_METADATA_KEYS = {
    *("evaluation_id", "input_id", "last_sequence", "name", "nearest", "quota", "revision", "run_id", "session_id"),
    "source",
}


def _name(error: type[CallError]) -> str:
    return error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
