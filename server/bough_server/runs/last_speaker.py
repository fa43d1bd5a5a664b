"""The member that a supervisor or a swarm starts a run with, because it gave the session's last answer."""

from collections.abc import Sequence

from bough.v1 import agent_pb2, message_pb2
from bough_server.errors import NotFound
from bough_server.messages import calls_of
from bough_server.runs.close import read_log
from bough_server.store.ports.log import EventLog
from bough_server.store.ports.sessions import StoredMessage


async def find_first_member(log: EventLog, root: agent_pb2.AgentDefinition, session: Sequence[StoredMessage]) -> str:
    """Return the member that a run of `root` starts with; empty for its usual start.

    `session` are the messages that the run sees. The log of an earlier run is read only if `root` starts with its last
    speaker and another agent wrote its last answer. Raises StorageFailed.
    """
    members = _members(root)
    answer = next((one for one in reversed(session) if _is_answer_of(root, one)), None) if members else None
    if answer is None or answer.message.author == root.name:
        return ""
    # The author may be an agent below the member: of a sequence, or one that the member transferred to.
    begun = await _children_of_root(log, answer.run_id)
    return begun[-1] if begun and begun[-1] in members else ""


def _members(root: agent_pb2.AgentDefinition) -> set[str]:
    """Return the linked agents that may start a run of an agent; empty if the agent always starts as usual."""
    start = root.supervisor.next_run_starts_with or root.swarm.next_run_starts_with
    if start != agent_pb2.NEXT_RUN_START_LAST_SPEAKER:
        return set()
    return {link.agent for link in root.sub_agents if link.link_mode != agent_pb2.LINK_MODE_TOOL}


def _is_answer_of(root: agent_pb2.AgentDefinition, stored: StoredMessage) -> bool:
    """True if a message is the final answer of a run of an agent, not text that its model sent beside calls."""
    message = stored.message
    return message.kind == message_pb2.MESSAGE_KIND_ASSISTANT and stored.agent == root.name and not calls_of(message)


async def _children_of_root(log: EventLog, run_id: str) -> list[str]:
    """Return the agents that ran right below the root of a run, in order; none if the run has been deleted."""
    try:
        events = await read_log(log, run_id)
    except NotFound:
        return []
    return [event.agent for event in events if event.depth == 1 and event.HasField("sub_agent_started")]
