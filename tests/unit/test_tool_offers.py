"""What is offered of the lists of tool servers: names, checks, rules, digests and the lock."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bough.v1 import tool_pb2
from bough_server.errors import ConfigurationError
from bough_server.tool_servers.config import ToolServerSection
from bough_server.tool_servers.connection import ListedTool
from bough_server.tool_servers.lock import LOCK_FILE, ToolLock, read_lock, write_lock
from bough_server.tool_servers.offers import (
    ServerOffer,
    derive_name,
    digest_of,
    merge_offers,
    offer_tools,
    revision_of,
)

OBJECT = '{"type": "object", "properties": {"text": {"type": "string"}}}'


def section(**rules: object) -> ToolServerSection:
    """The settings of a server, with these rules."""
    return ToolServerSection.model_validate({"mcp": {"command": "notes"}, **rules})


def listed(name: str, **rest: object) -> ListedTool:
    """A tool as a server lists it."""
    fields: dict[str, object] = {"description": f"Does {name}.", "input_schema_json": OBJECT, **rest}
    return ListedTool(name=name, **fields)  # type: ignore[arg-type]


def offer(*tools: ListedTool, name: str = "notes", **rules: object) -> ServerOffer:
    """What a server offers."""
    return offer_tools(name, section(**rules), tools)


def reasons(found: ServerOffer) -> dict[str, str]:
    """The tools that are not offered, with why."""
    return {refused.name: refused.reason for refused in found.refused}


def test_a_tool_is_described_with_its_servers_rules() -> None:
    hints = tool_pb2.ToolHints(read_only=True)
    found = offer(
        listed("search/notes", hints=hints, output_schema_json='{"type":"object"}'),
        requires_approval=["search*"],
        approvers="editors",
        timeout="30s",
    )
    expected = tool_pb2.ToolInfo(
        name="notes_search_notes",
        description="Does search/notes.",
        input_schema_json='{"properties":{"text":{"type":"string"}},"type":"object"}',
        output_schema_json='{"type":"object"}',
        source=tool_pb2.TOOL_SOURCE_MCP,
        requires_approval=True,
        approver_group="editors",
        server="notes",
        server_tool_name="search/notes",
        hints=hints,
        on_recovery=tool_pb2.TOOL_RECOVERY_RETRY,
    )
    expected.timeout.FromSeconds(30)
    expected.digest = digest_of(expected)
    assert found.tools == {"notes_search_notes": expected}
    assert found.refused == []


def test_what_is_stored_for_runs_depends_on_the_rules_and_what_is_reviewed_does_not() -> None:
    loose, strict = (offer(listed("add"), on_recovery={"*": rule}).tools["notes_add"] for rule in ("retry", "fail"))
    assert loose.digest == strict.digest
    assert revision_of(loose) != revision_of(strict)


@given(prefix=st.from_regex(r"[A-Za-z0-9_-]{0,32}", fullmatch=True), name=st.text(min_size=1, max_size=200))
def test_a_name_is_fit_for_every_provider(prefix: str, name: str) -> None:
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", derive_name(prefix, name))


def test_long_names_stay_apart() -> None:
    first, second = derive_name("n_", "x" * 80 + "1"), derive_name("n_", "x" * 80 + "2")
    assert (first[:56], len(first), first == second) == (f"n_{'x' * 53}_", 64, False)


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        (listed("t", input_schema_json="{"), "Its input schema is no JSON."),
        (listed("t", input_schema_json="true"), 'Its input schema must be a JSON Schema of "type": "object".'),
        (
            listed("t", input_schema_json=json.dumps({"type": "object", "description": "x" * 70_000})),
            "Its input schema is larger than 64 KiB.",
        ),
        (
            listed("t", input_schema_json='{"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}'),
            "Its input schema has a pattern that",
        ),
        (
            listed("t", input_schema_json='{"type": "object", "properties": {"a": {"$ref": "https://a.example/b"}}}'),
            "Its input schema must hold only references to its own parts",
        ),
        (listed("t", output_schema_json="[]"), "Its output schema must be a JSON Schema"),
        (listed("t\u200b"), "Its name has control characters or invisible ones."),
        (listed("t\n"), "Its name has control characters or invisible ones."),
        (listed("t", problem="It cannot be called."), "It cannot be called."),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused_alone(tool: ListedTool, reason: str) -> None:
    found = offer(listed("good"), tool)
    assert list(found.tools) == ["notes_good"]
    ((_, why),) = reasons(found).items()
    assert why.startswith(reason)


def test_descriptions_lose_what_is_not_seen_and_are_cut() -> None:
    found = offer(
        listed("hidden", description="Adds\u200b a\u202e note.\nIn\x1b two lines."),
        listed("long", description="x" * 10_000),
        listed("none", description="", title="Says nothing"),
    )
    texts = {name: tool.description for name, tool in found.tools.items()}
    assert texts["notes_hidden"] == "Adds a note.\nIn two lines."
    assert len(texts["notes_long"].encode()) <= 8 * 1024
    assert texts["notes_none"] == "Says nothing"


def test_of_tools_with_one_name_none_is_offered() -> None:
    found = offer(listed("a.b"), listed("a/b"), listed("a b"), listed("c"))
    assert (list(found.tools), sorted(reasons(found))) == (["notes_c"], ["a b", "a.b", "a/b"])
    merged = merge_offers(
        1,
        [offer(listed("x"), listed("y"), prefix=""), offer(listed("x"), name="other", prefix="")],
        taken={"y": "a tool in Python"},
    )
    assert {name: reasons(each) for name, each in merged.servers.items()} == {
        "notes": {
            "x": "The name 'x' is also that of the tool server 'other': set another `prefix` for 'notes'.",
            "y": "The name 'y' is also that of a tool in Python: set another `prefix` for 'notes'.",
        },
        "other": {"x": "The name 'x' is also that of the tool server 'notes': set another `prefix` for 'other'."},
    }
    assert merged.tools_for(None) == {}


def test_patterns_select_tools_and_rules() -> None:
    tools = [listed("search_all"), listed("search_one"), listed("create"), listed("drop")]
    found = offer(
        *tools,
        tools=["search_*", "create"],
        on_recovery={"search_one": "fail", "search_*": "retry", "*": "ask"},
        tenants=["acme"],
    )
    assert {name: tool_pb2.ToolRecovery.Name(tool.on_recovery)[14:] for name, tool in found.tools.items()} == {
        "notes_create": "ASK",
        "notes_search_all": "RETRY",
        "notes_search_one": "FAIL",
    }
    merged = merge_offers(1, [found], taken={})
    assert [len(merged.tools_for(tenant)) for tenant in (None, "acme", "other")] == [3, 3, 0]


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = offer(listed("b", output_schema_json=OBJECT), listed("a", hints=tool_pb2.ToolHints(idempotent=True)))
    write_lock(tmp_path / LOCK_FILE, found.tools.values())
    lines = (tmp_path / LOCK_FILE).read_text(encoding="utf-8").splitlines()
    assert (len(lines), json.loads(lines[1].removesuffix(","))["name"]) == (4, "notes_a")
    lock = read_lock(tmp_path / LOCK_FILE)
    assert lock is not None
    assert lock.apply(ServerOffer(name="notes", section=section(), is_listed=False)).tools == found.tools
    assert list(lock.compare(found.tools, ["notes"])) == []
    assert read_lock(tmp_path / "other.json") is None


def test_what_differs_from_the_lock_is_not_offered() -> None:
    reviewed = offer(listed("a"), listed("b"), listed("c"))
    lock = ToolLock(tools=reviewed.tools)
    found = offer(listed("a"), listed("b", description="Does b, and more."), listed("d"))
    applied = lock.apply(found)
    assert (list(applied.tools), reasons(applied)) == (
        ["notes_a"],
        {
            "b": "Its description differs from tools.lock.json. Review it, then run `bough tools lock`.",
            "d": "It is not in tools.lock.json. Review it, then run `bough tools lock`.",
        },
    )
    assert list(lock.compare(found.tools, ["notes"])) == [
        "~ notes_b: Its description differs from tools.lock.json.",
        "- notes_c: It is locked, and its server does not offer it any more.",
        "+ notes_d: It is not in tools.lock.json.",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not as `bough tools lock` writes it"),
        ('{"version": 2, "tools": []}', "has version 2, and this Bough reads 1"),
        ('{"version": 1, "tools": [{"name": "a"}]}', "is not as `bough tools lock` writes it"),
    ],
)
def test_a_lock_that_cannot_be_read_is_a_mistake_of_the_operator(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=problem):
        read_lock(tmp_path / LOCK_FILE)


def test_a_lock_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    write_lock(tmp_path / LOCK_FILE, offer(listed("a")).tools.values())
    text = (tmp_path / LOCK_FILE).read_text(encoding="utf-8")
    (tmp_path / LOCK_FILE).write_text(text.replace("Does a.", "Does b."), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="'notes_a' was changed by hand"):
        read_lock(tmp_path / LOCK_FILE)


@pytest.mark.parametrize(
    ("mcp", "problem"),
    [
        ({}, "needs `command`, a program to start, or `url`"),
        ({"command": "a", "url": "https://a.example"}, "and not both"),
        ({"command": "a", "token_env": "T"}, "has a command, which takes no token_env"),
        ({"url": "https://a.example", "env": ["A"], "args": ["b"]}, "has a url, which takes no args and no env"),
        ({"url": "https://a.example", "token_env": "T", "token_file": "t"}, "two places of one token"),
        ({"url": "https://a.example", "token_env": "secret-value"}, "the name of an environment variable"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(mcp: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ToolServerSection.model_validate({"mcp": mcp})
