"""Value effects of an agent's code: clock readings, sleeps and steps, each recorded once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bough.v1 import error_pb2, event_pb2
from bough_server.engine import keys
from bough_server.engine.execution import to_run_error
from bough_server.errors import RunError
from bough_server.runtime.failure_log import log_failure
from bough_server.runtime.lane import Lane
from bough_server.tasks import is_collected
from bough_server.truncation import MAX_TEXT_BYTES, size_of


@dataclass(frozen=True, slots=True)
class Value:
    """A value to record: its key, its kind, and its name in messages."""

    key: str
    kind: event_pb2.ValueKind.ValueType
    name: str


async def record_value(lane: Lane, value: Value, work: Callable[[], Awaitable[str]]) -> str:
    """Return the value as JSON text, made by `work` or read from the log. Raises RunError if the work raised."""
    recorded = await _replay_or_run(lane, value, work)
    if recorded.value_recorded.HasField("error"):
        raise RunError.of(recorded.value_recorded.error)
    return recorded.value_recorded.value_json


async def _replay_or_run(lane: Lane, value: Value, work: Callable[[], Awaitable[str]]) -> event_pb2.AgentEvent:
    execution, running = lane.execution, lane.running
    digest = keys.digest("value", str(value.kind), value.name)
    if (replayed := await lane.replay_result(value.key, digest)) is not None:
        return replayed
    await lane.go_live(value.key)
    # A step has no start event: all that led to it must be on disk before it touches the world.
    await execution.writer.wait_for_commit()
    recorded = running.event(value.key)
    recorded.effect_digest, recorded.value_recorded.kind = digest, value.kind
    made = await _run_work(value, work)
    if isinstance(made, RunError):
        recorded.value_recorded.error.CopyFrom(running.error_of(made))
    else:
        recorded.value_recorded.value_json = made
    execution.emit(recorded)
    return recorded


async def _run_work(value: Value, work: Callable[[], Awaitable[str]]) -> str | RunError:
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        made = await work()
    except BaseException as raised:  # whatever its class: it fails the step, and must not end the server
        if is_collected(raised, task):
            raise
        if not isinstance(raised, asyncio.CancelledError):
            log_failure("step failed", raised, step=value.name)
            cause = to_run_error(raised).message
            return RunError(f"The step {value.name!r} failed: {cause}", reason=error_pb2.ERROR_REASON_TOOL_FAILED)
        # If nothing has cancelled this task, the work itself raised CancelledError and has failed.
        if task is not None and task.cancelling() > cancels:
            raise
        return RunError(f"The step {value.name!r} cancelled itself.", reason=error_pb2.ERROR_REASON_TOOL_FAILED)
    if size_of(made) > MAX_TEXT_BYTES:
        return RunError(
            f"The value of the step {value.name!r} is longer than {MAX_TEXT_BYTES // 1024} KiB as JSON. "
            "Keep large content elsewhere and return a reference to it.",
            reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        )
    return made
