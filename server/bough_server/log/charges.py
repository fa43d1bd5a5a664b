"""Charges of the attempts of model calls: a fold of the log."""

from collections.abc import Sequence
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

MODEL_END_KINDS: Final = frozenset({events.LLM_RETRYING, events.LLM_COMPLETED, events.LLM_FAILED})
"""Kinds of events with which attempts of model calls end."""

MODEL_CALL_KINDS: Final = MODEL_END_KINDS | {events.LLM_STARTED}
"""These, and the kind of the events with which model calls start."""


def reserve_of(started: event_pb2.LlmStarted) -> Charge:
    """Return what a model call has reserved; nothing if a server recorded it that recorded no currency."""
    if not started.reserved_currency_code:
        return NOTHING
    return Charge(nanos=started.reserved_cost_nanos, currency_code=started.reserved_currency_code)


def usage_of(event: event_pb2.AgentEvent, kind: int) -> usage_pb2.Usage:
    """Return the usage of the attempt that ends with an event of MODEL_END_KINDS, as far as it was reported."""
    if kind == events.LLM_COMPLETED:
        return event.llm_completed.response.usage
    return event.llm_retrying.lost_usage if kind == events.LLM_RETRYING else event.llm_failed.lost_usage


def charge_of(event: event_pb2.AgentEvent, kind: int, reserved: Charge) -> Charge:
    """Return the charge of the attempt that ends with an event of MODEL_END_KINDS, of a call that has reserved that.

    It is the cost that the provider's report amounts to. Without a cost it is what the call has reserved, unless the
    attempt was never sent or answered, or its usage is known and its model has no price.
    """
    used, is_unasked = usage_of(event, kind), False
    if kind != events.LLM_COMPLETED:
        lost = event.llm_retrying if kind == events.LLM_RETRYING else event.llm_failed
        is_unasked = lost.not_sent or lost.unanswered
    cost = Sums.of(used)
    if cost.currency:
        return Charge(nanos=cost.numbers["cost_nanos"], currency_code=cost.currency)
    is_whole = used.HasField("input_tokens") and used.HasField("output_tokens")
    return NOTHING if is_unasked or is_whole else reserved


class ChargeFold:
    """Fold of the model calls of a log to what their attempts are charged."""

    def __init__(self) -> None:
        self._reserved: dict[str, Charge] = {}
        """Effect of a model call that has started and not ended to what it has reserved."""
        self._inherited: set[str] = set()
        """Calls of the origin of a fork that were open at the fork point."""

    def apply(self, event: event_pb2.AgentEvent, kind: int) -> Charge | None:
        """Apply an event of a run; return the charge of the attempt of a model call that ends with it, if one does."""
        if kind == events.LLM_STARTED:
            if (reserved := reserve_of(event.llm_started)) is not NOTHING:
                self._reserved[event.effect_key] = reserved
        elif kind in MODEL_END_KINDS:
            return self._apply_end(event, kind)
        elif kind == events.RUN_FORKED:
            # The log of the origin charges the attempts that are open here.
            self._inherited = {*self._reserved}
        return None

    def get_reserved_nanos(self, key: str) -> int:
        """Return what the model call of an effect has reserved; 0 if it has ended."""
        return self._reserved.get(key, NOTHING).nanos

    @property
    def total_reserved_nanos(self) -> int:
        """What all model calls in flight have reserved."""
        return sum(charge.nanos for charge in self._reserved.values())

    def open_calls(self) -> Sequence[str]:
        """Return the effects of the model calls that hold a reservation."""
        return tuple(self._reserved)

    def _apply_end(self, event: event_pb2.AgentEvent, kind: int) -> Charge:
        key = event.effect_key
        reserved = NOTHING if key in self._inherited else self._reserved.get(key, NOTHING)
        self._inherited.discard(key)
        if kind != events.LLM_RETRYING:
            self._reserved.pop(key, None)
        return charge_of(event, kind, reserved)
