"""End a scope of a run, or all of it: record the request, stop its tasks, then record every open end, leaf first.

A scope that is closed begins nothing and writes nothing, whatever its code still tries.
"""

import asyncio
from collections.abc import Sequence

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server import events
from bough_server.clock import Clock
from bough_server.engine import keys
from bough_server.engine.event_writer import EventWriter
from bough_server.engine.open_invocations import Invocations, OpenInvocation, duration
from bough_server.engine.scheduler import Scheduler
from bough_server.telemetry import Traced


def closing(
    invocations: Invocations, scope: str, error: error_pb2.AgentError, below: error_pb2.AgentError, now_ns: int
) -> list[event_pb2.AgentEvent]:
    """The ends of everything that is open in a scope, leaf first; the invocations stay as they are.

    `error` is that of the invocation whose scope it is (the run, for the empty scope), `below` that of everything under
    it.
    """
    made: list[event_pb2.AgentEvent] = []
    left = invocations.copy()
    for opened in left.by_depth():
        for key, started in list(opened.effects.items()):
            if keys.covers(scope, key):
                called, why = opened.called.get(key), error if key == scope else below
                child = called.invocation_id if called is not None else ""
                if called is not None and why.reason != error_pb2.ERROR_REASON_CANCELLED:
                    why = failure_of_child(called.agent, child, why.message)
                made.append(_effect_end(opened, key, started, why, child, now_ns))
                left.observe(made[-1])
        if keys.covers(scope, opened.key):
            mine = error if opened.key == scope else below
            made.extend(left.failing_step(opened, mine, now_ns))
            made.append(left.failed(opened, mine, now_ns))
            left.observe(made[-1])
    return made


def failure_of_child(name: str, invocation_id: str, why: str) -> error_pb2.AgentError:
    """The error of a call whose sub-agent failed, as its caller's model is shown it."""
    return error_pb2.AgentError(
        reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED,
        message=f"The agent {name!r} failed: {why}",
        agent=name,
        invocation_id=invocation_id,
    )


def _effect_end(
    opened: OpenInvocation,
    key: str,
    started: event_pb2.AgentEvent,
    error: error_pb2.AgentError,
    child: str,
    now_ns: int,
) -> event_pb2.AgentEvent:
    speaker = opened.template
    event = opened.event(key, traced=started)
    event.step_id, event.step_index = started.step_id, started.step_index
    event.attempt = opened.attempts.get(key, started.attempt)
    if events.kind_of(started) != events.LLM_STARTED:
        result = event.tool_failed.result
        if started.HasField("tool_started"):
            result.call.CopyFrom(started.tool_started.call)
            result.start_time.CopyFrom(started.record_time)
            result.duration.CopyFrom(duration(now_ns - started.record_time.ToNanoseconds()))
        else:
            result.call.CopyFrom(started.input_requested.request.call)
        result.agent, result.invocation_id, result.child_invocation_id = speaker.agent, speaker.invocation_id, child
        failure = result.error
    else:
        failure = event.llm_failed.error
        event.llm_failed.not_sent = key in opened.unsent
        if key in opened.lost:
            event.llm_failed.lost_usage.CopyFrom(opened.lost[key])
    failure.CopyFrom(error)
    if not failure.agent:
        failure.agent, failure.invocation_id = speaker.agent, speaker.invocation_id
    return event


class Cancellation:
    """The scopes of one run that are sealed, and how they end."""

    def __init__(self, writer: EventWriter, tasks: Scheduler, clock: Clock, spans: dict[str, Traced]) -> None:
        self._journal, self._writer, self._tasks = writer.journal, writer, tasks
        self._clock, self._spans = clock, spans
        self._sealed: set[str] = set()
        self._claimed: set[str] = set()
        self._cuts: dict[str, asyncio.Future[bool]] = {}

    def seal(self, scope: str) -> None:
        """Nothing begins in a scope from now on."""
        self._sealed.add(scope)

    def is_sealed(self, scope: str) -> bool:
        """Whether nothing may begin in a scope any more."""
        return bool(self._sealed) and any(keys.covers(sealed, scope) for sealed in self._sealed)

    def refuse_sealed(self, scope: str) -> None:
        """Ends a coroutine that tries an effect after its scope was cancelled; `except Exception` does not catch it."""
        if self.is_sealed(scope):
            raise asyncio.CancelledError

    def refuse_sealed_above(self, scope: str) -> None:
        """Ends a coroutine that goes on although something above a scope was cancelled."""
        if any(sealed != scope and keys.covers(sealed, scope) for sealed in self._sealed):
            raise asyncio.CancelledError

    async def cancel(
        self,
        scope: str,
        *,
        caller: str,
        reason: execution_pb2.CancelReason.ValueType,
        error: error_pb2.AgentError,
        below: error_pb2.AgentError,
    ) -> None:
        """Ends everything in a scope; `caller` is the invocation that speaks of it."""
        request = event_pb2.CancelRequested(effect_scope=scope, reason=reason)
        if self.wish(request, caller=caller) or self.is_ending(scope):
            await self.end(scope, error, below)

    async def cancel_siblings(
        self,
        scopes: Sequence[str],
        *,
        caller: str,
        reason: execution_pb2.CancelReason.ValueType,
        error: error_pb2.AgentError,
    ) -> None:
        """Ends everything in several scopes that run at once, because of what became of another beside them."""
        # All are sealed before the first is waited for: one that fails meanwhile would end this one halfway.
        for scope in scopes:
            self.wish(event_pb2.CancelRequested(effect_scope=scope, reason=reason), caller=caller)
        for scope in scopes:
            await self.end(scope, error, error)

    def is_ending(self, scope: str) -> bool:
        """Whether somebody else ends a scope at this moment: whoever needs it ended must not run ahead of that."""
        return not self._writer.is_offline and self.is_sealed(scope) and not self.is_sealed("")

    def is_claimed(self, scope: str) -> bool:
        """Whether a scope is to end for another reason than its own time: whoever has that reason records its end."""
        return scope in self._claimed

    def wish(self, request: event_pb2.CancelRequested, *, caller: str) -> bool:
        """Records that a scope is to end and seals it: nothing begins in it any more. False where it has been."""
        writer, scope = self._writer, request.effect_scope
        if caller not in writer.invocations:
            return False
        if request.reason != execution_pb2.CANCEL_REASON_LIMIT:
            self._claimed.add(scope)
        if self.is_sealed(scope):
            return False
        is_over = writer.invocations[caller].key in self._journal.ends  # of what never began the log says nothing
        if writer.is_offline or is_over or scope in self._journal.cancelled:
            self.seal(scope)
            writer.observe_scope(scope)
            return not writer.is_offline
        writer.flush_below(scope)
        event = writer.invocations[caller].event(scope)
        event.cancel_requested.CopyFrom(request)
        writer.emit(event)
        self.seal(scope)
        return True

    async def end(self, scope: str, error: error_pb2.AgentError, below: error_pb2.AgentError) -> None:
        """Stops the tasks of a sealed scope and records what ends there."""
        await self._tasks.stop(scope)
        await self._writer.committed()
        self.close(scope, error, below)
        await self._writer.committed()

    def close(self, scope: str, error: error_pb2.AgentError, below: error_pb2.AgentError) -> None:
        """Records the end of everything that is open in a scope, leaf first, in one append."""
        ends = closing(self._writer.invocations, scope, error, below, self._clock.now_ns())
        if ends:
            self._writer.emit(*ends)
        for key in [key for key in self._spans if keys.covers(scope, key)]:
            self._spans.pop(key).end(error=error)

    def cut(self, scope: str) -> "asyncio.Future[bool]":
        """Done when a scope has been ended because its own time was up, while its caller goes on.

        It gives whether that was handed back from the log: then nobody has done yet what follows from it.
        """
        return self._cuts.setdefault(scope, asyncio.get_running_loop().create_future())

    def replay_cut(self, scope: str) -> None:
        """A scope was cut at this point of the log."""
        self.seal(scope)
        self._writer.observe_scope(scope)

    def replay_cut_end(self, scope: str) -> None:
        """A scope that was cut has ended at this point of the log, and its caller went on."""
        if not self.cut(scope).done():
            self.cut(scope).set_result(True)
