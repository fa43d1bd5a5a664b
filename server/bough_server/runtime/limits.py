"""What is left of the bounds of a subtree of invocations; counters come from the log, so replay adds nothing twice.

Tokens and cost are kept in spending.py, and who waits for room in slots.py.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2
from bough_server.errors import RunError
from bough_server.runtime.spending import Amount, Purse, Purses, reported

MAX_HANDOFFS: Final = 20
"""How often agents may hand over in a run where nothing says how often."""


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
        self._handoffs = limits.handoffs if limits.HasField("handoffs") else None
        if self._handoffs is None and above is None:
            self._handoffs = MAX_HANDOFFS
        self._used_handoffs = 0
        self.purses = Purses(
            tokens=Purse(limits.tokens if limits.HasField("tokens") else None),
            cost_micros=Purse(limits.cost_micros if limits.HasField("cost_micros") else None),
        )
        """What its model calls have spent and reserved."""
        self.parallel = limits.parallel if limits.HasField("parallel") else None
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

    def check_parallel(self) -> None:
        """Refuses what could wait for ever, where nothing may run at all. Raises RunError LIMIT_EXCEEDED."""
        for budget in self.chain():
            if budget.parallel is not None and budget.parallel <= 0:
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
                self._begin(key, Amount(tokens=started.reserved_tokens, cost_micros=started.reserved_cost_micros))
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
            case "input_requested" if event.input_requested.request.reason == input_pb2.INPUT_REASON_CLIENT_TOOL:
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

    def reserve_tool_call(self, key: str, agent: str, call: message_pb2.ToolCall) -> None:
        """Takes a tool call from every bound above, or from none; once for each. Raises RunError LIMIT_EXCEEDED."""
        if key in self._tools:
            return
        for budget in self.chain():
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

    def reserve_handoff(self) -> None:
        """Takes a transfer from every bound above, or from none. Raises RunError LIMIT_EXCEEDED."""
        for budget in self.chain():
            if budget._handoffs is not None and budget._used_handoffs >= budget._handoffs:
                raise exceeded(f"{budget._handoffs} handoffs", budget.owner)
        for budget in self.chain():
            budget._used_handoffs += 1

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
