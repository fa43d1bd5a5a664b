"""The ledger: a line for each attempt that was sent, in columns that SQL sums."""

from bough.v1 import event_pb2, usage_pb2
from bough_server.store.opening import open_store
from tests.store.logs import ANNE, BERT, Made, completed
from tests.store.sql import execute

_SUMS = """
    SELECT user_id, currency_code, count(*), sum(input_tokens), sum(cached_input_tokens), sum(output_tokens),
        sum(reasoning_tokens), sum(total_tokens), sum(model_calls), sum(model_calls_without_usage), sum(cost_nanos)
    FROM usage_entries GROUP BY tenant_id, user_id, currency_code ORDER BY user_id, currency_code
"""


def _answered(usage: usage_pb2.Usage) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(llm_completed=event_pb2.LlmCompleted())
    event.llm_completed.response.usage.CopyFrom(usage)
    return event


async def test_sql_sums_the_ledger(url: str) -> None:
    priced = usage_pb2.Usage(
        input_tokens=2**40, cached_input_tokens=2, output_tokens=5, total_tokens=9, cost_nanos=3, currency_code="EUR"
    )
    unpriced = usage_pb2.Usage(input_tokens=7, output_tokens=0, reasoning_tokens=1)
    lost = event_pb2.AgentEvent(llm_retrying=event_pb2.LlmRetrying(lost_usage=priced))
    silent = _answered(usage_pb2.Usage())
    async with open_store(url, durability="process") as store:
        annes, berts = Made(number=1), Made(number=2, principal=BERT)
        for run, spent in (
            (annes, [lost, _answered(priced), _answered(unpriced), silent]),
            (berts, [_answered(unpriced)]),
        ):
            await store.log.create(run.new())
            await store.log.append(run.run_id, epoch=1, log_events=run.next(*spent, completed()))
        kept = [entry.usage for entry in await store.usage.list_for_run(annes.run_id)]
        await store.sessions.delete(ANNE, annes.session_id)
    for usage in (priced, unpriced):
        usage.model_calls = 1
    assert kept == [priced, priced, unpriced, usage_pb2.Usage(model_calls=1, model_calls_without_usage=1)]
    assert execute(url, _SUMS) == [
        ("anne", "", 2, 7, None, 0, 1, None, 2, 1, None),
        ("anne", "EUR", 2, 2**41, 4, 10, None, 18, 2, 0, 6),
        ("bert", "", 1, 7, None, 0, 1, None, 1, 0, None),
    ]
