"""Agents that lead teams: a supervisor, whose members come back to it when they end. Members are any agents."""

from collections.abc import Sequence

from bough.v1 import agent_pb2, event_pb2, message_pb2
from bough_server.agents.llm import LlmAgent
from bough_server.runtime.agent import Outcome, llm_of
from bough_server.runtime.children import hand_over
from bough_server.runtime.context import Context


class SupervisorAgent:
    """A model in a loop with tools that hands over to members and goes on when they have ended."""

    kind = event_pb2.AGENT_KIND_SUPERVISOR

    def __init__(self, definition: agent_pb2.AgentDefinition) -> None:
        self.definition = definition
        self._lead = LlmAgent(definition)

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools of the definition."""
        return llm_of(self.definition).tools

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Answers as an LLM agent does; a member that exits or breaks a loop ends it as well. Raises RunError."""
        members = 0

        async def lend(ctx: Context, transfer: event_pb2.Transfer, call_id: str) -> Outcome | None:
            nonlocal members
            member, members = members, members + 1
            return await _lend(ctx, transfer, call_id, member)

        return await self._lead.run(ctx, input, on_transfer=lend)


async def _lend(ctx: Context, transfer: event_pb2.Transfer, call_id: str, member: int) -> Outcome | None:
    """Lets a member go on until it ends; gives how the supervisor ends with it, if it does."""
    ended = await hand_over(ctx, transfer, call_id, member=member)
    if ended.outcome is None:
        if ended.error is not None and ended.transcript is None:
            raise ended.error  # it never began: there are no handoffs left, or the tree is too deep
        why = ended.error.message if ended.error is not None else ""
        told = message_pb2.Part(text=f"For context: [{transfer.agent}] failed: {why}")
        ctx.transcript.say(message_pb2.Message(role=message_pb2.ROLE_USER, author=transfer.agent, parts=[told]))
        return None
    outcome = ended.outcome
    if outcome.action is None:
        return None
    is_exit = outcome.action.HasField("exit")
    return Outcome(
        output=outcome.output,
        end_reason=event_pb2.END_REASON_EXITED if is_exit else event_pb2.END_REASON_BROKE_LOOP,
        action=outcome.action,
        author=ended.author,
        is_said=True,
    )
