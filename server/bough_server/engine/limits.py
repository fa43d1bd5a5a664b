"""Budgets of an invocation and everything below it: calls, tokens, cost, depth, parallel effects and transfers.

Counters come from the log, so a replay adds nothing twice. Effects that wait for room wait in concurrency.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2, usage_pb2
from bough_server import usage
from bough_server.errors import RunError
from bough_server.models.model import Model, ModelRequest, cost_of
from bough_server.models.tokens import request_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Tokens of input and output, and what they cost, in billionths of the prices' currency."""

    tokens: int = 0
    cost_nanos: int = 0


class Allowance:
    """One bound of one subtree, what has been spent of it and what is reserved; without a limit it only counts."""

    __slots__ = ("limit", "reserved", "spent")

    def __init__(self, limit: int | None) -> None:
        self.limit, self.spent, self.reserved = limit, 0, 0

    def lacks(self, amount: int) -> bool:
        """Whether so much is not left."""
        return self.limit is not None and self.spent + self.reserved + amount > self.limit

    def refusal(self, unit: str, amount: int) -> tuple[str, str]:
        """The limit in words, and why it has no room for so much."""
        left = max(0, (self.limit or 0) - self.spent - self.reserved)
        return f"{self.limit} {unit}", f": {left} are left, and the call may take {amount}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowances:
    """Both bounds of one subtree."""

    tokens: Allowance
    cost_nanos: Allowance

    @property
    def is_bounded(self) -> bool:
        """Whether one of them has a limit."""
        return self.tokens.limit is not None or self.cost_nanos.limit is not None

    def lacking(self, amount: Amount) -> tuple[str, str] | None:
        """The bound that has no room for an amount, and why, in words; None where there is room."""
        if self.tokens.lacks(amount.tokens):
            return self.tokens.refusal("tokens", amount.tokens)
        if self.cost_nanos.lacks(amount.cost_nanos):
            return self.cost_nanos.refusal("billionths of cost", amount.cost_nanos)
        return None

    def reserve(self, amount: Amount) -> None:
        """Takes an amount until it is released."""
        self.tokens.reserved += amount.tokens
        self.cost_nanos.reserved += amount.cost_nanos

    def release(self, amount: Amount) -> None:
        """Gives back what was reserved."""
        self.tokens.reserved -= amount.tokens
        self.cost_nanos.reserved -= amount.cost_nanos

    def spend(self, amount: Amount) -> None:
        """Takes an amount for good."""
        self.tokens.spent += amount.tokens
        self.cost_nanos.spent += amount.cost_nanos


def estimated(request: ModelRequest, model: Model) -> Amount:
    """What a call is going to take: its request, and the most that it may write where its settings say that."""
    sent = request_tokens(request)
    written = request.settings.max_output_tokens
    rates = model.price
    used = usage_pb2.Usage(input_tokens=sent, output_tokens=written)
    cost = cost_of(used, rates) if rates is not None else 0
    return Amount(tokens=sent + written, cost_nanos=cost or 0)


def reported(used: usage_pb2.Usage, *, unknown: Amount) -> Amount:
    """What an attempt took; of what its provider did not say, `unknown`."""
    if not usage.is_reported(used):
        return unknown
    is_whole = used.HasField("input_tokens") and used.HasField("output_tokens")
    tokens = used.input_tokens + used.output_tokens
    cost = unknown.cost_nanos
    if used.HasField("cost_nanos"):
        cost = used.cost_nanos
    elif is_whole:
        cost = 0  # the model has no price
    return Amount(tokens=tokens if is_whole else max(tokens, used.total_tokens), cost_nanos=cost)


MAX_TRANSFERS: Final = 20
"""The limit of transfers in a run whose policy sets none."""


class Budget:
    """Bounds of one invocation and everything below, under the bounds of its caller; it can only lower them."""

    def __init__(self, limits: policy_pb2.Limits, *, owner: str, depth: int, above: "Budget | None" = None) -> None:
        self.owner = owner
        self._above = above
        self._model_calls = limits.model_calls if limits.HasField("model_calls") else None
        self._tool_calls = limits.tool_calls if limits.HasField("tool_calls") else None
        self._deepest = depth + limits.depth if limits.HasField("depth") else None
        self._used_models = 0
        self._used_tools = 0
        self._tools: dict[str, bool] = {}
        """Effects of its tool calls that count, and whether each has begun."""
        self._made: Counter[tuple[str, str]] = Counter()
        """In the run's: how often an agent has called a tool, by both names."""
        self._transfers = limits.transfers if limits.HasField("transfers") else None
        if self._transfers is None and above is None:
            self._transfers = MAX_TRANSFERS
        self._used_transfers = 0
        self.purses = Allowances(
            tokens=Allowance(limits.tokens if limits.HasField("tokens") else None),
            cost_nanos=Allowance(limits.cost_nanos if limits.HasField("cost_nanos") else None),
        )
        """What its model calls have spent and reserved."""
        self.concurrency = limits.concurrency if limits.HasField("concurrency") else None
        """How many model calls and tools of it may run at once; None for any number."""
        self._held: dict[str, Amount] = {}

    def chain(self) -> "Iterator[Budget]":
        """This one and all above it, the run's last."""
        budget: Budget | None = self
        while budget is not None:
            yield budget
            budget = budget._above

    def check_model_call(self) -> None:
        """Refuses a model call that one of the bounds above has no place for. Raises RunError LIMIT_EXCEEDED."""
        for budget in self.chain():
            if budget._model_calls is not None and budget._used_models >= budget._model_calls:
                raise exceeded(f"{budget._model_calls} model calls", budget.owner)

    def check_concurrency(self) -> None:
        """Refuses what could wait for ever, where nothing may run at all. Raises RunError LIMIT_EXCEEDED."""
        for budget in self.chain():
            if budget.concurrency is not None and budget.concurrency <= 0:
                raise exceeded("0 model calls and tools at once", budget.owner)

    @property
    def is_metered(self) -> bool:
        """Whether a bound of tokens or of cost holds here."""
        return any(budget.purses.is_bounded for budget in self.chain())

    def check_spending(self, amount: Amount) -> None:
        """Refuses a model call for which too little is left. Raises RunError LIMIT_EXCEEDED."""
        for budget in self.chain():
            if lacking := budget.purses.lacking(amount):
                what, why = lacking
                raise exceeded(what, budget.owner, why)

    def observe(self, event: event_pb2.AgentEvent) -> None:
        """Takes in what an event says of a call of a model or a tool, as it is made or as the log holds it."""
        key = event.effect_key
        match event.WhichOneof("payload"):
            case "llm_started":
                started = event.llm_started
                self._begin(key, Amount(tokens=started.reserved_tokens, cost_nanos=started.reserved_cost_nanos))
            case "llm_retrying":
                self._spend(reported(event.llm_retrying.lost_usage, unknown=Amount()))
            case "llm_completed":
                held = self._release(key)
                self._spend(reported(event.llm_completed.response.usage, unknown=held))
            case "llm_failed":
                held = self._release(key)
                unknown = Amount() if event.llm_failed.not_sent else held
                self._spend(reported(event.llm_failed.lost_usage, unknown=unknown))
            case "tool_started":
                self._begin_tool(key, event.agent, event.tool_started.call)
            case "input_requested" if event.input_requested.request.kind == input_pb2.INPUT_KIND_CLIENT_TOOL:
                self._begin_tool(key, event.agent, event.input_requested.request.call)

    def _begin(self, key: str, amount: Amount) -> None:
        self._held[key] = amount
        for budget in self.chain():
            budget._used_models += 1
            budget.purses.reserve(amount)

    def _release(self, key: str) -> Amount:
        held = self._held.pop(key, Amount())
        for budget in self.chain():
            budget.purses.release(held)
        return held

    def _spend(self, amount: Amount) -> None:
        for budget in self.chain():
            budget.purses.spend(amount)

    def reserve_tool_call(self, key: str, agent: str, call: message_pb2.ToolCall, *, is_admitted: bool = False) -> None:
        """Takes a tool call from every bound above, or from none; once for each. Raises RunError LIMIT_EXCEEDED.

        A call that was admitted before, as its log says, only counts: a fork may have lower limits than its origin.
        """
        if key in self._tools:
            return
        for budget in () if is_admitted else self.chain():
            if budget._tool_calls is not None and budget._used_tools >= budget._tool_calls:
                raise exceeded(f"{budget._tool_calls} tool calls", budget.owner)
        self._tools[key] = False
        self._count_tool(agent, call, 1)

    def release_tool_call(self, key: str, agent: str, call: message_pb2.ToolCall) -> None:
        """Gives back what a call reserved that has not begun: refused, or ended while it waited."""
        if self._tools.get(key) is False:
            del self._tools[key]
            self._count_tool(agent, call, -1)

    def calls_made(self, agent: str, tool: str) -> int:
        """How often an agent has called a tool in this run."""
        return list(self.chain())[-1]._made[agent, tool]

    def _begin_tool(self, key: str, agent: str, call: message_pb2.ToolCall) -> None:
        if key not in self._tools:
            self._count_tool(agent, call, 1)
        self._tools[key] = True

    def _count_tool(self, agent: str, call: message_pb2.ToolCall, number: int) -> None:
        for budget in self.chain():
            budget._used_tools += number
            if budget._above is None:
                budget._made[agent, call.name] += number

    def reserve_transfer(self, *, is_admitted: bool = False) -> None:
        """Takes a transfer from every bound above, or from none. Raises RunError LIMIT_EXCEEDED.

        One that was admitted before only counts, as with a tool call.
        """
        for budget in () if is_admitted else self.chain():
            if budget._transfers is not None and budget._used_transfers >= budget._transfers:
                raise exceeded(f"{budget._transfers} transfers", budget.owner)
        for budget in self.chain():
            budget._used_transfers += 1

    def check_depth(self, depth: int) -> None:
        """Refuses an invocation at a depth below the bounds. Raises RunError LIMIT_EXCEEDED."""
        for budget in self.chain():
            if budget._deepest is not None and depth > budget._deepest:
                raise exceeded(f"a depth of {budget._deepest} in the tree", budget.owner)


def exceeded(what: str, owner: str, why: str = "") -> RunError:
    """The refusal of what a bound has no room for; `why` says more where it is not simply used up."""
    return RunError(
        f"The limit of {what} for {owner} is reached{why}. Raise it in the run's policy, the link or the definition.",
        reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
    )


def is_bounded(limits: policy_pb2.Limits) -> bool:
    """Whether any bound is set."""
    return bool(limits.ListFields())


TRANSFER_WINDOW: Final = 8
"""How many of the last agents are looked at."""

LEAST_AGENTS: Final = 3
"""How many different ones there must be among so many."""


def check_hops(path: Sequence[str]) -> None:
    """Refuses the last hop of a path that goes back and forth between the same few. Raises RunError LIMIT_EXCEEDED."""
    last = path[-TRANSFER_WINDOW:]
    if len(last) == TRANSFER_WINDOW and len(set(last)) < LEAST_AGENTS:
        raise RunError(
            f"The agents hand over to one another in circles: {' > '.join(last)}. Among {TRANSFER_WINDOW} in a row "
            f"there must be {LEAST_AGENTS} different ones.",
            reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        )
