"""What is left of the bounds of a subtree of invocations; counters come from the log, so replay adds nothing twice."""

from typing import Final

from bough.v1 import error_pb2, policy_pb2
from bough_server.errors import RunError

MAX_HANDOFFS: Final = 20
"""How often agents may hand over in a run where nothing says how often."""


class Budget:
    """Bounds of one invocation and everything below, under the bounds of its caller; it can only lower them."""

    def __init__(self, limits: policy_pb2.Limits, *, owner: str, depth: int, above: "Budget | None" = None) -> None:
        self._owner = owner
        self._above = above
        self._model_calls = limits.model_calls if limits.HasField("model_calls") else None
        self._tool_calls = limits.tool_calls if limits.HasField("tool_calls") else None
        self._deepest = depth + limits.depth if limits.HasField("depth") else None
        self._used_models = 0
        self._used_tools = 0
        self._handoffs = limits.handoffs if limits.HasField("handoffs") else None
        if self._handoffs is None and above is None:
            self._handoffs = MAX_HANDOFFS
        self._used_handoffs = 0

    def _chain(self) -> "list[Budget]":
        budgets, budget = [], self
        while True:
            budgets.append(budget)
            if budget._above is None:
                return budgets
            budget = budget._above

    def reserve_model_call(self) -> None:
        """Takes a model call from every bound above, or from none. Raises RunError LIMIT_EXCEEDED."""
        chain = self._chain()
        for budget in chain:
            if budget._model_calls is not None and budget._used_models >= budget._model_calls:
                raise _exceeded(f"{budget._model_calls} model calls", budget._owner)
        for budget in chain:
            budget._used_models += 1

    def reserve_tool_call(self) -> None:
        """Takes a tool call from every bound above, or from none. Raises RunError LIMIT_EXCEEDED."""
        chain = self._chain()
        for budget in chain:
            if budget._tool_calls is not None and budget._used_tools >= budget._tool_calls:
                raise _exceeded(f"{budget._tool_calls} tool calls", budget._owner)
        for budget in chain:
            budget._used_tools += 1

    def release_tool_call(self) -> None:
        """Gives back what a call reserved that was refused before it started."""
        for budget in self._chain():
            budget._used_tools -= 1

    def reserve_handoff(self) -> None:
        """Takes a transfer from every bound above, or from none. Raises RunError LIMIT_EXCEEDED."""
        chain = self._chain()
        for budget in chain:
            if budget._handoffs is not None and budget._used_handoffs >= budget._handoffs:
                raise _exceeded(f"{budget._handoffs} handoffs", budget._owner)
        for budget in chain:
            budget._used_handoffs += 1

    def check_depth(self, depth: int) -> None:
        """Refuses an invocation at a depth below the bounds. Raises RunError LIMIT_EXCEEDED."""
        for budget in self._chain():
            if budget._deepest is not None and depth > budget._deepest:
                raise _exceeded(f"a depth of {budget._deepest} in the tree", budget._owner)

    def count_model_call(self) -> None:
        """Counts a model call that the log holds."""
        for budget in self._chain():
            budget._used_models += 1

    def count_tool_call(self) -> None:
        """Counts a tool call that the log holds."""
        for budget in self._chain():
            budget._used_tools += 1


def _exceeded(what: str, owner: str) -> RunError:
    return RunError(
        f"The limit of {what} for {owner} is reached. Raise it in the run's policy, the link or the definition.",
        reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
    )


def is_bounded(limits: policy_pb2.Limits) -> bool:
    """Whether any bound is set."""
    return bool(limits.ListFields())
