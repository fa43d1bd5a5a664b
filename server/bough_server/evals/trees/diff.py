"""Compare two records: agents that were added, removed or called by another agent, calls, usage, time and answer."""

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from typing import Final, TypeAlias

from google.protobuf.duration_pb2 import Duration

from bough.v1 import error_pb2, eval_result_pb2, invocation_pb2
from bough_server.evals.trees.agent_tree import AgentNode, agent_tree, path_of
from bough_server.messages import effective_arguments
from bough_server.truncation import truncate_text

MAX_AGENTS: Final = 500
"""The most differences of agents in a diff."""
MAX_CALLS: Final = 200
"""The most differences of calls in a diff."""
MAX_BYTES: Final = 3_900_000
"""The most bytes of a diff, as far as leaving out differences of calls makes it smaller: clients accept 4 MiB."""
MAX_TEXT_BYTES: Final = 2_000
"""The most bytes of a call's arguments, and of its result."""

_MAX_CELLS: Final = 1_000_000
"""The most pairs of calls, of all agents together, that are aligned without difflib's shortcut for frequent ones."""

AgentDifference = eval_result_pb2.AgentDifference

_Call: TypeAlias = invocation_pb2.ToolInvocation
_CallKey: TypeAlias = tuple[str, str, str, int, int, str]
"""What is compared of a call: name, arguments, result, state, reason and message of its error."""
_Pairs: TypeAlias = list[tuple[AgentNode, AgentNode]]
_CallPair: TypeAlias = tuple[_Call | None, _Call | None]


def diff(left: invocation_pb2.Invocation, right: invocation_pb2.Invocation) -> eval_result_pb2.InvocationDiff:
    """Return how the right record differs from the left one; exchanging them exchanges what is said of each.

    At most 500 differences of agents and 200 of calls are named. JSON that means the same is equal.
    """
    before, after = _Side(agent_tree(left)), _Side(agent_tree(right))
    # Which agents and calls belong together must not depend on which record is on the left.
    is_swapped = after.key < before.key
    matching = _Matching.of(after, before) if is_swapped else _Matching.of(before, after)
    if is_swapped:
        matching = matching.swap()
    agents = list(_agent_differences(before, after, matching))
    calls = list(_call_differences(before, after, matching, is_swapped=is_swapped))
    same_answer = _answer(left) == _answer(right)
    result = eval_result_pb2.InvocationDiff(
        agent_differences=agents[:MAX_AGENTS],
        call_differences=islice((call.difference() for call in calls), MAX_CALLS),
        usage_before=left.tree_usage if left.HasField("tree_usage") else None,
        usage_after=right.tree_usage if right.HasField("tree_usage") else None,
        duration_before=_duration(left),
        duration_after=_duration(right),
        same_answer=same_answer,
        same=same_answer and not agents and not calls,
    )
    size = result.ByteSize()
    while size > MAX_BYTES and result.call_differences:
        size -= result.call_differences.pop().ByteSize()
    return result


class _Side:
    """A record's tree with what is compared of it."""

    def __init__(self, nodes: Sequence[AgentNode]) -> None:
        self.nodes = nodes
        self.calls = {node: [_call_key(call) for call in node.calls] for node in nodes}
        self.key = [(len(node.children), node.agent.name, self.calls[node]) for node in nodes]


@dataclass(slots=True)
class _Matching:
    """Which agents of two trees belong together."""

    pairs: dict[AgentNode, AgentNode] = field(default_factory=dict)
    taken: set[AgentNode] = field(default_factory=set)
    """The agents of the other tree that are in a pair."""
    moved: dict[AgentNode, AgentNode] = field(default_factory=dict)
    """The pairs whose callers do not belong together."""

    @classmethod
    def of(cls, one: _Side, other: _Side) -> "_Matching":
        """Match two trees: children of matched agents with each other, then what is left wherever it is.

        Of several agents of one name those that did exactly the same, with everything below, come first.
        """
        contents = _contents((one, other))
        matching = cls()
        matching._match_below(one.nodes[0], other.nodes[0], contents)
        for key in (contents.__getitem__, _name):
            left = matching._group_unmatched_nodes(other.nodes, key)
            for node in one.nodes:
                if node in matching.pairs:
                    continue
                same = left.get(key(node), deque())
                while same and same[0] in matching.taken:
                    same.popleft()
                if same:
                    matching.moved[node] = same[0]
                    matching._match_below(node, same[0], contents)
        return matching

    def swap(self) -> "_Matching":
        """Return the same seen from the other tree."""
        return _Matching(
            pairs={other: one for one, other in self.pairs.items()},
            taken=set(self.pairs),
            moved={other: one for one, other in self.moved.items()},
        )

    def _match_below(self, one: AgentNode, other: AgentNode, contents: Mapping[AgentNode, int]) -> None:
        ahead = [(one, other)]
        while ahead:
            one, other = ahead.pop()
            self.pairs[one] = other
            self.taken.add(other)
            lefts = [child for child in one.children if child not in self.pairs]
            rights = [child for child in other.children if child not in self.taken]
            same = _pair_agents(lefts, rights, contents.__getitem__)
            done = {node for pair in same for node in pair}
            lefts, rights = ([node for node in nodes if node not in done] for nodes in (lefts, rights))
            ahead.extend([*same, *_pair_agents(lefts, rights, _name)])

    def _group_unmatched_nodes(
        self, nodes: Iterable[AgentNode], key: Callable[[AgentNode], Hashable]
    ) -> dict[Hashable, deque[AgentNode]]:
        found: dict[Hashable, deque[AgentNode]] = {}
        for node in nodes:
            if node not in self.taken:
                found.setdefault(key(node), deque()).append(node)
        return found


def _name(node: AgentNode) -> str:
    return node.agent.name


def _pair_agents(
    lefts: Iterable[AgentNode], rights: Iterable[AgentNode], key: Callable[[AgentNode], Hashable]
) -> _Pairs:
    """Pair the agents of equal keys in their order."""
    waiting: dict[Hashable, deque[AgentNode]] = {}
    for right in rights:
        waiting.setdefault(key(right), deque()).append(right)
    return [(left, same.popleft()) for left in lefts if (same := waiting.get(key(left)))]


def _contents(sides: Iterable[_Side]) -> dict[AgentNode, int]:
    """Return a number for each agent that is equal for equal subtrees: names, calls, and children in order."""
    numbers: dict[Hashable, int] = {}
    contents: dict[AgentNode, int] = {}
    for side in sides:
        for node in reversed(side.nodes):
            content = (node.agent.name, tuple(side.calls[node]), tuple(contents[child] for child in node.children))
            contents[node] = numbers.setdefault(content, len(numbers))
    return contents


def _agent_differences(before: _Side, after: _Side, matching: _Matching) -> Iterator[AgentDifference]:
    for node in before.nodes:
        if node in matching.moved:
            yield _describe_move(node, matching.moved[node])
        elif node not in matching.pairs:
            yield AgentDifference(
                kind=eval_result_pb2.CHANGE_KIND_REMOVED,
                agent=node.name,
                parent_before=path_of(node.parent),
                invocation_id_before=node.agent.invocation_id,
                message=f"{node.name} was removed, it was {_place(node)}",
            )
    for node in after.nodes:
        if node not in matching.taken:
            yield AgentDifference(
                kind=eval_result_pb2.CHANGE_KIND_ADDED,
                agent=node.name,
                parent_after=path_of(node.parent),
                invocation_id_after=node.agent.invocation_id,
                message=f"{node.name} was added, it is {_place(node)}",
            )


def _describe_move(before: AgentNode, after: AgentNode) -> AgentDifference:
    was, now = _place(before), _place(after)
    if was == now:
        was, now = f"called by {path_of(before.parent)}", f"called by {path_of(after.parent)}"
    if was == now:
        now = f"called by another {path_of(after.parent)}"
    return AgentDifference(
        kind=eval_result_pb2.CHANGE_KIND_MOVED,
        agent=after.name,
        parent_before=path_of(before.parent),
        parent_after=path_of(after.parent),
        invocation_id_before=before.agent.invocation_id,
        invocation_id_after=after.agent.invocation_id,
        message=f"{after.name} was {was}, and is now {now}",
    )


def _place(node: AgentNode) -> str:
    return f"called by {node.parent.name}" if node.parent is not None and node.parent.parent is not None else "a root"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangedCall:
    """A call that only one of two agents made, or that both made differently."""

    agent: AgentNode
    before: _Call | None
    after: _Call | None

    def difference(self) -> eval_result_pb2.CallDifference:
        call = self.after if self.after is not None else self.before
        assert call is not None
        name = truncate_text(call.name, MAX_TEXT_BYTES)
        kind, message = self._words(name)
        return eval_result_pb2.CallDifference(
            branch=path_of(self.agent),
            tool=name,
            kind=kind,
            before=_result_call(self.before) if self.before is not None else None,
            after=_result_call(self.after) if self.after is not None else None,
            message=message,
        )

    def _words(self, name: str) -> tuple[eval_result_pb2.ChangeKind.ValueType, str]:
        if self.after is None or self.before is None:
            if self.after is None:
                return eval_result_pb2.CHANGE_KIND_REMOVED, f"{name} was removed"
            return eval_result_pb2.CHANGE_KIND_ADDED, f"{name} was added"
        one, other = _call_key(self.before), _call_key(self.after)
        changes = ["other arguments"] if one[1] != other[1] else []
        changes += ["another result"] if one[2:] != other[2:] else []
        return eval_result_pb2.CHANGE_KIND_CHANGED, f"{name} has {' and '.join(changes)}"


def _call_differences(before: _Side, after: _Side, matching: _Matching, *, is_swapped: bool) -> Iterator[_ChangedCall]:
    keys = ((before.calls[node], after.calls[other]) for node, other in matching.pairs.items())
    is_long = sum(len(one) * len(other) for one, other in keys if one != other) > _MAX_CELLS
    for node in before.nodes:
        other = matching.pairs.get(node)
        if other is None:
            yield from (_ChangedCall(agent=node, before=call, after=None) for call in node.calls)
            continue
        pairs: Iterable[_CallPair]
        if is_swapped:
            found = _align_calls((other.calls, after.calls[other]), (node.calls, before.calls[node]), is_long=is_long)
            pairs = [(one, another) for another, one in found]
        else:
            pairs = _align_calls((node.calls, before.calls[node]), (other.calls, after.calls[other]), is_long=is_long)
        yield from (_ChangedCall(agent=other, before=one, after=another) for one, another in pairs)
    for node in after.nodes:
        if node not in matching.taken:
            yield from (_ChangedCall(agent=node, before=None, after=call) for call in node.calls)


def _align_calls(
    one: tuple[Sequence[_Call], Sequence[_CallKey]],
    other: tuple[Sequence[_Call], Sequence[_CallKey]],
    *,
    is_long: bool,
) -> Iterator[_CallPair]:
    """Align two lists of calls with their keys. Between equal calls, those of one tool are the same call changed."""
    (lefts, left_keys), (rights, right_keys) = one, other
    if left_keys == right_keys:
        return
    matcher = SequenceMatcher(None, left_keys, right_keys, autojunk=is_long)
    for tag, left_from, left_to, right_from, right_to in matcher.get_opcodes():
        if tag == "equal":
            continue
        waiting: dict[str, deque[int]] = {}
        for j in range(right_from, right_to):
            waiting.setdefault(rights[j].name, deque()).append(j)
        for i in range(left_from, left_to):
            same = waiting.get(lefts[i].name)
            j = same.popleft() if same else -1
            if j < 0:
                yield lefts[i], None
            elif left_keys[i] != right_keys[j]:
                yield lefts[i], rights[j]
        yield from ((None, rights[j]) for j in sorted(j for left in waiting.values() for j in left))


def _call_key(call: _Call) -> _CallKey:
    return (
        call.name,
        _canonical(effective_arguments(call)),
        _canonical(call.result_json),
        call.state,
        call.error.reason,
        call.error.message,
    )


def _canonical(text: str) -> str:
    """Return JSON without what does not matter: white space, and the order of members. Other text stays as it is."""
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads(text), sort_keys=True)
    return text


def _result_call(call: _Call) -> eval_result_pb2.EvalCall:
    return eval_result_pb2.EvalCall(
        name=truncate_text(call.name, MAX_TEXT_BYTES),
        arguments_json=truncate_text(call.arguments_json, MAX_TEXT_BYTES),
        executed_arguments_json=truncate_text(call.executed_arguments_json, MAX_TEXT_BYTES),
        result_json=truncate_text(call.result_json, MAX_TEXT_BYTES),
        state=call.state,
        error=_truncate_error(call.error) if call.HasField("error") else None,
    )


def _truncate_error(error: error_pb2.AgentError) -> error_pb2.AgentError:
    return error_pb2.AgentError(reason=error.reason, message=truncate_text(error.message, MAX_TEXT_BYTES))


def _answer(invocation: invocation_pb2.Invocation) -> list[bytes]:
    """Return what is compared of an answer: its content, not its id and time."""
    return [part.SerializeToString(deterministic=True) for part in invocation.final_response.parts]


def _duration(invocation: invocation_pb2.Invocation) -> Duration | None:
    if not (invocation.HasField("start_time") and invocation.HasField("end_time")):
        return None
    start, end = invocation.start_time, invocation.end_time
    duration = Duration()
    try:
        duration.FromNanoseconds((end.seconds - start.seconds) * 1_000_000_000 + end.nanos - start.nanos)
        duration.ToJsonString()
    except ValueError:  # a given record can have any times
        return None
    return duration
