"""The messages that an agent sees: its session and transcript, under the history policy of its definition.

An agent sees the session up to the run's cut, the messages of each invocation above before the call (without open
calls), and its own. A call of a linked agent appears to its caller as the call and its result, to others as the
messages that the agents exchanged; with scope CALLS it appears to all as the call, except to agents that it led to.
Summaries are not included.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from bough.v1 import agent_pb2, message_pb2
from bough.v1.agent_pb2 import AgentDefinition, AgentLink, HistoryPolicy
from bough_server.history.rewrite import Rewriter, as_context
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.ids import agent_chain
from bough_server.messages import calls_of, copy_of
from bough_server.models.model import MessageForms
from bough_server.truncation import truncate_result

Call = tuple[str, str]
"""The invocation that made a tool call, and the call's id."""

_IsExchange: TypeAlias = Callable[[HistoryEntry, message_pb2.ToolResult], bool]
"""True for a result that a reader does not see, as it sees the messages that caller and called agent exchanged."""

CALL_PREFIX: Final = "call_"
"""What the name of the tool that calls a linked agent begins with, before the agent's name."""

NO_CALLS: Final[frozenset[Call]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleMessage:
    """A message as its reader sees it: the reader's own and the user's in native roles, all others rewritten."""

    message: message_pb2.Message
    position: int = 0
    """The position in the session of its source, from 1; 0 for a message of the run."""
    starts_exchange: bool = False
    """True if an exchange starts with it: the input of a user or a caller to the reader."""
    is_again: bool = False
    """True if a summary replaces it already: it is the last input, and is repeated after the summary."""
    asks: frozenset[Call] = NO_CALLS
    """The calls in its source, even if the rewritten message does not name them."""
    answers: Call | None = None
    """The call whose result its source is."""
    forms: MessageForms = field(init=False, repr=False, compare=False)
    """What requests compute from `message`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "forms", MessageForms(self.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The agent that sees a history: its place in the agent tree, its scope, and how it sees others' messages."""

    agent: str
    chains: frozenset[str]
    """Its own chain, and those of the invocations above it."""
    scope: message_pb2.HistoryScope.ValueType
    rewrite: Rewriter = as_context
    trim: Callable[[message_pb2.Message], list[message_pb2.Message]] | None = None
    """Returns what it sees of a message that it sees, if that is not the message itself."""

    @property
    def opens(self) -> "Callable[[Transcript], bool]":
        """Return whether it sees what was said inside of a call."""
        is_narrow = self.scope == message_pb2.HISTORY_SCOPE_CALLS
        return (lambda child: child.chain in self.chains) if is_narrow else _always

    @property
    def is_exchange(self) -> _IsExchange:
        """Return whether it sees the messages that caller and called agent exchanged, and not the call's result."""
        is_narrow = self.scope == message_pb2.HISTORY_SCOPE_CALLS
        return partial(_is_call_on_the_way, self.chains) if is_narrow else _is_of_child


def reader_of(
    transcript: Transcript,
    *,
    scope: message_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = as_context,
    trim: Callable[[message_pb2.Message], list[message_pb2.Message]] | None = None,
) -> Reader:
    """Return the reader whose transcript this is."""
    chains = frozenset([transcript.chain, *(above.chain for above, _ in transcript.lineage())])
    return Reader(agent=transcript.agent, chains=chains, scope=scope, rewrite=rewrite, trim=trim)


def is_summary(message: message_pb2.Message) -> bool:
    """True if a message is a summary; only its author sees it, in place of the messages that it replaces."""
    return message.kind == message_pb2.MESSAGE_KIND_SUMMARY


def render_session_messages(reader: Reader, lines: Sequence[HistoryEntry], spoken: set[str]) -> list[VisibleMessage]:
    """Return what a reader sees of messages of the session, which must be all of their runs.

    `spoken` are the agents that have spoken in the run that the first line continues; they are updated.
    """
    if reader.scope == message_pb2.HISTORY_SCOPE_NONE:
        return []
    if reader.scope == message_pb2.HISTORY_SCOPE_CALLS:
        seen = _outside_calls(lines, reader.is_exchange)
    else:
        seen = [line for line in lines if not line.is_call]
    return _render_others(reader, _drop_open_calls(seen, reader.is_exchange), spoken)


def render_caller_messages(reader: Reader, transcript: Transcript, spoken: set[str]) -> list[VisibleMessage]:
    """Return what a reader sees of the invocations above its own; `spoken` is as for `render_session_messages`."""
    if reader.scope == message_pb2.HISTORY_SCOPE_NONE:
        return []
    shown: list[VisibleMessage] = []
    for above, cut in transcript.lineage():
        lines = _drop_open_calls(above.flat(cut, is_opened=reader.opens), reader.is_exchange)
        shown.extend(_render_others(reader, lines, spoken))
    return shown


def render_own_messages(reader: Reader, lines: Iterable[HistoryEntry]) -> list[VisibleMessage]:
    """Return what a reader sees of messages of its invocation."""
    settled = _drop_open_calls(lines, lambda *_: False)
    return _in_order(
        reader, [one for line in settled for one in _render_line(line, reader, is_native=_is_by(line, reader))]
    )


def _render_others(reader: Reader, lines: Iterable[HistoryEntry], spoken: set[str]) -> list[VisibleMessage]:
    if reader.scope == message_pb2.HISTORY_SCOPE_BRANCH:
        lines = [line for line in lines if _is_users(line) or line.chain in reader.chains]
    remaining = _drop_repeated_answers(lines, spoken, all_relays=reader.scope == message_pb2.HISTORY_SCOPE_SESSION)
    shown = (_render_line(line, reader, is_native=_is_users(line) or _is_by(line, reader)) for line in remaining)
    return _in_order(reader, [one for each in shown for one in each])


def _always(_: Transcript) -> bool:
    return True


def _is_of_child(_: HistoryEntry, result: message_pb2.ToolResult) -> bool:
    return bool(result.child_invocation_id)


def _is_call_on_the_way(chains: frozenset[str], line: HistoryEntry, result: message_pb2.ToolResult) -> bool:
    """True for a call of the reader, or of an agent above it, at their places in the agent tree."""
    called = agent_chain(line.chain, result.call.name.removeprefix(CALL_PREFIX))
    return bool(result.child_invocation_id) and called in chains


def _outside_calls(lines: Sequence[HistoryEntry], is_exchange: _IsExchange) -> list[HistoryEntry]:
    """Return the session without what was said inside of calls, except for those whose exchange the reader sees."""
    hidden: set[str] = set()
    for line in lines:
        result = _result_of(line.message) if line.inside else None
        if result is not None and not is_exchange(line, result):
            hidden.update(line.inside)
    return [line for line in lines if line.message.invocation_id not in hidden]


def _drop_repeated_answers(lines: Iterable[HistoryEntry], spoken: set[str], *, all_relays: bool) -> list[HistoryEntry]:
    """Return the lines without answers that a root relayed, if the reader sees the words of their authors as well."""
    remaining: list[HistoryEntry] = []
    for line in lines:
        if _is_users(line):
            spoken.clear()  # a run begins
        if line.is_relay and (all_relays or spoken.intersection(line.message.author.split(", "))):
            continue
        if line.message.role == message_pb2.ROLE_ASSISTANT:
            spoken.add(line.agent)
        remaining.append(line)
    return remaining


def summaries(
    transcript: Transcript, session: Iterable[HistoryEntry], *, scope: message_pb2.HistoryScope.ValueType
) -> Iterator[message_pb2.Message]:
    """Yield the agent's summaries that may replace a part of the session that it sees, the oldest first.

    A summary made with BRANCH or CALLS scope is used only with that scope, and at the same place of the agent tree; one
    made with SESSION scope is used with CALLS too.
    """
    if scope == message_pb2.HISTORY_SCOPE_NONE:
        return
    lines = [*session]
    for above, cut in transcript.lineage():
        lines.extend(above.flat(cut, is_opened=_always))
    lines.extend(transcript.own())
    for line in filter(lambda line: is_summary(line.message), lines):
        replaced = line.message.summary_range
        made_with = replaced.scope or message_pb2.HISTORY_SCOPE_SESSION
        if made_with == message_pb2.HISTORY_SCOPE_SESSION:
            is_fitting = scope != message_pb2.HISTORY_SCOPE_BRANCH
        else:
            is_fitting = made_with == scope and line.chain == transcript.chain
        if line.agent == transcript.agent and replaced.to_position and is_fitting:
            yield line.message


def _is_users(line: HistoryEntry) -> bool:
    return line.message.kind == message_pb2.MESSAGE_KIND_USER


def _call_ids(message: message_pb2.Message) -> list[str]:
    return [call.call_id for call in calls_of(message)]


def calls_in(line: HistoryEntry) -> list[Call]:
    """Return the calls that a message asks for, or the call that it answers."""
    result = _result_of(line.message)
    ids = [result.call.call_id] if result is not None else _call_ids(line.message)
    return [(line.message.invocation_id, call_id) for call_id in ids]


def _result_of(message: message_pb2.Message) -> message_pb2.ToolResult | None:
    for part in message.parts:
        if part.HasField("tool_result"):
            return part.tool_result
    return None


def _drop_open_calls(lines: Iterable[HistoryEntry], is_exchange: _IsExchange) -> list[HistoryEntry]:
    """Return the lines without calls that have no result, and without those whose exchange is seen instead."""
    messages = [line for line in lines if not is_summary(line.message)]
    answered: set[Call] = set()
    for line in messages:
        result = _result_of(line.message)
        if result is not None and not is_exchange(line, result):
            answered.add((line.message.invocation_id, result.call.call_id))
    settled = []
    for line in messages:
        result = _result_of(line.message)
        if result is not None:
            if (line.message.invocation_id, result.call.call_id) in answered:
                settled.append(line)
        elif calls := _call_ids(line.message):
            open_calls = {call for call in calls if (line.message.invocation_id, call) not in answered}
            message = _without_calls(line.message, open_calls) if open_calls else line.message
            if message.parts:
                settled.append(replace(line, message=message))
        else:
            settled.append(line)
    return settled


def _without_calls(message: message_pb2.Message, dropped: set[str]) -> message_pb2.Message:
    shortened = copy_of(message)
    del shortened.parts[:]
    shortened.parts.extend(
        part for part in message.parts if not part.HasField("tool_call") or part.tool_call.call_id not in dropped
    )
    return shortened


def _is_by(line: HistoryEntry, reader: Reader) -> bool:
    return line.agent == reader.agent


def _render_line(line: HistoryEntry, reader: Reader, *, is_native: bool) -> list[VisibleMessage]:
    """Return a line as its reader sees it: unchanged if it is the reader's own or the user's, else rewritten."""
    message = line.message
    result, calls = _result_of(message), _call_ids(message)
    return [
        VisibleMessage(
            message=one,
            position=line.position,
            starts_exchange=is_native and _starts_exchange(message),
            asks=frozenset((message.invocation_id, call) for call in calls) if calls else NO_CALLS,
            answers=(message.invocation_id, result.call.call_id) if result is not None else None,
        )
        for one in ([message] if is_native else reader.rewrite(message))
    ]


def _starts_exchange(message: message_pb2.Message) -> bool:
    """True if a message is the input of a user or a caller."""
    is_input = message.role in (message_pb2.ROLE_USER, message_pb2.ROLE_UNSPECIFIED)
    # Messages that the runtime adds, such as a request to repair an answer, have neither kind nor invocation.
    return is_input and bool(message.kind or message.invocation_id)


def _in_order(reader: Reader, shown: Sequence[VisibleMessage]) -> list[VisibleMessage]:
    """Return the messages with each call's results right after it, in call order, as providers require; long ones cut.

    A call and its result are always in one invocation, so what is shown of others is ordered apart.
    """
    ordered = _results_after_calls(shown)
    small = [
        one if (cut := _truncate_result(one.message)) is one.message else replace(one, message=cut) for one in ordered
    ]
    if reader.trim is None:
        return small
    return [replace(one, message=rest) for one in small for rest in reader.trim(one.message)]


def _results_after_calls(shown: Sequence[VisibleMessage]) -> list[VisibleMessage]:
    results: dict[Call, VisibleMessage] = {}
    for one in shown:
        if one.answers is not None and _result_of(one.message) is not None:
            results[one.answers] = one
    ordered: list[VisibleMessage] = []
    for one in shown:
        if _result_of(one.message) is not None:
            continue
        ordered.append(one)
        calls = ((one.message.invocation_id, call) for call in _call_ids(one.message))
        ordered.extend(results[call] for call in calls if call in results)
    return ordered


def _truncate_result(message: message_pb2.Message) -> message_pb2.Message:
    """Return a message with a very long tool result cut to its head and tail."""
    result = _result_of(message)
    if result is None or truncate_result(result) is result:
        return message
    cut = copy_of(message)
    for part in cut.parts:
        if part.HasField("tool_result"):
            part.tool_result.CopyFrom(truncate_result(part.tool_result))
    return cut


def policy_of(
    definition: AgentDefinition, link: AgentLink | None = None, caller: AgentDefinition | None = None
) -> HistoryPolicy:
    """Return the history policy of a call: scope and overflow of the link, default: the definition's.

    Default of the scope: BRANCH for the agents of a plan_execute and of a graph's nodes, CALLS for an agent that may
    call agents as tools, else SESSION.
    """
    own, called = definition.history, link.history if link is not None else HistoryPolicy()
    policy = HistoryPolicy()
    policy.CopyFrom(own if called.WhichOneof("overflow") is None else called)
    policy.scope = called.scope or own.scope or _usual_scope(definition, caller)
    return policy


def _usual_scope(definition: AgentDefinition, caller: AgentDefinition | None) -> message_pb2.HistoryScope.ValueType:
    if caller is not None and (caller.HasField("plan_execute") or caller.HasField("graph")):
        return message_pb2.HISTORY_SCOPE_BRANCH
    if calls_agents(definition):
        return message_pb2.HISTORY_SCOPE_CALLS
    return message_pb2.HISTORY_SCOPE_SESSION


def calls_agents(definition: AgentDefinition) -> bool:
    """True if a definition's model may call a linked agent as a tool."""
    is_supervisor = definition.HasField("supervisor")
    usual = agent_pb2.LINK_MODE_TRANSFER if is_supervisor else agent_pb2.LINK_MODE_TOOL
    modes = {link.link_mode or usual for link in definition.sub_agents}
    return (is_supervisor or definition.HasField("llm")) and agent_pb2.LINK_MODE_TOOL in modes
