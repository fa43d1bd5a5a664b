"""The reference tables of docs/ say what the code does: every error and its code, every setting and every layer."""

import re
import tomllib
from pathlib import Path
from typing import get_args

from google.rpc import code_pb2
from pydantic import BaseModel

from bough.v1 import error_pb2
from bough_server.errors import CallError
from bough_server.settings import Settings
from bough_server.settings_sections import LimitSet

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([a-z, ]+) \| ([A-Z_]*) ?\|", re.MULTILINE)
KEY = re.compile(r"^\| `([a-zA-Z_.]+)` \|", re.MULTILINE)


def test_every_error_reason_is_in_the_table_once() -> None:
    rows = [name for name, _, _ in ROW.findall(_text("docs/protocol.md"))]

    known = [name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.DESCRIPTOR.values_by_name]

    assert rows == [name for name in known if name != "UNSPECIFIED"]


def test_the_table_gives_the_code_of_every_failed_call() -> None:
    codes = {name: code for name, where, code in ROW.findall(_text("docs/protocol.md")) if "call" in where.split(", ")}

    errors: list[type[CallError]] = [CallError, *CallError.__subclasses__()]
    raised = {_name(error): code_pb2.Code.Name(error.code) for error in errors}

    # Two more are raised with a reason of their own: an unknown agent and a page token of another listing.
    assert codes == {**raised, "UNKNOWN_AGENT": "NOT_FOUND", "INVALID_PAGE_TOKEN": "INVALID_ARGUMENT"}


def test_the_house_in_the_docs_has_the_layers_that_are_enforced() -> None:
    contracts = tomllib.loads(_text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    enforced = {name for layer in layers for name in re.split(r" *[|:] *", layer)}

    rows = re.findall(r"^\| (`.*?`) \|", _text("docs/architecture.md"), re.MULTILINE)

    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} == enforced


def test_every_setting_is_in_the_reference_and_no_other() -> None:
    documented = set(KEY.findall(_text("docs/operations.md").partition("| variable |")[0]))

    assert documented == set(_keys(Settings, "")) - {f"limits.maximum.{name}" for name in _LIMITS} | {"limits.maximum"}


_LIMITS = tuple(LimitSet.model_fields)


def _keys(section: type[BaseModel], prefix: str) -> list[str]:
    found: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        path = f"{prefix}{name}.NAME" if name == "models" else f"{prefix}{name}"
        found.extend(_keys(inner, f"{path}.") if inner else [path])
    return found


def _section(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section(each))), None)


def _name(error: type[CallError]) -> str:
    return error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
