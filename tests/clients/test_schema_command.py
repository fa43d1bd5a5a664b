"""`bough schema`: the JSON Schemas for editors."""

import json
from pathlib import Path

import pytest

from tests.clients.cli_process import bough


@pytest.mark.parametrize(
    ("kind", "title"),
    [("bough.yaml", "bough.yaml"), ("agent", "A definition of a Bough agent"), ("eval", "A Bough eval set")],
)
async def test_a_schema_is_printed_and_its_file_is_named(kind: str, title: str) -> None:
    printed = await bough("schema", kind)
    named = await bough("schema", kind, "--path")

    assert (printed.code, named.code) == (0, 0)
    assert json.loads(printed.out)["title"] == title
    assert _text(named.out.strip()) == printed.out


async def test_a_kind_without_a_schema_is_a_usage_error() -> None:
    refused = await bough("schema", "script")

    assert refused.code == 2
    assert "'bough.yaml', 'agent', 'eval'" in refused.err


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
