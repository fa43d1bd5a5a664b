"""The LLM agent: calls its model, runs the tools it asks for, and repairs an answer that does not match its schema."""

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NoReturn

from bough.v1 import action_pb2, agent_pb2, error_pb2, execution_pb2, message_pb2
from bough_server.agents.definition import revision
from bough_server.errors import RunError
from bough_server.log.session_state import json_text
from bough_server.matching.schemas import schema_mistakes
from bough_server.messages import calls_of, text_of, user
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context, Outcome, llm_of
from bough_server.runtime.children import run_transfer
from bough_server.runtime.context import lane_of
from bough_server.runtime.lane import Lane
from bough_server.runtime.toolset import Toolset
from bough_server.templates import render
from bough_server.tools.builtin import PLAN, RESPOND, action_of, closing_output

OnTransfer = Callable[[Lane, action_pb2.TransferAction, str], Awaitable[Outcome | None]]
"""Performs a transfer, whose call has the given id; returns the agent's outcome, or None if the agent continues."""

REPAIRS: Final = 2
"""How many repairs may be requested of an answer that does not match its schema, or that replaces a required call."""

_EMPTY: Final = "Your last answer was empty. Answer now, in words."
_EMPTY_FORM: Final = "Your last answer was empty. Answer now, with one JSON object and nothing around it."
_FENCED: Final = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)
# The mistakes go into the next request: those of a long answer must not fill the model's context.
_MOST_MISTAKES: Final = 5
_LONGEST_MISTAKE: Final = 300

MAX_STEPS: Final = 20
"""Default of the most model calls that an invocation may make."""

_CONTINUE: Final = "Go on."

# Not in the message of the plan_execute agent, which this agent and others see again when they do not have these tools.
_REPLAN: Final = (
    "If the objective is reached, call `respond` with the whole answer. Else call `plan` with the steps that are left."
)


class OutputRepair:
    """The repairs that one agent invocation has requested of its model so far.

    Without a schema any message with content is an answer. If the model must call one of some tools, text is never one.
    """

    def __init__(self, agent: str, schema_json: str, *, must_call: Sequence[str] = ()) -> None:
        self._agent = agent
        self._schema_json = schema_json
        self._must_call = " or ".join(f"`{name}`" for name in must_call)
        self._was_empty = False
        self._refused: list[message_pb2.Message] = []
        self._repairs = 0

    def repair_messages(self) -> list[message_pb2.Message]:
        """Return the messages to add after the history.

        These are the rejected answers, each with the reason, or a note that the last answer was empty.
        """
        if not self._was_empty:
            return list(self._refused)
        return [*self._refused, user(_EMPTY_FORM if self._schema_json else _EMPTY)]

    def on_tool_calls(self) -> None:
        self._was_empty = False

    def accept_answer(self, response: message_pb2.Message) -> message_pb2.Message | None:
        """Return the answer in a model's message without calls; None if the model is to be asked again.

        Raises RunError INVALID_OUTPUT if the answer was empty twice in a row, still does not match after the repairs,
        or the required call was not made.
        """
        answer = extract_answer(response)
        if self._must_call:
            self._ask_for_call(response if answer is not None else None)
            return None
        if answer is None:
            if self._was_empty:
                self._give_up("returned an empty answer twice.")
            self._was_empty = True
            return None
        self._was_empty = False
        return answer if not self._schema_json else self._check_schema(response, answer)

    def _check_schema(self, response: message_pb2.Message, answer: message_pb2.Message) -> message_pb2.Message | None:
        text = text_of(answer)
        # Many models wrap JSON in a code fence even if they are told not to; to ask again would cost a call.
        fenced = _FENCED.fullmatch(text)
        value_json = (fenced.group(1) if fenced else text).strip()
        mistakes = answer_mistakes(value_json, self._schema_json)
        if not mistakes:
            return message_pb2.Message(parts=[message_pb2.Part(data_json=value_json)])
        if self._repairs == REPAIRS:
            self._give_up(f"returned {REPAIRS + 1} answers that do not fit its output schema: {mistakes}.")
        self._repairs += 1
        again = f"Your answer does not fit: {mistakes}. Answer again, with one JSON object and nothing around it."
        self._refused += [response, user(again)]
        return None

    def _ask_for_call(self, response: message_pb2.Message | None) -> None:
        if self._repairs == REPAIRS:
            self._give_up(f"answered {REPAIRS + 1} times without calling {self._must_call}.")
        self._repairs += 1
        again = user(f"Answer with a call of {self._must_call}, not in words.")
        self._refused += [again] if response is None else [response, again]

    def _give_up(self, what: str) -> NoReturn:
        raise RunError(f"The model of {self._agent!r} {what}", reason=error_pb2.ERROR_REASON_INVALID_OUTPUT)


def extract_answer(message: message_pb2.Message) -> message_pb2.Message | None:
    """Return a model message's text, JSON and files, without reasoning and calls; None if it has none of them."""
    parts = [part for part in message.parts if part.WhichOneof("content") in ("text", "data_json", "blob")]
    if not any(part.text.strip() or part.data_json or part.HasField("blob") for part in parts):
        return None
    return message_pb2.Message(parts=parts)


def answer_mistakes(value_json: str, schema_json: str) -> str:
    """Return the problems of an answer as one line; empty if there are none."""
    try:
        value = json_value(value_json)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON ({error})"
    found = schema_mistakes(value, schema_json)
    shown = [mistake[:_LONGEST_MISTAKE] for mistake in found[:_MOST_MISTAKES]]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more")
    return "; ".join(shown)


def json_value(text: str) -> object:
    """Parse a JSON text. Raises ValueError or RecursionError, also for NaN, infinities and unpaired surrogates."""
    value: object = json.loads(text)
    json_text(value).encode()
    return value


class LlmAgent:
    """An agent that its definition describes completely."""

    kind = execution_pb2.AGENT_KIND_LLM

    def __init__(self, definition: agent_pb2.AgentDefinition) -> None:
        self.definition = definition
        self.revision = revision(definition)

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools of the definition."""
        return llm_of(self.definition).tools

    async def run(self, ctx: Context, input: message_pb2.Message, *, on_transfer: OnTransfer | None = None) -> Outcome:
        """Call the model, run the tools it calls, and repeat until it answers without calls.

        An answer that is empty or does not match the output schema is requested again, and so is a required call.
        Raises RunError: LIMIT_EXCEEDED after `max_steps` model calls, INVALID_OUTPUT if the repairs did not help, or
        the error of a model call or of an aborting sub-agent.
        """
        llm = llm_of(self.definition)
        max_steps = llm.max_steps if llm.HasField("max_steps") else MAX_STEPS
        lane = lane_of(ctx)
        toolset = lane.running.toolset
        repair = OutputRepair(
            self.definition.name,
            "" if toolset.must_close else self.definition.output_schema_json,
            must_call=toolset.closing if toolset.must_close else (),
        )
        for _ in range(max_steps):
            # A function: a replay builds no request, and one that is too large is built again from less history.
            response = await ctx.model(partial(self._request, ctx, toolset, repair))
            calls = calls_of(response.message)
            if calls:
                repair.on_tool_calls()
                answers = await ctx.tools(calls, parallel=not llm.HasField("parallel_tools") or llm.parallel_tools)
                outcome = await _ending(
                    lane, [answer.result for answer in answers], response.message, on_transfer or outcome_of_transfer
                )
                if outcome is not None:
                    return outcome
            elif answer := repair.accept_answer(response.message):
                return Outcome(output=answer)
        raise RunError(
            f"The agent {self.definition.name!r} made {max_steps} model calls without an answer: max_steps is reached.",
            reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        )

    def _request(self, ctx: Context, toolset: Toolset, repair: OutputRepair) -> ModelRequest:
        llm = llm_of(self.definition)
        visible = lane_of(ctx).visible_history.list_visible()
        messages = [*(one.message for one in visible), *repair.repair_messages()]
        if not messages or messages[-1].role == message_pb2.ROLE_ASSISTANT:
            # For example in the next iteration of a loop; many providers require a user message at the end.
            messages.append(user(_CONTINUE))
        return ModelRequest(
            messages=messages,
            forms=[one.forms for one in visible],
            instruction=self._instruction(ctx, toolset),
            tools=ctx.offers(),
            settings=llm.settings,
            tool_choice="required" if toolset.must_close else "auto",
            output_schema_json="" if toolset.must_close else self.definition.output_schema_json,
        )

    def _instruction(self, ctx: Context, toolset: Toolset) -> str:
        what = f"The instruction of {self.definition.name!r}"
        instruction = render(llm_of(self.definition).instruction, {}, ctx.state, what=what)
        orders = [_REPLAN] if toolset.must_close and RESPOND in toolset.closing else []
        return "\n\n".join([*filter(None, [instruction]), *orders])


async def _ending(
    lane: Lane,
    results: Sequence[message_pb2.ToolResult],
    response: message_pb2.Message,
    on_transfer: OnTransfer,
) -> Outcome | None:
    """Return how tool results end the agent; None if they do not.

    The first successful final answer, exit, break or transfer ends it.
    """
    for result in results:
        name = result.call.name
        if name in lane.running.toolset.closing and not result.HasField("error"):
            # The plan_execute agent records a plan as an event and repeats it in inputs: histories need no message.
            return Outcome(output=closing_output(result), closed_by=name, is_in_transcript=name == PLAN)
        action = action_of(result)
        if action is not None and action.HasField("exit"):
            return Outcome.exit(action.exit.final_answer)
        if action is not None and action.HasField("transfer"):
            return await _transfer(
                lane, action.transfer, result.call.call_id, response=response, on_transfer=on_transfer
            )
        if action is not None:
            return Outcome.break_loop(extract_answer(response), is_in_transcript=True)
    return None


async def _transfer(
    lane: Lane,
    transfer: action_pb2.TransferAction,
    call_id: str,
    *,
    response: message_pb2.Message,
    on_transfer: OnTransfer,
) -> Outcome | None:
    """Leave a transfer to a fellow member to the swarm; run an agent that this one links itself."""
    if transfer.agent not in lane.running.toolset.peers:
        return await on_transfer(lane, transfer, call_id)
    message = transfer.message if transfer.HasField("message") else None
    return Outcome.transfer(transfer.agent, message, output=extract_answer(response), call_id=call_id)


async def outcome_of_transfer(lane: Lane, transfer: action_pb2.TransferAction, call_id: str) -> Outcome:
    """Return the outcome of an agent that transferred, from the agent that answered for it.

    Raises RunError with its error.
    """
    ended = await run_transfer(lane, transfer, call_id)
    if ended.outcome is None:
        raise ended.error or RunError(
            f"The agent {transfer.agent!r} failed.", reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED
        )
    return Outcome(
        output=ended.outcome.output,
        end_reason=execution_pb2.END_REASON_TRANSFERRED,
        action=ended.outcome.action,
        author=ended.author,
        is_in_transcript=True,
    )
