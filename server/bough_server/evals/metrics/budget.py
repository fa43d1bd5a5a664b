"""The budget metric: what the runs of a trial used together, or one agent in them, is within its bounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2, usage_pb2
from bough.v1.invocation_pb2 import AgentInvocation, Invocation, ToolInvocation
from bough_server.evals.metrics.turn import Turn, no_score, with_score
from bough_server.log.usage import Sums, has_whole_cost

_BOUNDS: Final[Mapping[str, str]] = {
    "model_calls": "model calls",
    "tool_calls": "tool calls",
    "tokens": "tokens",
    "cost_nanos": "cost",
    "depth": "depth",
    "transfers": "transfers",
}
"""The numbers of Limits that are bounds here, with their words."""

_WORDS: Final[Mapping[str, str]] = {**_BOUNDS, "wall_duration": "time", "errors": "errors"}

_BILLION: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """How much was used of one thing."""

    known: int
    """What is known of it."""
    is_whole: bool = True
    """Whether that is all of it."""


def score(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> eval_result_pb2.MetricScore | None:
    """Return 1 if the turns together are within every bound, else 0.

    They are not scored if something under a bound is not known, unless what is known exceeds a bound.
    """
    bounds = _bounds(metric.budget)
    runs = [turn.invocation for turn in turns if not turn.is_conversation]
    used = _measure_consumption([part for run in runs for part in _parts(run, metric.budget.agent)])
    over = [
        f"{_WORDS[name]}: {_text(name, used[name].known)}, at most {_text(name, bound)}"
        for name, bound in bounds.items()
        if used[name].known > bound
    ]
    if over:
        return with_score(metric, 0.0, f"It used too much: {'; '.join(over)}.")
    unknown = [_WORDS[name] for name in bounds if not used[name].is_whole]
    if unknown:
        return no_score(metric, f"It is not known how much was used: {', '.join(unknown)}.")
    return with_score(metric, 1.0)


def compute_own_usage(invocation: Invocation) -> Sums:
    """Return what a run used itself: a fork without its shared beginning, which is charged to its origin."""
    whole = Sums.of(invocation.tree_usage)
    for name, value in Sums.of(invocation.inherited_usage).numbers.items():
        if name in whole.numbers:
            whole.numbers[name] = max(0, whole.numbers[name] - value)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A whole run, or one agent of it with everything below."""

    usage: Sums | None
    """None if the record does not say what was used."""
    agents: Sequence[AgentInvocation]
    calls: Sequence[ToolInvocation]
    duration_ns: int | None
    transfers: int

    @property
    def agents_have_costs(self) -> bool:
        """Whether every agent that called a model has a cost; older records do not count the calls without."""
        own = [agent.usage for agent in self.agents]
        return all(used.HasField("cost_nanos") for used in own if used.model_calls)

    @property
    def depth(self) -> int:
        return max((agent.depth for agent in self.agents), default=0) - min(
            (one.depth for one in self.agents), default=0
        )

    @property
    def errors(self) -> int:
        # A failed call of an agent is the failure of that agent, which is counted already.
        calls = [call for call in self.calls if not call.child_invocation_id]
        states = [*(agent.state for agent in self.agents), *(call.state for call in calls)]
        return states.count(execution_pb2.EXECUTION_STATE_FAILED)


def _parts(invocation: Invocation, agent: str) -> Iterator[_Part]:
    if not agent:
        yield _Part(
            usage=compute_own_usage(invocation) if invocation.HasField("tree_usage") else None,
            agents=invocation.agents,
            calls=invocation.tools,
            duration_ns=duration_ns(invocation),
            transfers=sum(map(_is_transfer, invocation.agents)),
        )
        return
    for agents in _subtrees(invocation.agents, agent):
        ids = {one.invocation_id for one in agents}
        transferred = filter(_is_transfer, invocation.agents)
        yield _Part(
            usage=Sums.of(agents[0].tree_usage) if agents[0].HasField("tree_usage") else None,
            agents=agents,
            calls=[call for call in invocation.tools if call.invocation_id in ids],
            duration_ns=duration_ns(agents[0]),
            transfers=sum((one.from_invocation_id or one.parent_invocation_id) in ids for one in transferred),
        )


def _subtrees(agents: Sequence[AgentInvocation], name: str) -> Iterator[Sequence[AgentInvocation]]:
    """Yield each topmost agent of a name with everything below it, from agents in preorder."""
    found: list[AgentInvocation] = []
    for agent in agents:
        if found and agent.depth > found[0].depth:
            found.append(agent)
            continue
        if found:
            yield found
        found = [agent] if agent.name == name else []
    if found:
        yield found


def _is_transfer(agent: AgentInvocation) -> bool:
    return agent.trigger == execution_pb2.INVOCATION_TRIGGER_TRANSFER


def duration_ns(of: Invocation | AgentInvocation) -> int | None:
    """Return the nanoseconds from start to end; None if either is not known."""
    if not (of.HasField("start_time") and of.HasField("end_time")):
        return None
    return max(0, _nanoseconds(of.end_time) - _nanoseconds(of.start_time))


def _nanoseconds(time: Timestamp) -> int:
    return time.seconds * _BILLION + time.nanos


def _measure_consumption(parts: Sequence[_Part]) -> Mapping[str, Consumption]:
    durations = [part.duration_ns for part in parts]
    return {
        **_usage_amounts(parts),
        "depth": Consumption(known=max((part.depth for part in parts), default=0)),
        "transfers": Consumption(known=sum(part.transfers for part in parts)),
        "wall_duration": Consumption(known=sum(filter(None, durations)), is_whole=None not in durations),
        "errors": Consumption(known=sum(part.errors for part in parts)),
    }


def _usage_amounts(parts: Sequence[_Part]) -> Mapping[str, Consumption]:
    usages = [part.usage.usage() for part in parts if part.usage is not None]
    is_known = len(usages) == len(parts)
    tokens = [_tokens(usage) for usage in usages]
    costs = [Consumption(known=usage.cost_nanos, is_whole=has_whole_cost(usage)) for usage in usages]
    currencies = {usage.currency_code for usage in usages if usage.currency_code}
    return {
        "model_calls": Consumption(known=sum(usage.model_calls for usage in usages), is_whole=is_known),
        "tool_calls": Consumption(known=sum(usage.tool_calls for usage in usages), is_whole=is_known),
        "tokens": _sum(tokens, is_known=is_known),
        # Costs in two currencies have no sum.
        "cost_nanos": _sum(costs, is_known=is_known and all(part.agents_have_costs for part in parts))
        if len(currencies) < 2
        else Consumption(known=0, is_whole=False),
    }


def _sum(amounts: Sequence[Consumption], *, is_known: bool) -> Consumption:
    known = sum(amount.known for amount in amounts)
    return Consumption(known=known, is_whole=is_known and all(amount.is_whole for amount in amounts))


def _tokens(usage: usage_pb2.Usage) -> Consumption:
    known = usage.input_tokens + usage.output_tokens
    if _is_whole(usage, "input_tokens") and _is_whole(usage, "output_tokens"):
        return Consumption(known=known)
    return Consumption(known=max(known, usage.total_tokens), is_whole=_is_whole(usage, "total_tokens"))


def _is_whole(usage: usage_pb2.Usage, number: str) -> bool:
    """Return whether a number is known of every model call."""
    if not usage.model_calls:
        return True
    return usage.HasField(number) and not usage.model_calls_without_usage  # type: ignore[arg-type]


def _bounds(budget: eval_set_pb2.BudgetMetric) -> Mapping[str, int]:
    limits = budget.limits
    bounds = {name: getattr(limits, name) for name in _BOUNDS if limits.HasField(name)}  # type: ignore[arg-type]
    if limits.HasField("wall_duration"):
        bounds["wall_duration"] = limits.wall_duration.ToNanoseconds()
    if budget.HasField("errors"):
        bounds["errors"] = budget.errors
    return bounds


def _text(name: str, value: int) -> str:
    if name == "wall_duration":
        return f"{value / _BILLION:g} s"
    return f"{value / _BILLION:g}" if name == "cost_nanos" else str(value)
