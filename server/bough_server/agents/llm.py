"""The LLM agent: a model in a loop with tools, until it answers; everything it does is an effect of its context."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2
from bough_server.agents.insistence import Insistence, spoken
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context, Outcome, broke_loop, exited, llm_of, transferred
from bough_server.runtime.children import hand_over
from bough_server.runtime.lane import Lane
from bough_server.runtime.toolset import Toolset
from bough_server.templates import render
from bough_server.tools.builtin import PLAN, action_of, closing_output

OnTransfer = Callable[[Lane, event_pb2.Transfer, str], Awaitable[Outcome | None]]
"""What a transfer and the id of its call come to: how the agent ends, or None where it goes on."""

MAX_STEPS: Final = 20
"""How many model calls an invocation may make where its definition does not say."""

_GO_ON: Final = "Go on."


class LlmAgent:
    """An agent that its definition describes whole."""

    kind = event_pb2.AGENT_KIND_LLM

    def __init__(self, definition: agent_pb2.AgentDefinition) -> None:
        self.definition = definition

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools of the definition."""
        return llm_of(self.definition).tools

    async def run(self, ctx: Context, input: message_pb2.Message, *, on_transfer: OnTransfer | None = None) -> Outcome:
        """Asks the model, runs what it calls, and asks again, until it answers without calls.

        An answer that is empty, or does not fit the output schema, is asked for again; so is a call, where words are
        no answer. Raises RunError: LIMIT_EXCEEDED
        after `max_steps` model calls, INVALID_OUTPUT where that did not help, or what a model call or an aborting
        sub-agent raised.
        """
        llm = llm_of(self.definition)
        most = llm.max_steps if llm.HasField("max_steps") else MAX_STEPS
        lane = Lane.of(ctx)
        toolset = lane.frame.toolset
        insistence = Insistence(
            self.definition.name,
            "" if toolset.must_close else self.definition.output_schema_json,
            must_call=toolset.closing if toolset.must_close else (),
        )
        for _ in range(most):
            response = await ctx.model(partial(self._request, ctx, toolset, insistence))
            calls = [part.tool_call for part in response.message.parts if part.HasField("tool_call")]
            if calls:
                insistence.called()
                answers = await ctx.tools(calls, parallel=not llm.HasField("parallel_tools") or llm.parallel_tools)
                outcome = await _ending(
                    lane, [answer.result for answer in answers], response.message, on_transfer or handed_over
                )
                if outcome is not None:
                    return outcome
            elif answer := insistence.answer(response.message):
                return Outcome(output=answer)
        raise RunError(
            f"The agent {self.definition.name!r} made {most} model calls without an answer: max_steps is reached.",
            reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        )

    def _request(self, ctx: Context, toolset: Toolset, insistence: Insistence) -> ModelRequest:
        llm = llm_of(self.definition)
        messages = [*ctx.history(), *insistence.further()]
        if not messages or messages[-1].role == message_pb2.ROLE_ASSISTANT:
            # In the next round of a loop, say; many providers want to be asked.
            messages.append(message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=_GO_ON)]))
        return ModelRequest(
            messages=messages,
            instruction=render(llm.instruction, {}, ctx.state, what=f"The instruction of {self.definition.name!r}"),
            tools=ctx.offers(),
            settings=llm.settings,
            tool_choice="required" if toolset.must_close else "auto",
            output_schema_json="" if toolset.must_close else self.definition.output_schema_json,
        )


async def _ending(
    lane: Lane,
    results: Sequence[message_pb2.ToolResult],
    said: message_pb2.Message,
    on_transfer: OnTransfer,
) -> Outcome | None:
    """How calls end their agent: the first that is a final answer, an exit, a break or a transfer and succeeded."""
    for result in results:
        name = result.call.name
        if name in lane.frame.toolset.closing and not result.HasField("error"):
            return Outcome(output=closing_output(result), closed_by=name, is_said=name == PLAN)
        action = action_of(result)
        if action is not None and action.HasField("exit"):
            return exited(action.exit.final_result)
        if action is not None and action.HasField("transfer"):
            return await _transfer(lane, action.transfer, result.call.call_id, said, on_transfer)
        if action is not None:
            return broke_loop(spoken(said) or message_pb2.Message())
    return None


async def _transfer(
    lane: Lane, transfer: event_pb2.Transfer, call_id: str, said: message_pb2.Message, on_transfer: OnTransfer
) -> Outcome | None:
    """Leaves another member of its swarm to the swarm; whom it links itself it runs."""
    if transfer.agent not in lane.frame.toolset.peers:
        return await on_transfer(lane, transfer, call_id)
    message = transfer.message if transfer.HasField("message") else None
    return transferred(transfer.agent, message=message, output=spoken(said), call_id=call_id)


async def handed_over(lane: Lane, transfer: event_pb2.Transfer, call_id: str) -> Outcome:
    """The outcome of an agent in whose place another one answered. Raises RunError with what that one failed with."""
    ended = await hand_over(lane, transfer, call_id)
    if ended.outcome is None:
        raise ended.error or RunError(
            f"The agent {transfer.agent!r} failed.", reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED
        )
    return Outcome(
        output=ended.outcome.output,
        end_reason=event_pb2.END_REASON_TRANSFERRED,
        action=ended.outcome.action,
        author=ended.author,
        is_said=True,
    )
