"""The tools that are offered to agents, made of the lists of tool servers: names, checks, rules and digests."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from bough.v1 import tool_pb2
from bough_server.matching.schemas import pattern_problem, value_schema_problem
from bough_server.plain_text import escape_controls, printable
from bough_server.tool_servers.config import OnOutcomeUnknown, ToolServerSection, matches_any
from bough_server.tool_servers.connection import ListedTool
from bough_server.truncation import truncate_text

MOST_TOOLS: Final = 128
"""The most tools that one agent may have, linked agents included: some providers take no more."""

MAX_SCHEMA_BYTES: Final = 64 * 1024
MAX_DESCRIPTION_BYTES: Final = 8 * 1024
_MAX_NAME: Final = 64
_KEPT_NAME: Final = 55
_LONGEST_OWN_NAME: Final = 512
_MOST_REFUSED: Final = 100

_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]")
_INVISIBLE: Final = re.compile(r"[\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]")
"""Characters that are not seen, but that models read."""

_RECOVERY: Final[Mapping[OnOutcomeUnknown, tool_pb2.ToolRecovery.ValueType]] = {
    "retry": tool_pb2.TOOL_RECOVERY_RETRY,
    "fail": tool_pb2.TOOL_RECOVERY_FAIL,
    "ask": tool_pb2.TOOL_RECOVERY_ASK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOffer:
    """What one tool server offers."""

    name: str
    section: ToolServerSection
    is_listed: bool
    """Whether its tools are known, from its list or from the lock."""
    tools: Mapping[str, tool_pb2.ToolInfo] = field(default_factory=dict)
    """The tools by the names under which agents call them, sorted."""
    own: Mapping[str, tool_pb2.ToolInfo] = field(default_factory=dict)
    """The same tools as their server describes them, without the operator's rules, and perhaps others."""
    refused: Sequence[tool_pb2.RefusedTool] = ()


def offer_tools(name: str, section: ToolServerSection, listed: Iterable[ListedTool]) -> ServerOffer:
    """Return what a tool server offers of a list: the tools that the section selects and that nothing is wrong with."""
    tools: dict[str, tool_pb2.ToolInfo] = {}
    own: dict[str, tool_pb2.ToolInfo] = {}
    refused: dict[str, str] = {}
    taken: dict[str, str] = {}
    for each in listed:
        if not matches_any(each.name, section.tools):
            continue
        offered = derive_name(section.prefix_of(name), each.name)
        if problem := each.problem or _find_problem(each):
            refused[each.name] = problem
        elif offered in taken:
            tools.pop(offered, None)
            for one in (taken[offered], each.name):
                refused[one] = (
                    f"{taken[offered]!r} and {each.name!r} have one name for agents, {offered!r}: remove one of them."
                )
        else:
            taken[offered] = each.name
            own[offered] = _describe(each, offered, name)
            tools[offered] = apply_rules(own[offered], section)
    return ServerOffer(
        name=name,
        section=section,
        is_listed=True,
        tools=dict(sorted(tools.items())),
        own=own,
        refused=list_refusals(refused),
    )


def list_refusals(reasons: Mapping[str, str]) -> list[tool_pb2.RefusedTool]:
    """Return refused tools by name; control characters of the name are escaped."""
    return [tool_pb2.RefusedTool(name=_clean_name(name), reason=reason) for name, reason in sorted(reasons.items())]


def limit_refusals(refused: Sequence[tool_pb2.RefusedTool]) -> Sequence[tool_pb2.RefusedTool]:
    """Return as many refused tools as ToolServerInfo has."""
    return refused[:_MOST_REFUSED]


def _clean_name(name: str) -> str:
    return escape_controls(_INVISIBLE.sub("?", name))[:_LONGEST_OWN_NAME]


def derive_name(prefix: str, name: str) -> str:
    """Return the name under which agents call a tool: fit for every provider, and at most 64 characters."""
    fit = _UNFIT.sub("_", f"{prefix}{name}")
    if not re.match(r"[A-Za-z_]", fit):
        fit = f"_{fit}"
    if len(fit) <= _MAX_NAME:
        return fit
    whole = hashlib.sha256(f"{prefix}{name}".encode("utf-8", "replace")).hexdigest()
    return f"{fit[:_KEPT_NAME]}_{whole[:8]}"


def _find_problem(listed: ListedTool) -> str:
    """Return why a tool cannot be offered, in a sentence; empty if it can."""
    if not listed.name or len(listed.name) > _LONGEST_OWN_NAME:
        return f"Its name must have 1 to {_LONGEST_OWN_NAME} characters."
    if _INVISIBLE.search(listed.name) or not listed.name.isprintable():
        return "Its name has control characters or invisible ones."
    return _find_schema_problem("input", listed.input_schema_json) or (
        _find_schema_problem("output", listed.output_schema_json) if listed.output_schema_json else ""
    )


@lru_cache(maxsize=1024)
def _find_schema_problem(which: str, schema_json: str) -> str:
    if len(schema_json) > MAX_SCHEMA_BYTES:
        return f"Its {which} schema is larger than {MAX_SCHEMA_BYTES // 1024} KiB."
    try:
        schema = json.loads(schema_json)
    except (ValueError, RecursionError):
        return f"Its {which} schema is no JSON."
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return f'Its {which} schema must be a JSON Schema of "type": "object".'
    problem = value_schema_problem(schema, is_bounded=True) or pattern_problem(schema)
    return f"Its {which} schema {problem}" if problem else ""


def _describe(listed: ListedTool, offered: str, server: str) -> tool_pb2.ToolInfo:
    description = _INVISIBLE.sub("", printable(listed.description or listed.title or listed.name))
    info = tool_pb2.ToolInfo(
        name=offered,
        description=truncate_text(description.strip() or offered, MAX_DESCRIPTION_BYTES),
        input_schema_json=canonical_json(listed.input_schema_json),
        output_schema_json=canonical_json(listed.output_schema_json) if listed.output_schema_json else "",
        server=server,
        server_tool_name=listed.name,
        hints=listed.hints,
        on_recovery=listed.on_recovery,
        requires_approval=listed.requires_approval,
    )
    if listed.timeout is not None:
        info.timeout.FromNanoseconds(round(listed.timeout * 1e9))
    return info


def apply_rules(own: tool_pb2.ToolInfo, section: ToolServerSection) -> tool_pb2.ToolInfo:
    """Return a tool with the operator's rules for it, and its digest; `own` is what its server describes."""
    info = tool_pb2.ToolInfo()
    info.CopyFrom(own)
    info.source = tool_pb2.TOOL_SOURCE_MCP if section.mcp is not None else tool_pb2.TOOL_SOURCE_REMOTE
    info.requires_approval = own.requires_approval or matches_any(own.server_tool_name, section.requires_approval)
    info.approver_group = section.approvers or ""
    if not own.HasField("timeout"):
        info.timeout.FromNanoseconds(round(section.timeout * 1e9))
    info.on_recovery = _recovery_of(own, section)
    info.digest = digest_of(own)
    return info


def _recovery_of(own: tool_pb2.ToolInfo, section: ToolServerSection) -> tool_pb2.ToolRecovery.ValueType:
    for pattern, rule in section.on_recovery.items():
        if fnmatchcase(own.server_tool_name, pattern):
            return _RECOVERY[rule]
    if own.on_recovery in _RECOVERY.values():
        return own.on_recovery
    # By ToolService calls with an equal key have an equal outcome; MCP has no keys.
    is_safe = section.trust_hints and (own.hints.read_only or own.hints.idempotent)
    is_repeatable = section.grpc is not None or is_safe
    return tool_pb2.TOOL_RECOVERY_RETRY if is_repeatable else tool_pb2.TOOL_RECOVERY_FAIL


def canonical_json(text: str) -> str:
    """Return a JSON text in its canonical form: sorted, without white space."""
    return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(info: tool_pb2.ToolInfo) -> str:
    """Return the SHA-256 of what models and reviewers see of a tool."""
    seen = (info.server, info.server_tool_name, info.name, info.description, info.input_schema_json)
    return hashlib.sha256("\0".join((*seen, info.output_schema_json)).encode()).hexdigest()


def revision_of(info: tool_pb2.ToolInfo) -> str:
    """Return the key under which a tool is stored for the runs that use it: a hash of all that it is."""
    return f"tool-{hashlib.sha256(info.SerializeToString(deterministic=True)).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """What all tool servers offer at one time. Immutable: a new list makes a new one."""

    version: int = 0
    servers: Mapping[str, ServerOffer] = field(default_factory=dict)
    """By name, sorted; those that offer nothing included."""

    def visible_to(self, tenant_id: str | None) -> Mapping[str, ServerOffer]:
        """Return the tool servers that a tenant may use; None for all."""
        return {
            name: offer
            for name, offer in self.servers.items()
            if tenant_id is None or offer.section.is_visible_to(tenant_id)
        }

    def tools_for(self, tenant_id: str | None) -> Mapping[str, tool_pb2.ToolInfo]:
        """Return the tools that a tenant may use, by name; None for all."""
        visible = self.visible_to(tenant_id)
        return {name: info for offer in visible.values() for name, info in offer.tools.items()}


def merge_offers(version: int, offers: Iterable[ServerOffer], *, taken: Mapping[str, str]) -> Offers:
    """Return what all servers offer together; `taken` are names of other tools, each with what has it.

    A name that two servers offer, or that is taken, is offered by none of the servers.
    """
    every = sorted(offers, key=lambda offer: offer.name)
    owners: dict[str, list[str]] = {}
    for offer in every:
        for name in offer.tools:
            owners.setdefault(name, []).append(f"the tool server {offer.name!r}")
    return Offers(
        version=version, servers={offer.name: _drop_doubles(offer, owners=owners, taken=taken) for offer in every}
    )


def _drop_doubles(offer: ServerOffer, *, owners: Mapping[str, Sequence[str]], taken: Mapping[str, str]) -> ServerOffer:
    kept: dict[str, tool_pb2.ToolInfo] = {}
    reasons = {refused.name: refused.reason for refused in offer.refused}
    for name, info in offer.tools.items():
        others = [each for each in owners[name] if each != f"the tool server {offer.name!r}"]
        if name in taken:
            others.append(taken[name])
        if others:
            hint = f"set another `prefix` for {offer.name!r}"
            reasons[info.server_tool_name] = f"The name {name!r} is also that of {' and '.join(others)}: {hint}."
        else:
            kept[name] = info
    return replace(offer, tools=kept, refused=list_refusals(reasons))
