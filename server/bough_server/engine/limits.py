"""Budgets of an invocation and everything below it: calls, tokens, cost, depth, concurrency and transfers.

Counters are computed from events, each applied once, so a replay counts nothing twice. Waiting for a free slot is in
concurrency.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from bough.v1 import agent_pb2, error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2, usage_pb2
from bough_server.errors import RunError
from bough_server.log import usage
from bough_server.models.model import Model, ModelRequest, cost_of
from bough_server.models.tokens import request_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Input and output tokens, and their cost in billionths of the price list's currency."""

    tokens: int = 0
    cost_nanos: int = 0
    currency_code: str = ""
    """The currency of the cost; empty if the model has no price."""


class SharedLimit(Protocol):
    """A limit of what several runs spend together, as one of them sees it: an account, or a quota.

    What a run spends follows from its log: the limit is told of the events of model calls that the run records, first
    when they are recorded, and of those with which attempts ended again once they are committed.
    """

    async def prepare(self, amount: Amount) -> None:
        """Wait until it is known what is left, if so far it seems that a model call of this amount is refused."""
        ...

    def check(self, amount: Amount) -> None:
        """Raise RunError if too little is left for a model call of this amount."""
        ...

    def on_record(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """Reserve the amount of a model call that starts; charge an attempt that ends, and release what it held."""
        ...

    def on_commit(self, sequence: int) -> None:
        """Note that the end of an attempt, by its sequence, is committed: sums that are read later hold its charge."""
        ...

    def close(self) -> None:
        """Release what the run has reserved: it is not executed here any more."""
        ...


class Allowance:
    """One limit of one subtree, with what is spent and reserved of it; without a limit it only counts."""

    __slots__ = ("limit", "reserved", "spent")

    def __init__(self, limit: int | None) -> None:
        self.limit, self.spent, self.reserved = limit, 0, 0

    def lacks(self, amount: int) -> bool:
        """True if less than this amount is left."""
        return self.limit is not None and self.spent + self.reserved + amount > self.limit

    def refusal(self, unit: str, amount: int) -> tuple[str, str]:
        """Return the limit in words, and why it does not allow this amount."""
        left = max(0, (self.limit or 0) - self.spent - self.reserved)
        return f"{self.limit} {unit}", f": {left} are left, and the call may take {amount}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowances:
    """The token and cost limits of one subtree."""

    tokens: Allowance
    cost_nanos: Allowance

    @property
    def is_bounded(self) -> bool:
        """True if at least one of them has a limit."""
        return self.tokens.limit is not None or self.cost_nanos.limit is not None

    def find_refusal(self, amount: Amount) -> tuple[str, str] | None:
        """Return the limit that does not allow an amount, and why, in words; None if both allow it."""
        if self.tokens.lacks(amount.tokens):
            return self.tokens.refusal("tokens", amount.tokens)
        if self.cost_nanos.lacks(amount.cost_nanos):
            return self.cost_nanos.refusal("billionths of cost", amount.cost_nanos)
        return None

    def reserve(self, amount: Amount) -> None:
        """Hold an amount until it is released."""
        self.tokens.reserved += amount.tokens
        self.cost_nanos.reserved += amount.cost_nanos

    def release(self, amount: Amount) -> None:
        """Release a reserved amount."""
        self.tokens.reserved -= amount.tokens
        self.cost_nanos.reserved -= amount.cost_nanos

    def spend(self, amount: Amount) -> None:
        """Count an amount as used."""
        self.tokens.spent += amount.tokens
        self.cost_nanos.spent += amount.cost_nanos


def estimate_amount(request: ModelRequest, model: Model) -> Amount:
    """Return what a call may use at most: its request, and max_output_tokens if its settings have that."""
    sent = request_tokens(request)
    written = request.settings.max_output_tokens
    rates = model.price
    used = usage_pb2.Usage(input_tokens=sent, output_tokens=written)
    cost = cost_of(used, rates) if rates is not None else 0
    return Amount(
        tokens=sent + written, cost_nanos=cost or 0, currency_code=rates.currency_code if rates is not None else ""
    )


def to_amount(used: usage_pb2.Usage, *, unknown: Amount) -> Amount:
    """Return the usage of an attempt, with `unknown` for numbers that its provider did not report."""
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
"""Default: the transfers of a run whose policy sets no limit."""


_SHOWN_NAMES: Final = 8
"""The most names of a path that an error shows."""


class Budget:
    """Limits of one invocation and everything below it, within those of its caller; it can only lower them."""

    def __init__(
        self,
        limits: policy_pb2.Limits,
        *,
        owner: str,
        place: str,
        depth: int,
        above: "Budget | None" = None,
        shared: SharedLimit | None = None,
    ) -> None:
        """`owner` is what the limits are for, and `place` where they are set, in the words of their errors.

        `shared` is what the run's budget shares with those of other runs.
        """
        self._owner, self._place = owner, place
        self._shared: SharedLimit | None = shared if above is None else above._shared
        self._above = above
        self._model_calls = limits.model_calls if limits.HasField("model_calls") else None
        self._tool_calls = limits.tool_calls if limits.HasField("tool_calls") else None
        self._deepest = depth + limits.depth if limits.HasField("depth") else None
        self._used_models = 0
        self._used_tools = 0
        self._tools: dict[str, bool] = {}
        """Effects of the tool calls that count here, and whether each has started."""
        self._made: Counter[tuple[str, str]] = Counter()
        """Calls by agent and tool; counted in the run's budget only."""
        self._transfers = limits.transfers if limits.HasField("transfers") else None
        if self._transfers is None and above is None:
            self._transfers = MAX_TRANSFERS
        self._used_transfers = 0
        self.allowances = Allowances(
            tokens=Allowance(limits.tokens if limits.HasField("tokens") else None),
            cost_nanos=Allowance(limits.cost_nanos if limits.HasField("cost_nanos") else None),
        )
        """What model calls have spent and reserved."""
        self.concurrency = limits.concurrency if limits.HasField("concurrency") else None
        """How many model calls and tools may run at once; None for any number."""
        self._held: dict[str, Amount] = {}
        """Effect of a model call in flight to the amount that it has reserved."""

    def chain(self) -> "Iterator[Budget]":
        """Yield this budget and all above it, the run's last."""
        budget: Budget | None = self
        while budget is not None:
            yield budget
            budget = budget._above

    def check_model_call(self) -> None:
        """Raise RunError LIMIT_EXCEEDED if a limit here or above does not allow another model call."""
        for budget in self.chain():
            if budget._model_calls is not None and budget._used_models >= budget._model_calls:
                raise budget._build_error(f"{budget._model_calls} model calls")

    def check_concurrency(self) -> None:
        """Raise RunError LIMIT_EXCEEDED if a concurrency limit is 0: the effect would wait forever."""
        for budget in self.chain():
            if budget.concurrency is not None and budget.concurrency <= 0:
                raise budget._build_error("0 model calls and tools at once")

    @property
    def is_metered(self) -> bool:
        """True if a limit of tokens or cost applies here."""
        return self._shared is not None or any(budget.allowances.is_bounded for budget in self.chain())

    async def prepare_spending(self, amount: Amount) -> None:
        """Wait until it is known what is left of a limit that other runs share; call it before `check_spending`."""
        if self._shared is not None:
            await self._shared.prepare(amount)

    def check_spending(self, amount: Amount) -> None:
        """Raise RunError if too little is left for a model call of this amount.

        It is LIMIT_EXCEEDED, or the error of the limit that is shared with other runs.
        """
        for budget in self.chain():
            if lacking := budget.allowances.find_refusal(amount):
                limit, why = lacking
                raise budget._build_error(limit, why)
        if self._shared is not None:
            self._shared.check(amount)

    def observe(self, event: event_pb2.AgentEvent) -> None:
        """Apply an event of a model or tool call, recorded now or read from the log."""
        key = event.effect_key
        match event.WhichOneof("payload"):
            case "llm_started":
                started = event.llm_started
                self._begin(key, Amount(tokens=started.reserved_tokens, cost_nanos=started.reserved_cost_nanos))
            case "llm_retrying":
                self._spend(to_amount(event.llm_retrying.lost_usage, unknown=Amount()))
            # Usage that a provider did not report counts as what was reserved: a limit is to hold, not to be exact.
            case "llm_completed":
                held = self._release(key)
                self._spend(to_amount(event.llm_completed.response.usage, unknown=held))
            case "llm_failed":
                held = self._release(key)
                unknown = Amount() if event.llm_failed.not_sent else held
                self._spend(to_amount(event.llm_failed.lost_usage, unknown=unknown))
            case "tool_started":
                self._begin_tool(key, event.agent, event.tool_started.call)
            case "input_requested" if event.input_requested.request.kind == input_pb2.INPUT_KIND_CLIENT_TOOL:
                self._begin_tool(key, event.agent, event.input_requested.request.call)

    def _begin(self, key: str, amount: Amount) -> None:
        self._held[key] = amount
        for budget in self.chain():
            budget._used_models += 1
            budget.allowances.reserve(amount)

    def _release(self, key: str) -> Amount:
        held = self._held.pop(key, Amount())
        for budget in self.chain():
            budget.allowances.release(held)
        return held

    def _spend(self, amount: Amount) -> None:
        for budget in self.chain():
            budget.allowances.spend(amount)

    def reserve_tool_call(self, key: str, agent: str, call: message_pb2.ToolCall, *, is_admitted: bool = False) -> None:
        """Count a tool call in every budget here and above, once per key.

        Raises RunError LIMIT_EXCEEDED, counting it in none. A call that the log shows as admitted is counted without a
        check: a fork may have lower limits than its origin.
        """
        if key in self._tools:
            return
        for budget in () if is_admitted else self.chain():
            if budget._tool_calls is not None and budget._used_tools >= budget._tool_calls:
                raise budget._build_error(f"{budget._tool_calls} tool calls")
        # Counted before it starts: the calls of a step run in parallel and must not exceed the limit together.
        self._tools[key] = False
        self._count_tool(agent, call, 1)

    def release_tool_call(self, key: str, agent: str, call: message_pb2.ToolCall) -> None:
        """Release the reservation of a call that was refused, or cancelled before it started."""
        if self._tools.get(key) is False:
            del self._tools[key]
            self._count_tool(agent, call, -1)

    def is_counted(self, key: str) -> bool:
        """True if the tool call of this effect is already counted here."""
        return key in self._tools

    def count_calls(self, agent: str, tool: str) -> int:
        """Return how often an agent has called a tool in this run."""
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
        """Count a transfer in every budget here and above. Raises RunError LIMIT_EXCEEDED, counting none.

        A transfer that the log shows as admitted is counted without a check, like a tool call.
        """
        for budget in () if is_admitted else self.chain():
            if budget._transfers is not None and budget._used_transfers >= budget._transfers:
                raise budget._build_error(f"{budget._transfers} transfers")
        for budget in self.chain():
            budget._used_transfers += 1

    def check_depth(self, depth: int, path: Sequence[str]) -> None:
        """Raise RunError LIMIT_EXCEEDED if no invocation may begin at this depth of the tree, by this path."""
        for budget in self.chain():
            if budget._deepest is not None and depth > budget._deepest:
                shown = path if len(path) <= _SHOWN_NAMES else [*path[: _SHOWN_NAMES - 3], "...", *path[-2:]]
                raise budget._build_error(f"a depth of {budget._deepest} in the tree", f" by {' -> '.join(shown)}")

    def _build_error(self, what: str, why: str = "") -> RunError:
        """Return the error of a limit that is reached; `why` is added if it is not simply used up."""
        return RunError(
            f"The limit of {what} for {self._owner} is reached{why}. It is set by {self._place}.",
            reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        )

    @classmethod
    def of_definition(
        cls, definition: agent_pb2.AgentDefinition, *, owner: str, depth: int, above: "Budget"
    ) -> "Budget":
        """Return the budget of the limits in an agent's definition; the one above if it has none."""
        if not is_bounded(definition.limits):
            return above
        place = f"`limits` in the definition of {definition.name!r}"
        return cls(definition.limits, owner=owner, place=place, depth=depth, above=above)


def is_bounded(limits: policy_pb2.Limits) -> bool:
    """True if any limit is set."""
    return bool(limits.ListFields())


TRANSFER_WINDOW: Final = 8
"""How many of the last agents `check_hops` considers."""

LEAST_AGENTS: Final = 3
"""How many different agents there must be among those."""


def check_hops(path: Sequence[str]) -> None:
    """Raise RunError LIMIT_EXCEEDED if the last transfers of a path went back and forth between too few agents."""
    last = path[-TRANSFER_WINDOW:]
    if len(last) == TRANSFER_WINDOW and len(set(last)) < LEAST_AGENTS:
        raise RunError(
            f"The agents transfer to one another in circles: {' > '.join(last)}. Any {TRANSFER_WINDOW} agents in a row "
            f"must include {LEAST_AGENTS} different ones; change the instructions or the links that let them loop.",
            reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        )
