"""Charges of tortured servers: every attempt of a log is charged once, and the balance is what is left of a payment."""

from collections.abc import Mapping, Sequence
from typing import Final

from bough.v1 import event_pb2
from bough_server.identity import LOCAL
from bough_server.log.usage import Sums
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.accounts import AccountKey, StoredAdjustment
from tests.durability.torture_clients import Faults

_PAID: Final = 10**15
_ACCOUNT: Final = AccountKey(tenant_id=LOCAL.principal.tenant_id, user_id=LOCAL.principal.user_id, currency_code="USD")


async def pay(url: str) -> None:
    """Pay the account of the clients, in a database that no server uses yet, more than all their turns cost."""
    payment = StoredAdjustment(
        request_id="payment", amount_nanos=_PAID, currency_code="USD", note="", time_ns=0, made_by="torture"
    )
    async with open_store(url) as store:
        await store.accounts.adjust(_ACCOUNT, payment)


async def check_charges(store: Store, run_id: str, log: Sequence[event_pb2.AgentEvent], faults: Faults) -> None:
    """Compare the lines of a run with what its log says was sent, attempt by attempt."""
    expected = _expect_charges(log)
    found = {line.sequence: line.charge.nanos for line in await store.usage.list_for_run(run_id)}
    for sequence in {*expected, *found}:
        due, charged = expected.get(sequence), found.get(sequence)
        if charged is None or (due is not None and charged < due):
            faults.add("uncharged", f"{run_id}: {charged} of {due} were charged at sequence {sequence}")
        elif due is None or charged > due:
            faults.add("overcharged", f"{run_id}: {charged} instead of {due} were charged at sequence {sequence}")


async def check_balance(store: Store, faults: Faults) -> None:
    """Compare the balance with the payment less all lines of the ledger."""
    totals = await store.usage.sum_lines(_ACCOUNT.tenant_id, user_id=_ACCOUNT.user_id, from_ns=0)
    due = _PAID - totals.charges.get("USD", 0)
    (sums,) = await store.accounts.read_sums([_ACCOUNT])
    if sums.balance_nanos != due or sums.reserved_nanos:
        kind = "overcharged" if sums.balance_nanos < due else "uncharged"
        faults.add(kind, f"the balance is {sums.balance_nanos}, and {sums.reserved_nanos} reserved, instead of {due}")


def _expect_charges(log: Sequence[event_pb2.AgentEvent]) -> Mapping[int, int]:
    """Return the charge of each attempt that was sent, by the sequence of its end."""
    reserved: dict[str, int] = {}
    charges: dict[int, int] = {}
    for event in log:
        payload = getattr(event, event.WhichOneof("payload") or "")
        if event.HasField("llm_started"):
            reserved[event.effect_key] = payload.reserved_cost_nanos
        elif event.HasField("llm_completed"):
            used = Sums.of(payload.response.usage)
            charges[event.sequence] = used.numbers["cost_nanos"] if used.currency else reserved[event.effect_key]
        elif event.HasField("llm_retrying") or (event.HasField("llm_failed") and event.effect_key in reserved):
            used = Sums.of(payload.lost_usage)
            if used.currency:
                charges[event.sequence] = used.numbers["cost_nanos"]
            elif not payload.not_sent:
                charges[event.sequence] = 0 if payload.unanswered else reserved[event.effect_key]
    return charges
