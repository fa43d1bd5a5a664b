"""Agents that lead teams: a supervisor, whose members return to it, and a swarm, whose members transfer to each other.

Members may be agents of any kind.
"""

from collections.abc import Sequence

from bough.v1 import action_pb2, agent_pb2, execution_pb2, message_pb2
from bough_server.agents.definition import revision
from bough_server.agents.flow import CompositeAgent, failure, pass_on_outcome
from bough_server.agents.llm import LlmAgent
from bough_server.engine.limits import TRANSFER_WINDOW
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.runtime.agent import Context, Outcome, llm_of
from bough_server.runtime.child_call import Dispatch, DispatchResult, Transfer
from bough_server.runtime.children import run_child, run_transfer
from bough_server.runtime.context import lane_of
from bough_server.runtime.lane import Lane
from bough_server.runtime.visible_history import is_transfer


class SupervisorAgent:
    """An LLM agent that transfers to members and continues when they have ended."""

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
        """Answer as an LLM agent does; a member that exits or breaks a loop ends it as well. Raises RunError.

        A member that spoke last in the session runs first, if the definition says so.
        """
        lane, members = lane_of(ctx), 0
        if first := _last_speaker(lane):
            # The numbers are keys of effects, and the first member has h0.
            members = 1
            link = next(link for link in self.definition.sub_agents if link.agent == first)
            outcome = _after_member(lane, first, await run_child(lane, Dispatch(key=lane.key("h0"), link=link)))
            if outcome is not None:
                return outcome

        async def run_member(lane: Lane, transfer: action_pb2.TransferAction, call_id: str) -> Outcome | None:
            nonlocal members
            member, members = members, members + 1
            return await _run_member(lane, transfer, call_id, member)

        return await self._lead.run(ctx, input, on_transfer=run_member)


async def _run_member(lane: Lane, transfer: action_pb2.TransferAction, call_id: str, member: int) -> Outcome | None:
    """Run a member until it ends; return the supervisor's outcome if the member ends it, else None."""
    return _after_member(lane, transfer.agent, await run_transfer(lane, transfer, call_id, member=member))


def _last_speaker(lane: Lane) -> str:
    """Return the member that the root of a run starts with; empty for its usual start, and below the root."""
    return lane.execution.starts_with if lane.running.parent is None else ""


def _after_member(lane: Lane, member: str, ended: DispatchResult) -> Outcome | None:
    """Return the outcome of a supervisor that its member ended; None if it continues. Raises RunError."""
    if ended.outcome is None:
        if ended.error is not None and ended.transcript is None:
            raise ended.error  # it never started: no transfers are left, or the tree is too deep
        reason = ended.error.message if ended.error is not None else ""
        note = message_pb2.Part(text=f"For context: [{member}] failed: {reason}")
        # Without an id and a kind: for the model of this run, not for the session.
        lane.transcript.add_message(message_pb2.Message(role=message_pb2.ROLE_USER, author=member, parts=[note]))
        return None
    return None if ended.outcome.action is None else pass_on_outcome(ended)


class SwarmAgent(CompositeAgent):
    """Members that transfer to each other until one answers."""

    kind = execution_pb2.AGENT_KIND_SWARM

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Return the answer of the member that ends without a transfer, or that exits or breaks a loop.

        Raises RunError: SUB_AGENT_FAILED if a member failed, whatever its link says, since there is no agent to
        continue; LIMIT_EXCEEDED if no transfers are left, or the members transfer in a cycle.
        """
        links = {link.agent: link for link in self.definition.sub_agents}
        lane = lane_of(ctx)
        entry = self.definition.swarm.entry_agent or self.definition.sub_agents[0].agent
        path = [_last_speaker(lane) or entry]
        ended = await run_child(lane, Dispatch(key=lane.key("h0"), link=links[path[0]]))
        while (outcome := _outcome_of_member(ended)).action is not None and outcome.action.HasField("transfer"):
            if ended.transcript is not None:
                _forget_transfer(ended.transcript)
            transfer = outcome.action.transfer
            work = Dispatch(
                key=lane.key(f"h{len(path)}"),
                link=links[transfer.agent],
                trigger=execution_pb2.INVOCATION_TRIGGER_TRANSFER,
                input=transfer.message if transfer.HasField("message") else None,
                transfer=Transfer(
                    by=path[-1],
                    from_invocation_id=ended.result.child_invocation_id,
                    call_id=outcome.transfer_id,
                    path=tuple(path[-TRANSFER_WINDOW:]),
                ),
            )
            # After the Transfer was made: its path ends with the agent that transfers.
            path.append(transfer.agent)
            ended = await run_child(lane, work)
        return pass_on_outcome(ended)


def _forget_transfer(transcript: Transcript) -> None:
    """Remove the result of the transfer that a member ended with, so that no agent is shown the transfer."""
    last = transcript.entries[-1] if transcript.entries else None
    if isinstance(last, HistoryEntry) and any(is_transfer(part.tool_result) for part in last.message.parts):
        transcript.entries.pop()


def _outcome_of_member(ended: DispatchResult) -> Outcome:
    if ended.outcome is None:
        raise failure(ended)
    return ended.outcome
