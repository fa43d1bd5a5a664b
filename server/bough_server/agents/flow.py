"""Sequence, loop and parallel agents.

A loop's condition depends on recorded values alone: replay evaluates it again, so the log does not hold its result.
"""

from collections.abc import Sequence
from typing import Final

from bough.v1 import action_pb2, agent_pb2, error_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.agents.definition import revision
from bough_server.errors import RunError
from bough_server.functions import Condition, Values
from bough_server.log.session_state import value_at
from bough_server.runtime.agent import Context, Outcome
from bough_server.runtime.child_call import Dispatch, DispatchResult
from bough_server.runtime.child_input import snapshot_of
from bough_server.runtime.children import begin_iteration, run_child, run_lanes
from bough_server.runtime.context import lane_of
from bough_server.runtime.lane import Lane
from bough_server.truncation import MAX_TEXT_BYTES, size_of

_BLANK_LINE: Final = "\n\n"


class CompositeAgent:
    """An agent that runs other agents and calls neither a model nor a tool."""

    tool_links: Sequence[agent_pb2.ToolLink] = ()

    def __init__(self, definition: agent_pb2.AgentDefinition) -> None:
        self.definition = definition
        self.revision = revision(definition)


class SequenceAgent(CompositeAgent):
    """Runs its children in order; each sees the answers before it."""

    kind = execution_pb2.AGENT_KIND_SEQUENCE

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Return the last child's answer, or that of the first child that exits or breaks a loop.

        Raises RunError SUB_AGENT_FAILED if a child failed and its link does not say CONTINUE.
        """
        lane, result = lane_of(ctx), FlowResult()
        for index, link in enumerate(self.definition.sub_agents):
            if result.apply(link, await run_child(lane, Dispatch(key=lane.key(f"c{index}"), link=link))):
                break
        return result.outcome()


class LoopAgent(CompositeAgent):
    """Runs its children in order, repeatedly, until one breaks the loop, `until` holds or max_iterations is reached."""

    kind = execution_pb2.AGENT_KIND_LOOP

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Return the last answer of a child. A break ends this loop only and is not passed on to the caller.

        Raises RunError SUB_AGENT_FAILED if a child failed and its link does not say CONTINUE, and errors of the
        condition.
        """
        lane, result = lane_of(ctx), FlowResult()
        for number in range(self.definition.loop.max_iterations):
            await begin_iteration(lane, number)
            for index, link in enumerate(self.definition.sub_agents):
                ended = await run_child(
                    lane, Dispatch(key=lane.key(f"l{number}.c{index}"), link=link, iteration=number)
                )
                if result.apply(link, ended):
                    return result.outcome(in_loop=True)
            if is_done(lane, self.definition.loop.until, number):
                return result.outcome()
        return result.outcome(end_reason=execution_pb2.END_REASON_ITERATIONS_EXHAUSTED)


class ParallelAgent(CompositeAgent):
    """Runs its children concurrently, each in its own lane."""

    kind = execution_pb2.AGENT_KIND_PARALLEL

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Return the answers of the children in their order, and the action of the first child that has one.

        Raises RunError SUB_AGENT_FAILED if a child failed and its link does not say CONTINUE.
        """
        lane, parallel, links = lane_of(ctx), self.definition.parallel, self.definition.sub_agents
        ended = await run_lanes(
            lane,
            [Dispatch(key=lane.key(f"g{index}"), link=link) for index, link in enumerate(links)],
            fails_fast=parallel.on_failure == agent_pb2.PARALLEL_FAILURE_POLICY_FAIL_FAST,
            at_once=parallel.max_concurrency if parallel.HasField("max_concurrency") else len(links),
        )
        results = []
        for link, child in zip(links, ended, strict=True):
            if child is not None:  # None if the failure of another child ended it
                results.append(FlowResult())
                results[-1].apply(link, child)
        return join_outcomes([result.outcome() for result in results])


class FlowResult:
    """Result of a flow so far: the answer, its author and the action of the children that ended."""

    def __init__(self) -> None:
        self._answer = message_pb2.Message()
        self._author = ""
        self._action: action_pb2.AgentAction | None = None

    def apply(self, link: agent_pb2.AgentLink, ended: DispatchResult) -> bool:
        """Apply a child's end; return whether the flow ends with it.

        Raises RunError SUB_AGENT_FAILED if it failed and its link does not say CONTINUE.
        """
        if ended.outcome is None:
            if link.on_failure == policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE:
                return False
            raise failure(ended)
        self._action = ended.outcome.action
        # An agent that breaks a loop reviews the answer before it, so its own words count only if there is no answer.
        is_break = self._action is not None and self._action.HasField("break_loop")
        if ended.outcome.output.parts and not (is_break and self._answer.parts):
            self._answer, self._author = ended.outcome.output, ended.author
        return self._action is not None

    def outcome(
        self,
        *,
        in_loop: bool = False,
        end_reason: execution_pb2.EndReason.ValueType = execution_pb2.END_REASON_ANSWERED,
    ) -> Outcome:
        """Return the outcome of the flow; with `in_loop` a break is not passed on."""
        action = self._action
        if action is not None:
            is_exit = action.HasField("exit")
            end_reason = execution_pb2.END_REASON_EXITED if is_exit else execution_pb2.END_REASON_BROKE_LOOP
            if in_loop and not is_exit:
                action = None
        return Outcome(
            output=self._answer, end_reason=end_reason, action=action, author=self._author, is_in_transcript=True
        )


def join_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of lanes into one: their answers in order, and the first action among them.

    Texts are joined with blank lines into one text, as far as the size of one text allows.
    """
    output = message_pb2.Message()
    for outcome in outcomes:
        for position, part in enumerate(outcome.output.parts):
            last = output.parts[-1] if output.parts else None
            if position == 0 and part.text and last is not None and last.text and _fit_one(last.text, part.text):
                last.text += _BLANK_LINE + part.text
            else:
                output.parts.append(part)
    acting = next((outcome for outcome in outcomes if outcome.action is not None), None)
    # It ends every agent above with its own answer, not with what the other lanes said.
    if acting is not None and acting.action is not None and acting.action.HasField("exit"):
        return acting
    return Outcome(
        output=output,
        end_reason=acting.end_reason if acting is not None else execution_pb2.END_REASON_ANSWERED,
        action=acting.action if acting is not None else None,
        author=", ".join(outcome.author for outcome in outcomes if outcome.output.parts),
        is_in_transcript=True,
    )


def _fit_one(text: str, following: str) -> bool:
    return size_of(text) + len(_BLANK_LINE) + size_of(following) <= MAX_TEXT_BYTES


def pass_on_outcome(ended: DispatchResult) -> Outcome:
    """Return the outcome of a composite that ends with a child: the child's answer and action."""
    assert ended.outcome is not None, "a failed child has no outcome to pass on"
    action = ended.outcome.action
    end_reason = execution_pb2.END_REASON_ANSWERED
    if action is not None:
        is_exit = action.HasField("exit")
        end_reason = execution_pb2.END_REASON_EXITED if is_exit else execution_pb2.END_REASON_BROKE_LOOP
    return Outcome(
        output=ended.outcome.output, end_reason=end_reason, action=action, author=ended.author, is_in_transcript=True
    )


def failure(ended: DispatchResult) -> RunError:
    """Return the error of a composite whose child failed, with the child's details."""
    # The result of a call is what a model reads, and has no details: they are in the error itself.
    error = ended.result.error
    return RunError(
        error.message,
        reason=error.reason or error_pb2.ERROR_REASON_SUB_AGENT_FAILED,
        retryable=error.retryable,
        details_json=ended.error.details_json if ended.error is not None else "",
    )


def is_done(lane: Lane, until: agent_pb2.LoopUntil, iteration: int) -> bool:
    """Return whether `until` ends the loop after this iteration. Raises RunError with the error of the condition."""
    if until.HasField("state_path"):
        try:
            # Only `true` ends the loop: a text such as "false", or a number, is no answer to whether it is done.
            return value_at(Values(lane.lane_state.values), until.state_path) is True
        except KeyError:
            return False
    if not until.HasField("predicate"):
        return False
    function = lane.running.resolver.functions[until.predicate]
    assert isinstance(function, Condition)  # checked when the run started
    return function.holds(snapshot_of(lane, iteration=iteration))
