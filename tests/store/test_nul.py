"""U+0000 in texts from inside, such as of agents' code and tools: the log keeps it, and the tables do without."""

from dataclasses import replace

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from bough.v1 import event_pb2, usage_pb2
from bough.v1.evaluation_ref_pb2 import EvaluationRef
from bough_server.errors import InvalidRequest, NotFound
from bough_server.log import events
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import open_store, rebuild_projections
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.sql.store import Store
from bough_server.store.sql.tables import metadata
from tests.store.evaluation_logs import MadeEvaluation, cancelled
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, Made, as_stored, definition, everything, text
from tests.store.sql import execute

_NUL = "a\0b"

_STRUCTURAL = {
    events.RUN_STARTED,
    events.RUN_QUEUED,
    events.RUN_DEQUEUED,
    events.RUN_FORKED,
    *events.TERMINAL_KINDS,
}
"""The kinds of events that have their place in a log."""


def _fill(message: Message, depth: int = 0) -> None:
    """Set every text in a message, and in those below it, to one with U+0000."""
    for each in message.DESCRIPTOR.fields:
        if each.message_type is not None and (depth > 4 or each.message_type.GetOptions().map_entry):
            continue
        if each.message_type is not None:
            _fill(getattr(message, each.name).add() if each.is_repeated else getattr(message, each.name), depth + 1)
        elif each.type == FieldDescriptor.TYPE_STRING:
            value = '"a\\u0000b"' if each.name.endswith("_json") else _NUL
            if each.is_repeated:
                getattr(message, each.name).append(value)
            else:
                setattr(message, each.name, value)


def _events() -> list[event_pb2.AgentEvent]:
    """Return one event of each kind that can be in the middle of a log."""
    made = []
    for each in event_pb2.AgentEvent.DESCRIPTOR.oneofs_by_name["payload"].fields:
        event = event_pb2.AgentEvent(agent=_NUL, branch=_NUL, effect_key=_NUL, parent_invocation_id=_NUL)
        payload = getattr(event, each.name)
        payload.SetInParent()
        if events.kind_of(event) not in _STRUCTURAL:
            _fill(payload)
            made.append(event)
    return made


async def test_every_text_of_every_event_may_have_nul(url: str) -> None:
    run = Made(agent=_NUL, question=text(_NUL, "USER"), labels={"n": _NUL})
    run.evaluation = EvaluationRef(evaluation_id=_NUL, case_id=_NUL)
    run.definitions = [definition(_NUL, "r1")]
    made, new = run.first(), run.new()
    file = StoredBlob(sha256="ab", media_type=_NUL, data=b"photo")
    failed = event_pb2.AgentEvent(run_failed=event_pb2.RunFailed())
    _fill(failed.run_failed)
    async with open_store(url, durability="process") as store:
        await store.log.create(replace(new, first=new.first._replace(blobs=[file])))
        for event in [*_events(), failed]:
            records = run.next(event)
            await store.log.append(run.run_id, epoch=1, log_events=records)
            made += records
        assert await everything(store.log, run.run_id) == as_stored(made)
        found, _ = await store.runs.list(ANNE, RunFilter(labels={"n": "ab"}, agent="ab"), Page(size=9))
        assert [one.run_id for one in found] == [run.run_id]
        assert (await store.blobs.read(ANNE, run.session_id, "ab")).media_type == "ab"
    before = _tables(url)
    assert rebuild_projections(url) == 1
    assert _tables(url) == before
    texts = [value for rows in before.values() for row in rows for value in row if isinstance(value, str)]
    assert not any("\0" in value for value in texts)


async def test_an_attempt_of_a_model_with_nul_in_its_name_is_charged(url: str) -> None:
    run, usage = Made(), usage_pb2.Usage(input_tokens=3, model_calls=1, currency_code=_NUL, cost_nanos=5)
    started = event_pb2.AgentEvent(effect_key="s0.m", llm_started=event_pb2.LlmStarted(model=_NUL))
    completed = event_pb2.AgentEvent(effect_key="s0.m", llm_completed=event_pb2.LlmCompleted())
    completed.llm_completed.response.usage.CopyFrom(usage)
    async with open_store(url, durability="process") as store:
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=run.next(started, completed))
        assert [one.model for one in await store.usage.list_for_run(run.run_id)] == ["ab"]


async def test_evaluations_and_forks_with_nul_are_stored(url: str) -> None:
    made = MadeEvaluation(eval_set_name=_NUL, agent=_NUL, cases=(_NUL,), labels={"n": _NUL})
    origin, fork = Made(agent=_NUL, labels={"n": _NUL}), Fork(number=2)
    async with open_store(url, durability="process") as store:
        await store.log.create_evaluation(made.new())
        await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(cancelled()))
        assert (await store.evaluations.get(ANNE, made.evaluation_id)).evaluation.eval_set_name == "ab"
        await store.log.create(origin.new())
        changes = event_pb2.RunForked(
            labels={"n": _NUL}, evaluation=EvaluationRef(evaluation_id=_NUL, case_id=_NUL, metric=_NUL)
        )
        await store.log.fork(fork.of(origin, 1, changes=changes))
        assert (await store.runs.get(ANNE, fork.run_id)).run.labels == {"n": "ab"}


async def test_what_has_nul_in_its_name_is_not_found(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    with pytest.raises(NotFound):
        await store.runs.get(ANNE, _NUL)
    assert (await store.runs.find(_NUL), await store.runs.find_request(ANNE, _NUL)) == (None, None)
    with pytest.raises(NotFound):
        await store.blobs.read(ANNE, run.session_id, _NUL)
    assert await store.blobs.find_missing(ANNE, run.session_id, [_NUL, "ab"]) == {_NUL, "ab"}
    file = StoredBlob(sha256=_NUL, media_type="image/png", data=None, field="input.parts[0].blob.sha256")
    second = Made(number=2).new()
    with pytest.raises(InvalidRequest):
        await store.log.create(replace(second, first=second.first._replace(blobs=[file])))


def _tables(url: str) -> dict[str, list[tuple[object, ...]]]:
    return {name: sorted(execute(url, f"SELECT * FROM {name}"), key=repr) for name in metadata.tables}
