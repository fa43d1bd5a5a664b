"""The messages that an agent sees: its session and transcript, under the history policy of its definition.

An agent sees the session up to the run's cut, the messages of each invocation above before the call (without open
calls), and its own. To others, calls of linked agents appear as the messages that the agents exchanged. Summaries are
not included.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bough.v1 import message_pb2
from bough.v1.agent_pb2 import AgentDefinition, AgentLink, HistoryPolicy
from bough_server.history.rewrite import Rewriter, as_context
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.messages import calls_of, copy_of
from bough_server.truncation import cut_result

Call = tuple[str, str]
"""The invocation that made a tool call, and the call's id."""

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


def is_summary(message: message_pb2.Message) -> bool:
    """True if a message is a summary; only its author sees it, in place of the messages that it replaces."""
    return message.kind == message_pb2.MESSAGE_KIND_SUMMARY


def build(
    transcript: Transcript,
    session: Iterable[HistoryEntry],
    *,
    scope: message_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = as_context,
) -> list[message_pb2.Message]:
    """Return the messages for the model of an invocation, as its agent sees them; every call has its result."""
    return [one.message for one in view(transcript, session, scope=scope, rewrite=rewrite)]


def view(
    transcript: Transcript,
    session: Iterable[HistoryEntry],
    *,
    scope: message_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = as_context,
) -> list[VisibleMessage]:
    """Return the messages of `build` with their origins. Between steps of an invocation the list only grows."""
    lines: list[HistoryEntry] = []
    if scope != message_pb2.HISTORY_SCOPE_NONE:
        lineage = transcript.lineage()
        lines.extend(_settled(session, others=True))
        for above, cut in lineage:
            lines.extend(_settled(above.flat(cut, called_children=True), others=True))
        if scope == message_pb2.HISTORY_SCOPE_BRANCH:
            chains = {above.chain for above, _ in lineage} | {transcript.chain}
            lines = [line for line in lines if _is_users(line) or line.chain in chains]
    own = _settled(transcript.own(), others=False)
    return _for_reader(lines, own, transcript.agent, rewrite)


def summaries(
    transcript: Transcript, session: Iterable[HistoryEntry], *, scope: message_pb2.HistoryScope.ValueType
) -> Iterator[message_pb2.Message]:
    """Yield the agent's summaries that may replace a part of the session that it sees, the oldest first.

    A summary made with BRANCH scope is used only with that scope, and at the same place of the agent tree.
    """
    if scope == message_pb2.HISTORY_SCOPE_NONE:
        return
    is_of_branch = scope == message_pb2.HISTORY_SCOPE_BRANCH
    lines = [*session]
    for above, cut in transcript.lineage():
        lines.extend(above.flat(cut, called_children=True))
    lines.extend(transcript.own())
    for line in lines:
        stands_for = line.message.summary_range
        is_narrow = stands_for.scope == message_pb2.HISTORY_SCOPE_BRANCH
        is_fitting = is_narrow == is_of_branch and (not is_of_branch or line.chain == transcript.chain)
        if is_summary(line.message) and line.agent == transcript.agent and stands_for.to_position and is_fitting:
            yield line.message


def _is_users(line: HistoryEntry) -> bool:
    return line.message.kind == message_pb2.MESSAGE_KIND_USER


def _call_ids(message: message_pb2.Message) -> list[str]:
    return [call.call_id for call in calls_of(message)]


def _result_of(message: message_pb2.Message) -> message_pb2.ToolResult | None:
    for part in message.parts:
        if part.HasField("tool_result"):
            return part.tool_result
    return None


def _settled(lines: Iterable[HistoryEntry], *, others: bool) -> list[HistoryEntry]:
    """Return the lines without calls that have no result; for `others`, also without calls of linked agents."""
    messages = [line for line in lines if not is_summary(line.message)]
    answered: set[Call] = set()
    for line in messages:
        result = _result_of(line.message)
        if result is not None and not (others and result.child_invocation_id):
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


def _for_reader(
    lines: Sequence[HistoryEntry], own: Sequence[HistoryEntry], reader: str, rewrite: Rewriter
) -> list[VisibleMessage]:
    shown: list[VisibleMessage] = []
    for line in lines:
        shown.extend(_shown(line, rewrite, is_native=_is_native(line, reader)))
    for line in own:
        shown.extend(_shown(line, rewrite, is_native=line.agent == reader))
    ordered = _results_after_calls(shown)
    return [one if (small := _small(one.message)) is one.message else replace(one, message=small) for one in ordered]


def _is_native(line: HistoryEntry, reader: str) -> bool:
    return _is_users(line) or line.agent == reader


def _shown(line: HistoryEntry, rewrite: Rewriter, *, is_native: bool) -> list[VisibleMessage]:
    """Return a line as its reader sees it: unchanged if it is the reader's own or the user's, else rewritten."""
    message = line.message
    result = _result_of(message)
    return [
        VisibleMessage(
            message=one,
            position=line.position,
            starts_exchange=is_native and _starts_exchange(message),
            asks=frozenset((message.invocation_id, call) for call in _call_ids(message)),
            answers=(message.invocation_id, result.call.call_id) if result is not None else None,
        )
        for one in ([message] if is_native else rewrite(message))
    ]


def _starts_exchange(message: message_pb2.Message) -> bool:
    """True if a message is the input of a user or a caller."""
    is_input = message.role in (message_pb2.ROLE_USER, message_pb2.ROLE_UNSPECIFIED)
    # Messages that the runtime adds, such as a request to repair an answer, have neither kind nor invocation.
    return is_input and bool(message.kind or message.invocation_id)


def _results_after_calls(shown: Sequence[VisibleMessage]) -> list[VisibleMessage]:
    """Return the messages with each call's results right after it, in call order, as providers require."""
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


def _small(message: message_pb2.Message) -> message_pb2.Message:
    """Return a message with a very long tool result cut to its head and tail."""
    result = _result_of(message)
    if result is None or cut_result(result) is result:
        return message
    cut = copy_of(message)
    for part in cut.parts:
        if part.HasField("tool_result"):
            part.tool_result.CopyFrom(cut_result(part.tool_result))
    return cut


def policy_of(definition: AgentDefinition, link: AgentLink | None = None) -> HistoryPolicy:
    """Return the history policy of a call: scope and overflow of the link, default: the definition's, else SESSION."""
    own, called = definition.history, link.history if link is not None else HistoryPolicy()
    policy = HistoryPolicy()
    policy.CopyFrom(own if called.WhichOneof("overflow") is None else called)
    policy.scope = called.scope or own.scope or message_pb2.HISTORY_SCOPE_SESSION
    return policy
