"""The messages that an agent sees: its session and transcript under the policy of its definition.

An agent sees the session up to the run's cut, of each invocation above what it saw and said before the call (open calls
left out), and its own. Calls of linked agents are shown to others as what the agents said to each other. Summaries are
no part of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bough.v1 import message_pb2
from bough.v1.agent_pb2 import AgentDefinition, AgentLink, HistoryPolicy
from bough_server.history.rewrite import Rewriter, as_context
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.truncation import cut_result

Call = tuple[str, str]
"""The invocation that made a tool call, and the call's id."""

NO_CALLS: Final[frozenset[Call]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleMessage:
    """A message as its reader is shown it: its own in native roles, everybody else's rewritten."""

    message: message_pb2.Message
    position: int = 0
    """The place in the session of what it was made of; 0 where that was said in the run."""
    is_told: bool = False
    """Whether an exchange begins with it: a user, or a caller, said it to the reader."""
    is_again: bool = False
    """Whether a summary stands for it already: it was told last, and is shown behind that all the same."""
    asks: frozenset[Call] = NO_CALLS
    """The calls that what it was made of asks for, whether or not their names are left in it."""
    answers: Call | None = None
    """The call whose result it was made of."""


def is_summary(message: message_pb2.Message) -> bool:
    """Whether a message stands for older ones; it is shown to its author alone, in their place."""
    return message.kind == message_pb2.MESSAGE_KIND_SUMMARY


def build(
    transcript: Transcript,
    session: Iterable[HistoryEntry],
    *,
    scope: message_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = as_context,
) -> list[message_pb2.Message]:
    """The messages for the model of an invocation, as its own agent sees them; every call in them has its result."""
    return [one.message for one in view(transcript, session, scope=scope, rewrite=rewrite)]


def view(
    transcript: Transcript,
    session: Iterable[HistoryEntry],
    *,
    scope: message_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = as_context,
) -> list[VisibleMessage]:
    """The same with where each is from. It only grows while an invocation goes on, once its last step has ended."""
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
    """The summaries of the same agent that may stand for what it sees of the session, the oldest first.

    Those that saw their own branch alone are for who sees no more, and in the same place of the tree.
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


def _calls_of(message: message_pb2.Message) -> list[str]:
    return [part.tool_call.call_id for part in message.parts if part.HasField("tool_call")]


def _result_of(message: message_pb2.Message) -> message_pb2.ToolResult | None:
    for part in message.parts:
        if part.HasField("tool_result"):
            return part.tool_result
    return None


def _settled(lines: Iterable[HistoryEntry], *, others: bool) -> list[HistoryEntry]:
    """The lines without calls that have no result; for `others`, also without calls of linked agents."""
    kept = [line for line in lines if not is_summary(line.message)]
    answered: set[Call] = set()
    for line in kept:
        result = _result_of(line.message)
        if result is not None and not (others and result.child_invocation_id):
            answered.add((line.message.invocation_id, result.call.call_id))
    settled = []
    for line in kept:
        result = _result_of(line.message)
        if result is not None:
            if (line.message.invocation_id, result.call.call_id) in answered:
                settled.append(line)
        elif calls := _calls_of(line.message):
            open_calls = {call for call in calls if (line.message.invocation_id, call) not in answered}
            message = _without_calls(line.message, open_calls) if open_calls else line.message
            if message.parts:
                settled.append(replace(line, message=message))
        else:
            settled.append(line)
    return settled


def _without_calls(message: message_pb2.Message, dropped: set[str]) -> message_pb2.Message:
    kept = message_pb2.Message()
    kept.CopyFrom(message)
    del kept.parts[:]
    kept.parts.extend(
        part for part in message.parts if not part.HasField("tool_call") or part.tool_call.call_id not in dropped
    )
    return kept


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
    """A line as its reader is shown it: as it is where it is the reader's own, or the user's."""
    message = line.message
    result = _result_of(message)
    return [
        VisibleMessage(
            message=one,
            position=line.position,
            is_told=is_native and _is_told(message),
            asks=frozenset((message.invocation_id, call) for call in _calls_of(message)),
            answers=(message.invocation_id, result.call.call_id) if result is not None else None,
        )
        for one in ([message] if is_native else rewrite(message))
    ]


def _is_told(message: message_pb2.Message) -> bool:
    """Whether a user, or a caller, began something new with it; what the runtime adds by itself is of no invocation."""
    is_spoken_to = message.role in (message_pb2.ROLE_USER, message_pb2.ROLE_UNSPECIFIED)
    return is_spoken_to and bool(message.kind or message.invocation_id)


def _results_after_calls(shown: Sequence[VisibleMessage]) -> list[VisibleMessage]:
    """The same messages with every call's results right behind it, in call order, as providers require."""
    results: dict[Call, VisibleMessage] = {}
    for one in shown:
        if one.answers is not None and _result_of(one.message) is not None:
            results[one.answers] = one
    ordered: list[VisibleMessage] = []
    for one in shown:
        if _result_of(one.message) is not None:
            continue
        ordered.append(one)
        calls = ((one.message.invocation_id, call) for call in _calls_of(one.message))
        ordered.extend(results[call] for call in calls if call in results)
    return ordered


def _small(message: message_pb2.Message) -> message_pb2.Message:
    """A tool's result as a model is shown it: the head and the tail of what is very long."""
    result = _result_of(message)
    if result is None or cut_result(result) is result:
        return message
    cut = message_pb2.Message()
    cut.CopyFrom(message)
    for part in cut.parts:
        if part.HasField("tool_result"):
            part.tool_result.CopyFrom(cut_result(part.tool_result))
    return cut


def policy_of(definition: AgentDefinition, link: AgentLink | None = None) -> HistoryPolicy:
    """The history policy in force: of scope and of overflow the link's, else the definition's; SESSION where none."""
    own, called = definition.history, link.history if link is not None else HistoryPolicy()
    policy = HistoryPolicy()
    policy.CopyFrom(own if called.WhichOneof("overflow") is None else called)
    policy.scope = called.scope or own.scope or message_pb2.HISTORY_SCOPE_SESSION
    return policy
