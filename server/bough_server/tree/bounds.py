"""Size limits of a record. The longest texts are truncated first; the tree keeps its shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeAlias

from google.protobuf.message import Message

from bough.v1 import error_pb2, invocation_pb2, message_pb2

MAX_AGENTS: Final = 1_000
MAX_TOOLS: Final = 2_000
MAX_TOOL_BYTES: Final = 4 * 1024
MAX_BYTES: Final = 3_584 * 1024
"""3.5 MiB: with its framing, less than the 4 MiB that gRPC clients accept by default."""

_LEGIBLE: Final = 64
"""Bytes that texts keep as long as it is enough to leave out steps, tools and agents."""

_MARK_BYTES: Final = 12
"""The most bytes that marking a text as cut adds."""

_LAST_TO_GO: Final = (
    "error",
    "user_content",
    "final_response",
    "agent",
    "forked_from",
    "session_id",
    "run_id",
    "invocation_id",
)

_ELLIPSIS_BYTES: Final = len("…".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much of a record to return, with the defaults filled in."""

    include_steps: bool
    max_agents: int
    max_tools: int
    max_tool_args_bytes: int
    max_tool_result_bytes: int
    max_bytes: int

    @classmethod
    def of(cls, options: invocation_pb2.InvocationOptions | None) -> "Bounds":
        """Return the bounds of options; absent ones have their defaults, negative ones become 0."""
        given = {} if options is None else {field.name: value for field, value in options.ListFields()}
        return cls(
            include_steps=given.get("include_steps", False),
            max_agents=max(0, given.get("max_agents", MAX_AGENTS)),
            max_tools=max(0, given.get("max_tools", MAX_TOOLS)),
            max_tool_args_bytes=max(0, given.get("max_tool_args_bytes", MAX_TOOL_BYTES)),
            max_tool_result_bytes=max(0, given.get("max_tool_result_bytes", MAX_TOOL_BYTES)),
            max_bytes=max(0, given.get("max_bytes", MAX_BYTES)),
        )


def head(text: str, limit: int) -> tuple[str, bool]:
    """Return the text's first `limit` bytes of UTF-8, cut between characters, and whether anything was cut."""
    if len(text) * 4 <= limit:  # a character takes at most four bytes: most texts need not be encoded
        return text, False
    data = text.encode()
    if len(data) <= limit:
        return text, False
    return data[:limit].decode(errors="ignore"), True


def fit(invocation: invocation_pb2.Invocation, max_bytes: int) -> None:
    """Shrink a record, in place, until it serializes to at most `max_bytes`; from 1,024 on that always succeeds.

    The longest texts are cut first, all to one length and each marked. Then steps, tools, agents and intermediate
    responses are left out from the end, and their totals kept. Finally the other fields without a fixed size are
    cleared one by one.
    """
    if invocation.ByteSize() <= max_bytes:
        return
    _level_texts(invocation, max_bytes, floor=_LEGIBLE)
    for name in ("steps", "tools", "agents", "intermediate_responses"):
        _leave_out(invocation, name, max_bytes)
    _clear(invocation, ("anomalies", "labels"), max_bytes)
    if invocation.ByteSize() > max_bytes:
        _level_texts(invocation, max_bytes, floor=0)
    _clear(invocation, _LAST_TO_GO, max_bytes)


def _leave_out(invocation: invocation_pb2.Invocation, name: str, max_bytes: int) -> None:
    excess = invocation.ByteSize() - max_bytes
    items = getattr(invocation, name)
    if excess <= 0 or not items:
        return
    keep = len(items)
    while keep and excess > 0:
        keep -= 1
        excess -= items[keep].ByteSize() + 2  # its tag and its length take two bytes at least
    del items[keep:]


def _clear(invocation: invocation_pb2.Invocation, names: Sequence[str], max_bytes: int) -> None:
    fields: Message = invocation
    for name in names:
        if invocation.ByteSize() > max_bytes:
            fields.ClearField(name)
            del invocation.anomalies[:]  # they have no fixed size either; the one that is added says why
            invocation.anomalies.add(
                kind=invocation_pb2.ANOMALY_KIND_CUT,
                message="Parts of this record were left out because they do not fit max_bytes.",
            )


_Place: TypeAlias = tuple[Message, str, Message | None, str]
"""A text's message and field, and the message and flag that mark it as cut."""

_TRUNCATED: Final = "truncated"
_OBJECTS: Final = frozenset({"details_json", "metadata_json", "extra_json", "provider_json"})
"""Fields whose text is one JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """A text of a record, and the flag that marks it as cut; the text of an error has no flag and ends with "…"."""

    holder: Message
    field: str
    size: int
    marked: Message | None
    flag: str

    def truncate(self, limit: int) -> None:
        """Cut the text to `limit` bytes and mark it. Bytes and JSON objects are useless in part and become empty."""
        value = getattr(self.holder, self.field)
        if isinstance(value, bytes) or self.field in _OBJECTS:
            self.holder.ClearField(self.field)
        elif self.marked is None:
            ellipsis = "…" if limit >= _ELLIPSIS_BYTES else ""
            setattr(self.holder, self.field, head(value, max(0, limit - _ELLIPSIS_BYTES))[0] + ellipsis)
        else:
            setattr(self.holder, self.field, head(value, limit)[0])
        if isinstance(self.marked, message_pb2.Part | message_pb2.ToolResult):
            self.marked.original_bytes = self.marked.original_bytes or self.size
        if self.marked is not None:
            setattr(self.marked, self.flag, True)


def _level_texts(invocation: invocation_pb2.Invocation, max_bytes: int, *, floor: int) -> None:
    """Cut every longer text to one level: the highest, at least `floor` bytes, at which the record fits."""
    excess = invocation.ByteSize() - max_bytes
    texts = sorted(_texts(invocation, longer_than=floor), key=attrgetter("size"), reverse=True)
    level, longer = floor, 0
    for count, text in enumerate(texts, start=1):
        longer += text.size
        following = texts[count].size if count < len(texts) else 0
        level = (longer - count * _MARK_BYTES - excess) // count
        if level >= following:
            break
    level = max(floor, level)
    for text in texts:
        if text.size <= level:
            break
        text.truncate(level)


def _texts(invocation: invocation_pb2.Invocation, *, longer_than: int) -> Iterator[_Text]:
    """Yield the texts longer than `longer_than` bytes; there may be hundreds of thousands of shorter ones."""
    for holder, field, marked, flag in _places(invocation):
        value = getattr(holder, field)
        size = len(value) if isinstance(value, bytes) or value.isascii() else len(value.encode())
        if size > longer_than:
            yield _Text(holder=holder, field=field, size=size, marked=marked, flag=flag)


def _places(invocation: invocation_pb2.Invocation) -> Iterator[_Place]:
    for message in (invocation.user_content, invocation.final_response, *invocation.intermediate_responses):
        yield from _places_in_message(message)
    yield from _places_in_error(invocation.error)
    for agent in invocation.agents:
        yield from _places_in_message(agent.input)
        yield from _places_in_message(agent.output)
        yield agent.settings, "extra_json", None, ""
        yield from _places_in_error(agent.error)
    for tool in invocation.tools:
        yield tool, "arguments_json", tool, "arguments_truncated"
        yield tool, "executed_arguments_json", tool, "executed_arguments_truncated"
        yield tool, "result_json", tool, "result_truncated"
        yield from _places_in_error(tool.error)
    for step in invocation.steps:
        yield from _places_in_message(step.llm_response.message)
        for result in step.tool_results:
            yield from _places_in_result(result)


def _places_in_message(message: message_pb2.Message) -> Iterator[_Place]:
    yield message, "metadata_json", None, ""
    for part in message.parts:
        yield from _places_in_part(part)


def _places_in_part(part: message_pb2.Part) -> Iterator[_Place]:
    yield part, "metadata_json", None, ""
    content = part.WhichOneof("content")
    if content in ("text", "data_json"):
        yield part, content, part, _TRUNCATED
    elif content == "reasoning":
        for field in ("text", "signature", "encrypted"):
            yield part.reasoning, field, part, _TRUNCATED
        yield part.reasoning, "provider_json", None, ""
    elif content == "blob":
        source = part.blob.WhichOneof("source")
        if source:
            yield part.blob, source, part, _TRUNCATED
    elif content == "tool_call":
        yield part.tool_call, "arguments_json", part, _TRUNCATED
        yield part.tool_call, "provider_json", None, ""
    elif content == "tool_result":
        yield from _places_in_result(part.tool_result)


def _places_in_result(result: message_pb2.ToolResult) -> Iterator[_Place]:
    yield result.call, "arguments_json", result, _TRUNCATED
    yield from _places_in_error(result.error)
    for part in result.parts:
        yield from _places_in_part(part)


def _places_in_error(error: error_pb2.AgentError) -> Iterator[_Place]:
    yield error, "message", None, ""
    yield error, "details_json", None, ""
