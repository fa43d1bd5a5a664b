"""Value effects of an agent's code: clock readings, sleeps and steps, each recorded once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from bough.v1 import error_pb2, event_pb2
from bough_server.engine import keys
from bough_server.engine.execution import to_run_error
from bough_server.errors import Reason, RunError
from bough_server.runtime.failure_log import log_failure
from bough_server.runtime.lane import Lane
from bough_server.tasks import is_collected
from bough_server.truncation import MAX_TEXT_BYTES, size_of

T = TypeVar("T")


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


async def run_code(work: Callable[[], Awaitable[T]], *, what: str, reason: Reason, log: str, name: str) -> T | RunError:
    """Run operators' code and return its result, or the error that it raised, whatever its class.

    `what` begins the error's message; `log` and `name` are how the exception is logged.
    """
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        return await work()
    except BaseException as raised:  # whatever its class: it fails the effect, and must not end the server
        if is_collected(raised, task):
            raise
        if not isinstance(raised, asyncio.CancelledError):
            log_failure(log, raised, step=name)
            return RunError(f"{what} failed: {to_run_error(raised).message}", reason=reason)
        # If nothing has cancelled this task, the work itself raised CancelledError and has failed.
        if task is not None and task.cancelling() > cancels:
            raise
        return RunError(f"{what} cancelled itself.", reason=reason)


async def _run_work(value: Value, work: Callable[[], Awaitable[str]]) -> str | RunError:
    reason = error_pb2.ERROR_REASON_TOOL_FAILED
    made = await run_code(work, what=f"The step {value.name!r}", reason=reason, log="step failed", name=value.name)
    if not isinstance(made, RunError) and size_of(made) > MAX_TEXT_BYTES:
        return RunError(
            f"The value of the step {value.name!r} is longer than {MAX_TEXT_BYTES // 1024} KiB as JSON. "
            "Keep large content elsewhere and return a reference to it.",
            reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        )
    return made
