"""Merge the records of a conversation's turns to one, of which something is expected as a whole."""

from collections.abc import Mapping, Sequence

from bough.v1 import invocation_pb2


def merge_turns(turns: Sequence[invocation_pb2.Invocation]) -> tuple[invocation_pb2.Invocation, Mapping[str, str]]:
    """Return one record of all turns, at least one: how the last one ended, and the agents and tool calls of all.

    Roots of several turns that have the same name are one agent, with the id and the input of the first and the end of
    the last of them: the ids of the others, and that of the first, are returned too. Sequences count on from turn to
    turn.
    """
    last = turns[-1]
    whole = invocation_pb2.Invocation(state=last.state, session_state_json=last.session_state_json)
    if last.HasField("final_response"):
        whole.final_response.CopyFrom(last.final_response)
    if last.HasField("error"):
        whole.error.CopyFrom(last.error)
    roots: dict[str, invocation_pb2.AgentInvocation] = {}
    merged: dict[str, str] = {}
    before = 0
    for turn in turns:
        _add_agents(whole, turn, roots, merged)
        for call in turn.tools:
            kept = whole.tools.add()
            kept.CopyFrom(call)
            kept.invocation_id = merged.get(call.invocation_id, call.invocation_id)
            kept.sequence += before
        before += max((call.sequence for call in turn.tools), default=0)
    return whole, merged


def _add_agents(
    whole: invocation_pb2.Invocation,
    turn: invocation_pb2.Invocation,
    roots: dict[str, invocation_pb2.AgentInvocation],
    merged: dict[str, str],
) -> None:
    """Add the agents of a turn, and to `merged` the ids of roots that are agents of earlier turns with those."""
    known = {agent.invocation_id for agent in turn.agents}
    added: dict[str, invocation_pb2.AgentInvocation] = {}
    for agent in turn.agents:
        is_root = agent.parent_invocation_id not in known
        if is_root and (earlier := roots.get(agent.name)) is not None:
            merged[agent.invocation_id] = earlier.invocation_id
            earlier.state = agent.state
            earlier.end_time.CopyFrom(agent.end_time)
            earlier.ClearField("output")
            if agent.HasField("output"):
                earlier.output.CopyFrom(agent.output)
            continue
        kept = whole.agents.add()
        kept.CopyFrom(agent)
        for name in ("parent_invocation_id", "from_invocation_id"):
            setattr(kept, name, merged.get(getattr(agent, name), getattr(agent, name)))
        if is_root:
            added.setdefault(agent.name, kept)
    roots.update(added)
