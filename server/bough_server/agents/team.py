"""Agents that lead teams: a supervisor, whose members come back to it, and a swarm, whose members go on to others.

Members are any agents; what they do is their own.
"""

from collections.abc import Sequence

from bough.v1 import action_pb2, agent_pb2, execution_pb2, message_pb2
from bough_server.agents.definition import revision
from bough_server.agents.flow import failure, passed_on
from bough_server.agents.llm import LlmAgent
from bough_server.engine.limits import TRANSFER_WINDOW
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.runtime.agent import Context, Outcome, llm_of
from bough_server.runtime.children import Child, hand_over, run_child
from bough_server.runtime.context import lane_of
from bough_server.runtime.dispatch import DispatchResult, Handover
from bough_server.runtime.lane import Lane
from bough_server.runtime.visible_history import is_transfer


class SupervisorAgent:
    """A model in a loop with tools that hands over to members and goes on when they have ended."""

    kind = execution_pb2.AGENT_KIND_SUPERVISOR

    def __init__(self, definition: agent_pb2.AgentDefinition) -> None:
        self.definition = definition
        self.revision = revision(definition)
        self._lead = LlmAgent(definition)

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools of the definition."""
        return llm_of(self.definition).tools

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Answers as an LLM agent does; a member that exits or breaks a loop ends it as well. Raises RunError."""
        members = 0

        async def lend(lane: Lane, transfer: action_pb2.TransferAction, call_id: str) -> Outcome | None:
            nonlocal members
            member, members = members, members + 1
            return await _lend(lane, transfer, call_id, member)

        return await self._lead.run(ctx, input, on_transfer=lend)


async def _lend(lane: Lane, transfer: action_pb2.TransferAction, call_id: str, member: int) -> Outcome | None:
    """Lets a member go on until it ends; gives how the supervisor ends with it, if it does."""
    ended = await hand_over(lane, transfer, call_id, member=member)
    if ended.outcome is None:
        if ended.error is not None and ended.transcript is None:
            raise ended.error  # it never began: there are no transfers left, or the tree is too deep
        why = ended.error.message if ended.error is not None else ""
        told = message_pb2.Part(text=f"For context: [{transfer.agent}] failed: {why}")
        lane.transcript.say(message_pb2.Message(role=message_pb2.ROLE_USER, author=transfer.agent, parts=[told]))
        return None
    return None if ended.outcome.action is None else passed_on(ended)


class SwarmAgent:
    """Members that hand over to one another until one answers."""

    kind = execution_pb2.AGENT_KIND_SWARM
    tool_links: Sequence[agent_pb2.ToolLink] = ()

    def __init__(self, definition: agent_pb2.AgentDefinition) -> None:
        self.definition = definition
        self.revision = revision(definition)

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """The answer of the member that hands over to nobody, or exits or breaks a loop.

        Raises RunError: SUB_AGENT_FAILED where a member failed, whatever its link says: nobody is there to go on;
        LIMIT_EXCEEDED where there are no transfers left, or the members go in circles.
        """
        links = {link.agent: link for link in self.definition.sub_agents}
        path = [self.definition.swarm.entry_agent or self.definition.sub_agents[0].agent]
        lane = lane_of(ctx)
        ended = await run_child(lane, Child(link=links[path[0]], name="h0"))
        while (outcome := _member(ended)).action is not None and outcome.action.HasField("transfer"):
            if ended.transcript is not None:
                _forget_transfer(ended.transcript)
            transfer = outcome.action.transfer
            child = Child(
                link=links[transfer.agent],
                name=f"h{len(path)}",
                trigger=execution_pb2.INVOCATION_TRIGGER_TRANSFER,
                input=transfer.message if transfer.HasField("message") else None,
                handover=Handover(
                    by=path[-1],
                    from_invocation_id=ended.result.child_invocation_id,
                    call_id=outcome.transfer_id,
                    path=tuple(path[-TRANSFER_WINDOW:]),
                ),
            )
            path.append(transfer.agent)
            ended = await run_child(lane, child)
        return passed_on(ended)


def _forget_transfer(transcript: Transcript) -> None:
    """Leaves out the result of the transfer that a member ended with, so that nobody is shown the transfer."""
    last = transcript.entries[-1] if transcript.entries else None
    if isinstance(last, HistoryEntry) and any(is_transfer(part.tool_result) for part in last.message.parts):
        transcript.entries.pop()


def _member(ended: DispatchResult) -> Outcome:
    if ended.outcome is None:
        raise failure(ended)
    return ended.outcome
