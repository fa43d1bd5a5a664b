"""Rebuilding: whatever is derived from logs is made again from them, and is the same."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2, eval_result_pb2, event_pb2, message_pb2, session_pb2, usage_pb2
from bough_server.errors import ConfigurationError
from bough_server.log import events
from bough_server.log.evaluation_events import EvaluationEvent
from bough_server.messages import copy_of
from bough_server.store.opening import Store, open_store, rebuild_projections
from bough_server.store.ports.sessions import SessionPosition
from bough_server.store.sql.tables import metadata
from bough_server.store.sqlite.database_path import is_postgres
from tests.store import question_events as questions
from tests.store.evaluation_logs import FAILED, MadeEvaluation, began, cancelled, passed, scored, totaled
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, BERT, Made, completed, definition, delta, resumed, text
from tests.store.sql import execute
from tests.support.databases import Database, on_each_database

_DAMAGE = """
    DELETE FROM messages WHERE run_id IN (
        SELECT run_id FROM runs WHERE runs.tenant_id = messages.tenant_id AND runs.session_id = messages.session_id
    );
    DELETE FROM usage_entries;
    DELETE FROM run_definitions;
    UPDATE sessions SET last_position = 99, current_run_id = 'absent', last_run_time_ns = 7;
    UPDATE sessions SET state_json = 'lost' WHERE state_run_id != '';
    UPDATE runs SET last_sequence = 99, ended = NOT ended, agent = '', state = 0, labels = '{}', input_excerpt = 'x',
        start_time_ns = 0, end_time_ns = 7, deadline_time_ns = 7, error = x'00', tree_usage = x'00', request_id = '',
        request_digest = '', open_requests = x'00', next_expire_time_ns = 7, origin_run_id = 'x', origin_sequence = 7,
        evaluation_id = 'x', case_id = 'x', eval_set_name = 'x', totals = x'00', verdict = 7, reserved_nanos = 7;
"""


def _tables(url: str) -> dict[str, list[tuple[object, ...]]]:
    return {name: sorted(execute(url, f"SELECT * FROM {name}"), key=repr) for name in metadata.tables}


def _damage(url: str) -> None:
    damage = _DAMAGE.replace("x'00'", "'\\x00'") if is_postgres(url) else _DAMAGE
    for statement in damage.split(";\n"):
        execute(url, statement)


def _answered(kind: str, tokens: int | None) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(effect_key="s0.m", llm_completed=event_pb2.LlmCompleted())
    response = event.llm_completed.response
    response.message.CopyFrom(text("Hm.", kind))
    response.message.parts.add().tool_call.call_id = "c1"
    if tokens is not None:
        response.usage.input_tokens = tokens
    return event


def _tool_done(kept: int | None) -> event_pb2.AgentEvent:
    result = message_pb2.ToolResult(call=message_pb2.ToolCall(call_id="c1"), agent="lead")
    event = event_pb2.AgentEvent(effect_key="s0.t0", tool_completed=event_pb2.ToolCompleted(result=result))
    if kept is not None:
        event.tool_completed.state_changes.add(key="n", value_json=str(kept))
    return event


def _kept(effect: str, value: int | None) -> event_pb2.AgentEvent:
    change = session_pb2.SessionStateChange(key="n", value_json=None if value is None else str(value))
    return event_pb2.AgentEvent(
        effect_key=effect, session_state_changed=event_pb2.SessionStateChanged(state_changes=[change])
    )


_KINDS = st.sampled_from(["UNSPECIFIED", "ASSISTANT"])
_RUN = Made(number=99)
_ASKED = [questions.request(name, _RUN, call_id=call_id, expires=9) for name, call_id in (("q1", "c1"), ("q2", ""))]
_EVENTS = st.one_of(
    st.builds(delta),
    st.builds(questions.asked, st.sampled_from(_ASKED)),
    st.builds(questions.answered, st.sampled_from(["q1", "q2"])),
    st.builds(questions.interrupted, st.sampled_from(_ASKED)),
    st.builds(resumed, st.just(1)),
    st.builds(_answered, _KINDS, st.none() | st.integers(0, 9)),
    st.builds(_tool_done, st.none() | st.integers(0, 3)),
    st.builds(_kept, st.sampled_from(["e0", "e0/e1", "e1.0/e0", "e1.1/e0"]), st.none() | st.integers(0, 3)),
    st.builds(lambda: event_pb2.AgentEvent(effect_key="s0.m", llm_started=event_pb2.LlmStarted(model="m"))),
    st.builds(lambda: event_pb2.AgentEvent(effect_key="s0.t0", tool_started=event_pb2.ToolStarted())),
)
_ERROR = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_INTERNAL, message="No.")
_ENDS = st.one_of(
    st.none(),
    st.builds(lambda: completed(text("So.", "ASSISTANT"))),
    st.builds(lambda: event_pb2.AgentEvent(run_failed=event_pb2.RunFailed(error=_ERROR))),
)
_HOW = st.sampled_from(["new", "continued", "queued", "forked"])
_LOGS = st.lists(st.tuples(st.lists(_EVENTS, max_size=8), _ENDS, _HOW), min_size=1, max_size=5)
_TOTALS = eval_result_pb2.EvalTotals(cases=2, cases_passed=1, trials=4, trials_ended=4)
_EVALUATED = st.sampled_from([began(), scored(FAILED), scored(usage=usage_pb2.Usage(input_tokens=3, model_calls=1))])
_EVALUATION_ENDS = st.sampled_from([(), (cancelled(),), (cancelled(_TOTALS),), (totaled(_TOTALS), passed())])
_EVALUATIONS = st.lists(st.tuples(st.lists(_EVALUATED, max_size=4), _EVALUATION_ENDS), max_size=3)
Evaluated = tuple[list[EvaluationEvent], tuple[EvaluationEvent, ...]]
Log = tuple[list[event_pb2.AgentEvent], event_pb2.AgentEvent | None, str]


class _Writing:
    """Runs that are written into a store, each made in one of the ways that there are."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: list[Made] = []
        self._evaluations: list[MadeEvaluation] = []
        self._is_held = False

    async def write(self, batch: Sequence[event_pb2.AgentEvent], end: event_pb2.AgentEvent | None, how: str) -> None:
        """One more run."""
        run = await self._begin(len(self._runs) + 1, how, is_executed=end is not None)
        waits = run.is_queued and end is None
        for event in [] if waits else [*batch, *([end] if end else [])]:
            await self._append(run, event)
        self._runs.append(run)
        self._is_held = end is None

    async def evaluate(self, batch: Sequence[EvaluationEvent]) -> None:
        """One more evaluation; its request id may be that of a run."""
        made = MadeEvaluation(number=len(self._evaluations) + 1, request_digest="e")
        made.request_id, made.eval_set_name = f"ask-{made.number}", f"set-{made.number}"
        made.labels = {"n": str(made.number)}
        await self._store.log.create_evaluation(made.new())
        for event in batch:
            await self._store.log.append(made.evaluation_id, epoch=1, log_events=made.next(copy_of(event)))
        self._evaluations.append(made)

    async def _begin(self, number: int, how: str, *, is_executed: bool) -> Made:
        if how == "forked" and self._runs:
            return await self._forked(number)
        run = Made(number=number, question=text("?", "USER"), labels={"n": str(number)})
        run.request_id = f"ask-{number}" if number % 2 else ""
        run.definitions = [definition("lead", f"r{number}"), definition("writer", "r0")]
        run.evaluation_id, run.case_id = ("e1", f"case-{number}") if number % 2 else ("", "")
        if how in ("continued", "queued") and self._runs and self._is_held == (how == "queued"):
            return await self._in_session_of_last(run, is_executed=is_executed)
        await self._store.log.create(run.new())
        return run

    async def _in_session_of_last(self, run: Made, *, is_executed: bool) -> Made:
        last = self._runs[-1]
        run.session_number = last.session_number or last.number
        if not self._is_held:
            run.session_cut, run.state_json = await self._cut(run)
            await self._store.log.create(run.new())
            return run
        run.is_queued, run.last_sequence = True, 2
        await self._store.log.create(run.new())
        while is_executed and (holder := await self._store.runs.holder(ANNE, run.session_id)) is not None:
            if holder.run.run_id == run.run_id:
                cut = await self._cut(run)
                dequeued = event_pb2.RunDequeued(session_cut=cut.position, state_json=cut.state_json)
                await self._append(run, event_pb2.AgentEvent(run_dequeued=dequeued))
                break
            (held,) = (one for one in self._runs if one.run_id == holder.run.run_id)
            await self._append(held, completed())
        return run

    async def _forked(self, number: int) -> Made:
        origin, fork = self._runs[-1], Fork(number=number)
        stored = await self._store.log.read(origin.run_id)
        open_part = [event.sequence for event in stored if event.kind not in events.TERMINAL_KINDS]
        fork.definitions = [definition("writer", f"f{number}")]
        named = event_pb2.DefinitionRef(name="writer", revision=f"f{number}")
        changes = event_pb2.RunForked(labels={"forked": str(number)}, definition_refs=[named])
        await self._store.log.fork(fork.of(origin, open_part[-1 - number % 2 * (len(open_part) > 1)], changes=changes))
        return fork

    async def _cut(self, run: Made) -> SessionPosition:
        return await self._store.sessions.read_position(ANNE, run.session_id)

    async def _append(self, run: Made, event: event_pb2.AgentEvent) -> None:
        made = event_pb2.AgentEvent()
        made.CopyFrom(event)
        await self._store.log.append(run.run_id, epoch=1, log_events=run.next(made))


async def _write(url: str, logs: Sequence[Log], evaluations: Sequence[Evaluated]) -> None:
    async with open_store(url, durability="process") as store:
        writing = _Writing(store)
        for log in logs:
            await writing.write(*log)
        for batch, end in evaluations:
            await writing.evaluate([*batch, *end])


@pytest.mark.grid
@on_each_database
def test_a_rebuilt_database_is_the_one_that_was_written(database: Database) -> None:
    @database.examples(15)
    @given(_LOGS, _EVALUATIONS)
    def check(logs: list[Log], evaluations: list[Evaluated]) -> None:
        with database.empty() as url:
            asyncio.run(_write(url, logs, evaluations))
            before = _tables(url)
            _damage(url)
            assert _tables(url) != before
            assert rebuild_projections(url) == len(logs)
            assert _tables(url) == before

    check()


async def test_rebuilding_keeps_usage_of_logs_that_are_gone(url: str) -> None:
    async with open_store(url) as store:
        run = Made(principal=BERT)
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=run.next(_answered("ASSISTANT", 3), completed()))
        await store.sessions.delete(BERT, run.session_id)
    assert rebuild_projections(url) == 0
    async with open_store(url) as store:
        assert [entry.usage.input_tokens for entry in await store.usage.list_for_run(run.run_id)] == [3]


async def test_rebuilding_keeps_what_a_fork_has_of_a_session_that_is_gone(url: str) -> None:
    async with open_store(url) as store:
        before_it = Made(number=3, question=text("Hello.", "USER"))
        await store.log.create(before_it.new())
        await store.log.append(before_it.run_id, epoch=1, log_events=before_it.next(completed()))
        origin, fork = Made(number=1, session_number=3, session_cut=1, question=text("Why?", "USER")), Fork(number=2)
        await store.log.create(origin.new())
        await store.log.fork(fork.of(origin, 1, completed(text("So.", "ASSISTANT"))))
        await store.log.append(origin.run_id, epoch=1, log_events=origin.next(completed()))
        await store.sessions.delete(ANNE, origin.session_id)
        before = await store.sessions.messages(ANNE, fork.session_id, through=9)
    assert rebuild_projections(url) == 1
    async with open_store(url) as store:
        assert [one.message.parts[0].text for one in before] == ["Hello.", "Why?", "So."]
        assert await store.sessions.messages(ANNE, fork.session_id, through=9) == before


async def test_rebuilding_is_refused_while_a_server_has_the_file(url: str) -> None:
    async with open_store(url):
        with pytest.raises(ConfigurationError, match="in use by "):
            rebuild_projections(url)
