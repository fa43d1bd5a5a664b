"""What an agent's model is shown of a session and a run; what is stored is not its concern.

An agent sees the session up to the run's cut, of each invocation above what it saw and said before the call (open
calls left out), and its own. Calls of linked agents are shown to others as what the agents said to each other.
"""

from collections.abc import Iterable, Sequence

from bough.v1 import agent_pb2, message_pb2
from bough_server.cutting import cut_result
from bough_server.history.rewrite import Rewriter, for_context
from bough_server.history.transcript import Said, Transcript

_Call = tuple[str, str]


def build(
    transcript: Transcript,
    session: Iterable[Said],
    *,
    scope: agent_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = for_context,
) -> list[message_pb2.Message]:
    """The messages for the model of an invocation, as its own agent sees them; every call in them has its result."""
    lines: list[Said] = []
    if scope != agent_pb2.HISTORY_SCOPE_NONE:
        lineage = transcript.lineage()
        lines.extend(_settled(session, others=True))
        for above, cut in lineage:
            lines.extend(_settled(above.flat(cut, called_children=True), others=True))
        if scope == agent_pb2.HISTORY_SCOPE_BRANCH:
            chains = {above.chain for above, _ in lineage} | {transcript.chain}
            lines = [line for line in lines if _is_users(line) or line.chain in chains]
    own = _settled(transcript.own(), others=False)
    return _for_reader(lines, own, transcript.agent, rewrite)


def _is_users(line: Said) -> bool:
    return line.message.kind == message_pb2.MESSAGE_KIND_USER


def _calls_of(message: message_pb2.Message) -> list[str]:
    return [part.tool_call.call_id for part in message.parts if part.HasField("tool_call")]


def _result_of(message: message_pb2.Message) -> message_pb2.ToolResult | None:
    for part in message.parts:
        if part.HasField("tool_result"):
            return part.tool_result
    return None


def _settled(lines: Iterable[Said], *, others: bool) -> list[Said]:
    """The lines without calls that have no result; for `others`, also without calls of linked agents."""
    kept = list(lines)
    answered: set[_Call] = set()
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
                settled.append(Said(message, line.agent, line.chain))
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
    lines: Sequence[Said], own: Sequence[Said], reader: str, rewrite: Rewriter
) -> list[message_pb2.Message]:
    shown: list[message_pb2.Message] = []
    for line in lines:
        shown.extend([line.message] if _is_native(line, reader) else rewrite(line.message))
    for line in own:
        shown.extend([line.message] if line.agent == reader else rewrite(line.message))
    return [_small(message) for message in _results_after_calls(shown)]


def _is_native(line: Said, reader: str) -> bool:
    return _is_users(line) or line.agent == reader


def _results_after_calls(messages: Sequence[message_pb2.Message]) -> list[message_pb2.Message]:
    """The same messages with every call's results right behind it, in call order, as providers require."""
    results: dict[_Call, message_pb2.Message] = {}
    for message in messages:
        result = _result_of(message)
        if result is not None:
            results[message.invocation_id, result.call.call_id] = message
    ordered: list[message_pb2.Message] = []
    for message in messages:
        if _result_of(message) is not None:
            continue
        ordered.append(message)
        calls = ((message.invocation_id, call) for call in _calls_of(message))
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
