"""Charges of the attempts of model calls: a fold of the log."""

from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2, usage_pb2
from bough_server.log import events
from bough_server.log.usage import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """An amount of money in billionths of a currency; without a currency it is 0."""

    nanos: int = 0
    currency_code: str = ""


NOTHING: Final = Charge()


class ChargeFold:
    """Fold of the model calls of a log to what their attempts are charged.

    An attempt is charged the cost that its provider's report amounts to. Without a cost it is charged what its call had
    reserved, unless it was never sent or answered, or its usage is known and its model has no price.
    """

    def __init__(self) -> None:
        self._reserved: dict[str, Charge] = {}
        """Effect of a model call that has started and not ended to what it has reserved."""
        self._inherited: set[str] = set()
        """Calls of the origin of a fork that were open at the fork point."""

    def apply(self, event: event_pb2.AgentEvent, kind: int) -> Charge | None:
        """Apply an event of a model call; return the charge of the attempt that ends with it, None if none does."""
        key = event.effect_key
        if kind == events.LLM_STARTED:
            started = event.llm_started
            if started.reserved_currency_code:
                self._reserved[key] = Charge(
                    nanos=started.reserved_cost_nanos, currency_code=started.reserved_currency_code
                )
            return None
        if kind == events.LLM_RETRYING:
            retrying = event.llm_retrying
            is_unasked = retrying.not_sent or retrying.unanswered
            return self._charge(key, retrying.lost_usage, is_unasked=is_unasked, is_last=False)
        if kind == events.LLM_COMPLETED:
            return self._charge(key, event.llm_completed.response.usage)
        if kind == events.LLM_FAILED:
            failed = event.llm_failed
            return self._charge(key, failed.lost_usage, is_unasked=failed.not_sent or failed.unanswered)
        return None

    def start_fork(self) -> None:
        """Leave the attempts that are open to the log of the origin, which charges them."""
        self._inherited = {*self._reserved}

    def _charge(self, key: str, used: usage_pb2.Usage, *, is_unasked: bool = False, is_last: bool = True) -> Charge:
        reserved = self._reserved.get(key, NOTHING)
        if key in self._inherited:
            self._inherited.discard(key)
            is_unasked = True
        if is_last:
            self._reserved.pop(key, None)
        cost = Sums.of(used)
        if cost.currency:
            return Charge(nanos=cost.numbers["cost_nanos"], currency_code=cost.currency)
        is_whole = used.HasField("input_tokens") and used.HasField("output_tokens")
        return NOTHING if is_unasked or is_whole else reserved
