"""What a result keeps of a turn: its answer, and the tree of its agents with their calls, within bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from bough.v1 import error_pb2, invocation_pb2, message_pb2
from bough.v1.eval_result_pb2 import EvalAgent, EvalTurnResult, TreeMark
from bough_server.messages import copy_of, text_of

MAX_BYTES: Final = 1536 * 1024
"""The most bytes of a turn, and of all turns of a run together with its scores."""

_MAX_NAME: Final = 256
"""The most characters of a name or an id: those of other systems may be longer than ours."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """How much of a turn is kept: characters of each text, and numbers of agents, and of calls and of steps."""

    text: int
    agents: int
    calls: int


_BOUNDS: Final[Sequence[_Bounds]] = (
    _Bounds(16_384, 1_000, 2_000),
    _Bounds(2_000, 1_000, 2_000),
    _Bounds(500, 1_000, 2_000),
    _Bounds(100, 1_000, 2_000),
    _Bounds(100, 250, 500),
    _Bounds(100, 50, 100),
    _Bounds(100, 0, 0),
)
"""From the usual bounds to the tightest: the first that fit are taken."""


def turn_result(
    invocation: invocation_pb2.Invocation,
    *,
    marks: Mapping[str, TreeMark.ValueType] = MappingProxyType({}),
    max_bytes: int = MAX_BYTES,
    has_user: bool = False,
) -> EvalTurnResult:
    """Return what a result keeps of a turn, in at most `max_bytes`, of which 4 KiB are always enough.

    Texts are cut at 16,384 characters, and at most 1,000 agents, 2,000 calls and 2,000 steps are kept, fewer if they do
    not fit.
    `marks` are those of the agents by invocation id. With `has_user` what the user said is kept too.
    """
    result = EvalTurnResult()
    for bounds in _BOUNDS:
        result = _Truncator(bounds).turn(invocation, marks, has_user=has_user)
        if result.ByteSize() <= max_bytes:
            break
    return result


@dataclass(slots=True)
class _Truncator:
    """Copies what is kept, and notes whether anything was left out."""

    bounds: _Bounds
    has_truncated: bool = field(default=False, init=False)

    def turn(
        self, invocation: invocation_pb2.Invocation, marks: Mapping[str, TreeMark.ValueType], *, has_user: bool
    ) -> EvalTurnResult:
        result = EvalTurnResult(
            run_id=self._name(invocation.run_id),
            trace_id=next((self._name(agent.trace_id) for agent in invocation.agents if agent.trace_id), ""),
            state=invocation.state,
            error=self._error(invocation.error) if invocation.HasField("error") else None,
            answer=self._answer(invocation.final_response),
            user=self._answer(invocation.user_content) if has_user else "",
        )
        self._add_agents(result, invocation.agents, marks)
        # Added in place: a message that is passed to another's constructor is copied.
        kept = {agent.invocation_id: one for agent, one in zip(invocation.agents, result.agents, strict=False)}
        numbers = self._add_steps(invocation, kept)
        for call in sorted(invocation.tools[: self.bounds.calls], key=attrgetter("sequence")):
            if call.invocation_id in kept:
                self._add_call(kept[call.invocation_id], call, numbers.get((call.invocation_id, call.step_id)))
        # A record that is only the beginning of a run can be smaller than the bounds.
        has_more = max(len(invocation.agents), invocation.agents_total) > len(result.agents) or max(
            len(invocation.tools), invocation.tools_total
        ) > sum(len(agent.calls) for agent in result.agents)
        result.truncated = self.has_truncated or has_more
        return result

    def _add_agents(
        self,
        result: EvalTurnResult,
        agents: Sequence[invocation_pb2.AgentInvocation],
        marks: Mapping[str, TreeMark.ValueType],
    ) -> None:
        for agent in agents[: self.bounds.agents]:
            kept = result.agents.add(
                name=self._name(agent.name),
                depth=agent.depth,
                invocation_id=self._name(agent.invocation_id),
                kind=agent.kind,
                state=agent.state,
                step_count=agent.step_count,
                answer=self._answer(agent.output),
            )
            kept.mark = marks.get(agent.invocation_id, kept.mark)
            if agent.HasField("usage"):
                kept.usage.CopyFrom(agent.usage)

    def _add_steps(
        self, invocation: invocation_pb2.Invocation, kept: Mapping[str, EvalAgent]
    ) -> Mapping[tuple[str, str], int]:
        """Add the steps to their agents. Return the number of each by its agent invocation and its id."""
        numbers: dict[tuple[str, str], int] = {}
        answers = {agent.invocation_id: text_of(agent.output) for agent in invocation.agents}
        self.has_truncated = self.has_truncated or len(invocation.steps) > self.bounds.calls
        for step in invocation.steps[: self.bounds.calls]:
            agent = kept.get(step.invocation_id)
            if agent is None:
                continue
            # The step's own index is not unique: parallel paths of an agent's code count each their own.
            number = numbers[step.invocation_id, step.step_id] = len(agent.steps)
            text = text_of(step.llm_response.message)
            agent.steps.add(index=number, text="" if text == answers[step.invocation_id] else self._text(text))
        return numbers

    def _add_call(self, agent: EvalAgent, call: invocation_pb2.ToolInvocation, step: int | None) -> None:
        kept = agent.calls.add(
            name=self._name(call.name),
            arguments_json=self._text(call.arguments_json),
            executed_arguments_json=self._text(call.executed_arguments_json),
            result_json=self._text(call.result_json),
            state=call.state,
            step_index=step,
        )
        if call.HasField("error"):
            kept.error.CopyFrom(self._error(call.error))
        self.has_truncated |= call.arguments_truncated or call.executed_arguments_truncated or call.result_truncated

    def _error(self, error: error_pb2.AgentError) -> error_pb2.AgentError:
        kept = copy_of(error)
        kept.message, kept.details_json = self._text(error.message), ""
        kept.agent, kept.invocation_id = self._name(error.agent), self._name(error.invocation_id)
        self.has_truncated = self.has_truncated or bool(error.details_json)
        return kept

    def _answer(self, message: message_pb2.Message) -> str:
        self.has_truncated = self.has_truncated or any(part.truncated for part in message.parts)
        return self._text(text_of(message))

    def _text(self, text: str) -> str:
        return self._truncate(text, self.bounds.text)

    def _name(self, text: str) -> str:
        return self._truncate(text, _MAX_NAME)

    def _truncate(self, text: str, limit: int) -> str:
        self.has_truncated = self.has_truncated or len(text) > limit
        return text[:limit]
