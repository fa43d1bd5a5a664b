"""The plan_execute agent: makes a plan, executes its steps one at a time, and records its progress."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.agents.flow import CompositeAgent, failure, pass_on_outcome
from bough_server.errors import MAX_DETAILS_BYTES, RunError
from bough_server.log.session_state import MAX_STATE_BYTES, apply_write, json_text, state_size, value_size, write_of
from bough_server.models.model import ToolSpec
from bough_server.models.structured_output import part_to_text
from bough_server.runtime.agent import Context, Outcome
from bough_server.runtime.child_call import Dispatch, DispatchResult
from bough_server.runtime.children import record_plan, run_child
from bough_server.runtime.context import lane_of
from bough_server.runtime.lane import Lane
from bough_server.tools.arguments import parse_arguments
from bough_server.tools.builtin import PLAN, PLAN_SPEC, RESPOND, RESPOND_SPEC
from bough_server.truncation import fit_texts, size_of, truncate_text

ROOM: Final = 48 * 1024
"""The most bytes of a plan and of its executed steps with their results, as JSON; the longest texts are truncated."""

EMPTY_BYTES: Final = len("[]") * 2
"""Bytes of an empty plan and an empty list of executed steps, as two JSON values."""

_ITEM_BYTES: Final = len('"",')
_EXECUTED_BYTES: Final = len('{"step":"","result":""},')

MAX_ITERATIONS: Final = 10
"""Default of the most steps that are executed."""

_SAVED_KEYS: Final = ("plan", "executed_steps")


class ExecutedStep(TypedDict):
    """A step that was executed, as session state holds it."""

    step: str
    result: str


class SavedProgress(TypedDict):
    """The plan and the executed steps, as session state holds them."""

    plan: list[str]
    executed_steps: list[ExecutedStep]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a plan."""

    objective: str
    plan: list[str] = field(default_factory=list)
    """The remaining steps."""
    executed: list[ExecutedStep] = field(default_factory=list)

    def complete_step(self, result: str) -> None:
        """Move the first step of the plan to the executed ones."""
        self.executed.append(ExecutedStep(step=self.plan.pop(0), result=fit_texts([result], ROOM)[0]))

    def to_session_state(self, room: int = ROOM) -> SavedProgress:
        """Return both values for session state, in at most `room` bytes of JSON together.

        `room` is at least EMPTY_BYTES.

        The longest texts are truncated. If the steps do not fit even without texts, the earliest executed ones are
        dropped first, then the last ones of the plan.
        """
        left = room - EMPTY_BYTES
        plan = self.plan[: left // _ITEM_BYTES]
        left -= len(plan) * _ITEM_BYTES
        executed = self.executed[max(0, len(self.executed) - left // _EXECUTED_BYTES) :]
        left -= len(executed) * _EXECUTED_BYTES
        texts = [*plan, *(text for one in executed for text in (one["step"], one["result"]))]
        fitting = _fit_json(texts, left + bool(plan) + bool(executed))  # no comma follows the last of each
        done = fitting[len(plan) :]
        return SavedProgress(
            plan=fitting[: len(plan)],
            executed_steps=[ExecutedStep(step=done[at], result=done[at + 1]) for at in range(0, len(done), 2)],
        )

    def details(self) -> str:
        """Return the progress as JSON for an error, truncated to the size of an error's details."""
        return json_text(self.to_session_state(MAX_DETAILS_BYTES - len('{"plan":,"executed_steps":}')))

    def facts(self, step: str) -> dict[str, str]:
        """Return the progress as texts for an input builder.

        `step` is the step to execute, or the one executed last.
        """
        saved = self.to_session_state()
        done = [f"{one['step']}\n   Result: {one['result']}" for one in saved["executed_steps"]]
        return {"plan": _number_lines(saved["plan"]), "step": step, "executed_steps": _number_lines(done)}


def _number_lines(lines: Sequence[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _fit_json(texts: Sequence[str], room: int) -> list[str]:
    """Truncate the longest texts to one length so that all take at most `room` bytes of JSON without their quotes."""
    # JSON never shortens a text: one that is too long by its own bytes is truncated anyway, so it is not encoded whole.
    sizes = [
        _json_size(text) if text == short else room + 1
        for text, short in zip(texts, fit_texts(texts, room), strict=True)
    ]
    fitting = [""] * len(texts)
    left = room
    for rank, index in enumerate(sorted(range(len(texts)), key=sizes.__getitem__)):
        share = left // (len(texts) - rank)
        fitting[index] = texts[index] if sizes[index] <= share else _truncate_json(texts[index], share)
        left -= _json_size(fitting[index])
    return fitting


def _truncate_json(text: str, share: int) -> str:
    """Return the longest truncation of a text in `share` bytes of JSON; empty if not even the mark fits."""
    if len(text) > 2 * share + 2:
        text = text[: share + 1] + text[-share - 1 :]  # bounds the work: no truncation keeps more of either end
    limits = range(min(share + 1, size_of(text)))
    fits = bisect_right(limits, share, key=lambda limit: _json_size(truncate_text(text, limit)))
    return truncate_text(text, limits[fits - 1]) if fits else ""


def _json_size(text: str) -> int:
    return size_of(json_text(text)) - len('""')


class PlanExecuteAgent(CompositeAgent):
    """A planner, an executor and a replanner; each iteration executes one step."""

    kind = execution_pb2.AGENT_KIND_PLAN_EXECUTE

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Return the replanner's answer, or that of a child that exits or breaks a loop.

        Raises RunError: SUB_AGENT_FAILED if a child failed, except an executor whose link says CONTINUE; INVALID_OUTPUT
        if the planner or the replanner ended without a required call; LIMIT_EXCEEDED after `max_iterations` steps
        without an answer, with the plan and the executed steps in its details.
        """
        lane, roles = lane_of(ctx), self.definition.plan_execute
        links = {link.agent: link for link in self.definition.sub_agents}
        most = roles.max_iterations if roles.HasField("max_iterations") else MAX_ITERATIONS
        # Truncated, as it is repeated in the input of every child, which is bounded.
        progress = Progress(objective=truncate_text(_text_of(input), ROOM))
        work = Dispatch(
            key=lane.key("p0.c0"),
            link=links[roles.planner],
            trigger=execution_pb2.INVOCATION_TRIGGER_PLAN,
            closing=(PLAN_SPEC,),
            facts=progress.facts(""),
            iteration=0,
        )
        planned = await run_child(lane, work)
        for number in range(most):
            if (steps := _steps(planned)) is None:
                return pass_on_outcome(planned)
            progress.plan = steps
            _save(lane, progress)
            await record_plan(lane, number, steps)
            done = await run_child(lane, _executor(lane, links[roles.executor], number, progress))
            if done.outcome is not None and done.outcome.action is not None:
                return pass_on_outcome(done)
            progress.complete_step(_result(links[roles.executor], done))
            _save(lane, progress)
            planned = await run_child(lane, _replanner(lane, links[roles.replanner or roles.planner], number, progress))
        if (steps := _steps(planned)) is None:
            return pass_on_outcome(planned)
        progress.plan = steps
        _save(lane, progress)
        # Recorded although none of them will run: the log shows what was left to do.
        await record_plan(lane, most, steps)
        raise _build_limit_error(self.definition.name, most, progress)


def _build_limit_error(name: str, executed: int, progress: Progress) -> RunError:
    return RunError(
        f"The agent {name!r} executed {executed} steps without an answer: max_iterations is reached. "
        f"{len(progress.plan)} more are planned.",
        reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        details_json=progress.details(),
    )


def _save(lane: Lane, progress: Progress) -> None:
    """Write the progress to session state if there is room for it; the next effect records the write."""
    values = apply_write(lane.lane_state.values, write_of(lane.state.pending()))
    others = {name: text for name, text in values.items() if name not in _SAVED_KEYS}
    room = MAX_STATE_BYTES - state_size(others) - sum(value_size(name, "") for name in _SAVED_KEYS)
    if room < EMPTY_BYTES:
        return
    saved = progress.to_session_state(min(room, ROOM))
    for name in _SAVED_KEYS:
        lane.state.pop(name, None)  # both new values fit together, but one of them beside the other's old value may not
    lane.state["plan"], lane.state["executed_steps"] = saved["plan"], saved["executed_steps"]


def _executor(lane: Lane, link: agent_pb2.AgentLink, number: int, progress: Progress) -> Dispatch:
    facts = progress.facts(progress.plan[0])
    texts = [
        f"Objective: {progress.objective}",
        f"The plan:\n{facts['plan']}",
        f"Done so far:\n{facts['executed_steps'] or 'Nothing.'}",
        f"Do the first step of the plan now, and no other: {facts['step']}",
    ]
    return _plan_child(lane.key(f"p{number}.c1"), link, texts, facts=facts, iteration=number)


def _replanner(lane: Lane, link: agent_pb2.AgentLink, number: int, progress: Progress) -> Dispatch:
    facts = progress.facts(progress.executed[-1]["step"])
    texts = [
        f"Objective: {progress.objective}",
        f"Done so far:\n{facts['executed_steps']}",
        f"Left of the plan:\n{facts['plan'] or 'Nothing.'}",
    ]
    return _plan_child(
        lane.key(f"p{number}.c2"), link, texts, facts=facts, closing=(PLAN_SPEC, RESPOND_SPEC), iteration=number
    )


def _plan_child(
    key: str,
    link: agent_pb2.AgentLink,
    texts: Sequence[str],
    *,
    facts: dict[str, str],
    iteration: int,
    closing: Sequence[ToolSpec] = (),
) -> Dispatch:
    return Dispatch(
        key=key,
        link=link,
        trigger=execution_pb2.INVOCATION_TRIGGER_PLAN,
        input=message_pb2.Message(parts=[message_pb2.Part(text="\n\n".join(texts))]),
        closing=closing,
        facts=facts,
        iteration=iteration,
    )


def _steps(planned: DispatchResult) -> list[str] | None:
    """Return the steps of a plan; None if its child answered instead. Raises RunError if it did neither, or failed."""
    if planned.outcome is None:
        raise failure(planned)
    outcome = planned.outcome
    if outcome.action is not None or outcome.closed_by == RESPOND:
        return None
    if outcome.closed_by != PLAN:
        raise RunError(
            f"{planned.author!r} answered in place of an agent that had to plan. A planner must not transfer.",
            reason=error_pb2.ERROR_REASON_INVALID_OUTPUT,
        )
    # Checked when the model called `plan`: a plan with mistakes went back to it as a failed call.
    planning = parse_arguments(outcome.output.parts[0].data_json, PLAN_SPEC.input_schema_json)
    return [step.strip() for step in planning["steps"]]


def _result(link: agent_pb2.AgentLink, done: DispatchResult) -> str:
    """Return the result of a step as text. Raises RunError if it failed and its link does not say CONTINUE."""
    if done.outcome is not None:
        return _text_of(done.outcome.output)
    if link.on_failure != policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE:
        raise failure(done)
    return f"failed: {done.error.message if done.error is not None else done.result.error.message}"


def _text_of(message: message_pb2.Message) -> str:
    return "\n".join(filter(None, (part_to_text(part) for part in message.parts)))
