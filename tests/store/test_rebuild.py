"""Rebuilding: whatever is derived from logs is made again from them, and is the same."""

import asyncio
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.v1 import error_pb2, event_pb2, message_pb2
from bough_server.errors import ConfigurationError
from bough_server.store.sql.rebuild import rebuild_projections
from bough_server.store.sql.store import open_store
from tests.store.logs import ANNE, BERT, Made, completed, definition, delta, session_id, text

_DAMAGE = """
    DELETE FROM messages;
    DELETE FROM usage_entries;
    DELETE FROM run_definitions;
    UPDATE sessions SET last_position = 99, current_run_id = 'nobody';
    UPDATE runs SET last_sequence = 99, ended = NOT ended, agent = '', state = 0, labels = '{}', start_time_ns = 0,
        end_time_ns = 7, error = x'00', tree_usage = x'00', request_id = '', request_digest = '';
"""


def _tables(path: Path) -> dict[str, list[tuple[object, ...]]]:
    connection = sqlite3.connect(path)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
    tables = {name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}
    connection.close()
    return tables


def _damage(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(_DAMAGE)
    connection.close()


def _answered(kind: str, tokens: int | None) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(effect_key="s0.m", llm_completed=event_pb2.LlmCompleted())
    response = event.llm_completed.response
    response.message.CopyFrom(text("Hm.", kind))
    response.message.parts.add().tool_call.call_id = "c1"
    if tokens is not None:
        response.usage.input_tokens = tokens
    return event


def _tool_done() -> event_pb2.AgentEvent:
    result = message_pb2.ToolResult(call=message_pb2.ToolCall(call_id="c1"), agent="lead")
    return event_pb2.AgentEvent(effect_key="s0.t0", tool_completed=event_pb2.ToolCompleted(result=result))


_KINDS = st.sampled_from(["UNSPECIFIED", "ASSISTANT"])
_EVENTS = st.one_of(
    st.builds(delta),
    st.builds(_answered, _KINDS, st.none() | st.integers(0, 9)),
    st.builds(_tool_done),
    st.builds(lambda: event_pb2.AgentEvent(effect_key="s0.m", llm_started=event_pb2.LlmStarted(model="m"))),
)
_ERROR = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_INTERNAL, message="No.")
_ENDS = st.one_of(
    st.none(),
    st.builds(lambda: completed(text("So.", "ASSISTANT"))),
    st.builds(lambda: event_pb2.AgentEvent(run_failed=event_pb2.RunFailed(error=_ERROR))),
)
_LOGS = st.lists(st.tuples(st.lists(_EVENTS, max_size=8), _ENDS, st.booleans()), min_size=1, max_size=4)
Log = tuple[list[event_pb2.AgentEvent], event_pb2.AgentEvent | None, bool]


async def _write(path: Path, logs: Sequence[Log]) -> None:
    async with open_store(str(path), durability="process") as store:
        previous = 0
        for number, (batch, end, is_continued) in enumerate(logs, 1):
            run = Made(number=number, question=text("?", "USER"), labels={"n": str(number)})
            run.request_id = f"ask-{number}" if number % 2 else ""
            run.definitions = [definition("lead", f"r{number}"), definition("writer", "r0")]
            if is_continued and previous:
                run.session_number = previous
                run.session_cut = await store.sessions.last_position(ANNE, session_id(previous))
            await store.log.create(run.new())
            for event in [*batch, *([end] if end else [])]:
                await store.log.append(run.run_id, epoch=1, records=run.next(event))
            previous = (run.session_number or number) if end else 0


@settings(max_examples=25, deadline=None)
@given(_LOGS)
def test_a_rebuilt_database_is_the_one_that_was_written(logs: list[Log]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bough.db"
        asyncio.run(_write(path, logs))
        before = _tables(path)
        _damage(path)
        assert _tables(path) != before
        assert rebuild_projections(str(path)) == len(logs)
        assert _tables(path) == before


async def test_rebuilding_keeps_usage_of_logs_that_are_gone(url: str) -> None:
    async with open_store(url) as store:
        run = Made(principal=BERT)
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, records=run.next(_answered("ASSISTANT", 3), completed()))
        await store.sessions.delete(BERT, run.session_id)
    assert rebuild_projections(url) == 0
    async with open_store(url) as store:
        assert [entry.usage.input_tokens for entry in await store.usage.of_run(run.run_id)] == [3]


async def test_rebuilding_is_refused_while_a_server_has_the_file(url: str) -> None:
    async with open_store(url):
        with pytest.raises(ConfigurationError, match="in use by process"):
            rebuild_projections(url)
