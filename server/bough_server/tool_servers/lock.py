"""`tools.lock.json`: the tools of tool servers that the operator has reviewed; no other tool is offered then."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bough.v1 import tool_pb2
from bough_server.documents.files import write_whole
from bough_server.errors import ConfigurationError
from bough_server.tool_servers.config import ToolServerSection, matches_any
from bough_server.tool_servers.offers import ServerOffer, apply_rules, digest_of, list_refusals

LOCK_FILE: Final = "tools.lock.json"
_VERSION: Final = 1

_SEEN: Final = {
    "description": "description",
    "input_schema_json": "input schema",
    "output_schema_json": "output schema",
    "server_tool_name": "name at its server",
}
"""What a digest is made of beside the server and the name, each in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLock:
    """Reviewed tools by their names, without the operator's rules for them."""

    tools: Mapping[str, tool_pb2.ToolInfo]

    def apply(self, offer: ServerOffer) -> ServerOffer:
        """Return an offer without the tools that were not reviewed, or that differ from what was.

        If the server's tools are not known, the reviewed ones are offered.
        """
        if not offer.is_listed:
            return replace(offer, is_listed=True, tools=self._tools_of(offer.name, offer.section))
        reasons = {refused.name: refused.reason for refused in offer.refused}
        kept: dict[str, tool_pb2.ToolInfo] = {}
        for name, info in offer.tools.items():
            if change := explain_change(self.tools.get(name), info):
                reasons[info.server_tool_name] = f"{change} Review it, then run `bough tools lock`."
            else:
                kept[name] = info
        return replace(offer, tools=kept, refused=list_refusals(reasons))

    def _tools_of(self, server: str, section: ToolServerSection) -> Mapping[str, tool_pb2.ToolInfo]:
        return {
            name: apply_rules(info, section)
            for name, info in sorted(self.tools.items())
            if info.server == server and matches_any(info.server_tool_name, section.tools)
        }

    def compare(self, found: Mapping[str, tool_pb2.ToolInfo], servers: Iterable[str]) -> Iterator[str]:
        """Yield a line for each tool of some servers that differs from what was found there, is new, or is gone."""
        checked = set(servers)
        for name in sorted({*found, *(name for name, info in self.tools.items() if info.server in checked)}):
            here, there = self.tools.get(name), found.get(name)
            if there is None:
                yield f"- {name}: It is locked, and its server does not offer it any more."
            elif change := explain_change(here, there):
                yield f"{'+' if here is None else '~'} {name}: {change}"


def explain_change(reviewed: tool_pb2.ToolInfo | None, found: tool_pb2.ToolInfo) -> str:
    """Return how a tool differs from the reviewed one, in a sentence; empty if it does not."""
    if reviewed is None:
        return f"It is not in {LOCK_FILE}."
    if reviewed.server != found.server:
        return f"It is in {LOCK_FILE} as a tool of {reviewed.server!r}, not of {found.server!r}."
    changed = [words for field, words in _SEEN.items() if getattr(reviewed, field) != getattr(found, field)]
    return f"Its {' and its '.join(changed)} differs from {LOCK_FILE}." if changed else ""


def read_lock(path: Path) -> ToolLock | None:
    """Return the lock in a file; None if there is no such file. Raises ConfigurationError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"{path}: The lock of tools cannot be read: {error}.") from None
    try:
        document = json.loads(text)
        if document["version"] != _VERSION:
            raise ConfigurationError(
                f"{path}: The lock of tools has version {document['version']!r}, and this Bough reads {_VERSION}."
            )
        tools = [_parse(entry) for entry in document["tools"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"{path}: The lock of tools is not as `bough tools lock` writes it ({type(error).__name__}: {error}). "
            "Restore it, or remove it and run `bough tools lock`."
        ) from None
    for info, entry in zip(tools, document["tools"], strict=True):
        if digest_of(info) != entry["digest"]:
            raise ConfigurationError(
                f"{path}: The entry of {info.name!r} was changed by hand: its digest does not match. Run "
                "`bough tools lock`."
            )
    return ToolLock(tools={info.name: info for info in tools})


def _parse(entry: Mapping[str, Any]) -> tool_pb2.ToolInfo:
    definition = entry["definition"]
    return tool_pb2.ToolInfo(
        name=entry["name"],
        server=entry["server"],
        server_tool_name=definition["name"],
        description=definition["description"],
        input_schema_json=_write_json(definition["input_schema"]),
        output_schema_json=_write_json(definition["output_schema"]) if "output_schema" in definition else "",
        hints=tool_pb2.ToolHints(**definition.get("hints", {})),
        on_recovery=tool_pb2.ToolRecovery.Value(definition.get("on_recovery", "TOOL_RECOVERY_UNSPECIFIED")),
        requires_approval=definition.get("requires_approval", False),
        timeout=definition.get("timeout"),
    )


def write_lock(path: Path, tools: Iterable[tool_pb2.ToolInfo]) -> None:
    """Write tools, as their servers describe them, as reviewed ones: JSON, sorted, one tool a line."""
    entries = sorted(tools, key=lambda info: (info.server, info.name))
    lines = ",\n".join(_write_json(_entry(info)) for info in entries)
    write_whole(path, f'{{"version": {_VERSION}, "tools": [\n{lines}\n]}}\n')


def _entry(info: tool_pb2.ToolInfo) -> dict[str, object]:
    definition: dict[str, object] = {
        "name": info.server_tool_name,
        "description": info.description,
        "input_schema": json.loads(info.input_schema_json),
        "hints": {field.name: value for field, value in info.hints.ListFields()},
    }
    if info.output_schema_json:
        definition["output_schema"] = json.loads(info.output_schema_json)
    if info.on_recovery:
        definition["on_recovery"] = tool_pb2.ToolRecovery.Name(info.on_recovery)
    if info.requires_approval:
        definition["requires_approval"] = True
    if info.HasField("timeout"):
        definition["timeout"] = {"seconds": info.timeout.seconds, "nanos": info.timeout.nanos}
    return {"server": info.server, "name": info.name, "digest": digest_of(info), "definition": definition}


def _write_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
