"""End a scope of a run, or all of it: record the request, stop its tasks, then record every open end, leaf first.

In a closed scope no effect starts and nothing is recorded, even if its code continues.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server.clock import Clock
from bough_server.engine import keys
from bough_server.engine.event_writer import EventWriter
from bough_server.engine.open_invocations import Invocations, OpenInvocation, to_duration
from bough_server.engine.scheduler import Scheduler
from bough_server.log import events
from bough_server.observability.tracing import Traced


def build_end_events(
    invocations: Invocations, scope: str, error: error_pb2.AgentError, *, below: error_pb2.AgentError, now_ns: int
) -> list[event_pb2.AgentEvent]:
    """Return the end events of everything that is open in a scope, leaf first; `invocations` is not changed.

    `error` goes to the invocation of that scope (the run, for the empty scope), `below` to everything under it.
    """
    made: list[event_pb2.AgentEvent] = []
    # A copy that observes the ends as they are made: each end then carries the usage of the ends below it.
    left = invocations.copy()
    for opened in left.sort_by_depth():
        visits = {key: each for key, each in opened.effects.items() if each.HasField("node_started")}
        for key, started in list(opened.effects.items()):
            if key not in visits and keys.covers(scope, key):
                called, cause = opened.called.get(key), error if key == scope else below
                child = called.invocation_id if called is not None else ""
                if called is not None and cause.reason != error_pb2.ERROR_REASON_CANCELLED:
                    cause = failure_of_child(called.agent, child, cause.message)
                made.append(_effect_end(opened, key, started, error=cause, child=child, now_ns=now_ns))
                left.observe(made[-1])
        made.extend(_visit_ends(left, visits, scope, error if opened.key == scope else below, now_ns=now_ns))
        if keys.covers(scope, opened.key):
            own = error if opened.key == scope else below
            made.extend(left.build_step_failures(opened, own, now_ns))
            made.append(left.build_failure_end(opened, own, now_ns))
            left.observe(made[-1])
    return made


def _visit_ends(
    invocations: Invocations,
    visits: Mapping[str, event_pb2.AgentEvent],
    scope: str,
    error: error_pb2.AgentError,
    *,
    now_ns: int,
) -> Iterator[event_pb2.AgentEvent]:
    """Yield the ends of the open visits of a graph's nodes in a scope: open steps first, then items, then visits."""
    for key, started in sorted(visits.items(), key=lambda visit: not visit[1].node_started.HasField("item")):
        opened = invocations.get(started.invocation_id)
        if opened is None or not keys.covers(scope, key):
            continue
        for failed in invocations.build_step_failures(opened, error, now_ns, scope=key):
            invocations.observe(failed)
            yield failed
        event = opened.event(key, traced=started)
        set_visit(event.node_failed, started.node_started)
        event.node_failed.error.CopyFrom(error)
        event.node_failed.error.agent, event.node_failed.error.invocation_id = event.agent, event.invocation_id
        event.node_failed.duration.CopyFrom(to_duration(now_ns - started.record_time.ToNanoseconds()))
        invocations.observe(event)
        yield event


def set_visit(end: event_pb2.NodeCompleted | event_pb2.NodeFailed, started: event_pb2.NodeStarted) -> None:
    """Set which visit of which node an event ends."""
    end.node, end.visit = started.node, started.visit
    if started.HasField("superstep"):
        end.superstep = started.superstep
    if started.HasField("item"):
        end.item = started.item


def failure_of_child(name: str, invocation_id: str, why: str) -> error_pb2.AgentError:
    """Return the error of a call whose sub-agent failed, worded for its caller's model."""
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
    *,
    error: error_pb2.AgentError,
    child: str,
    now_ns: int,
) -> event_pb2.AgentEvent:
    owner = opened.template
    event = opened.event(key, traced=started)
    event.step_id, event.step_index = started.step_id, started.step_index
    event.attempt = opened.attempts.get(key, started.attempt)
    if events.kind_of(started) != events.LLM_STARTED:  # a tool, or a call that still waits for its approval or client
        result = event.tool_failed.result
        if started.HasField("tool_started"):
            result.call.CopyFrom(started.tool_started.call)
            result.start_time.CopyFrom(started.record_time)
            result.duration.CopyFrom(to_duration(now_ns - started.record_time.ToNanoseconds()))
        else:
            result.call.CopyFrom(started.input_requested.request.call)
        result.agent, result.invocation_id, result.child_invocation_id = owner.agent, owner.invocation_id, child
        failure = result.error
    else:
        failure = event.llm_failed.error
        event.llm_failed.not_sent = key in opened.unsent
        if key in opened.partial_usage:
            event.llm_failed.lost_usage.CopyFrom(opened.partial_usage[key])
    failure.CopyFrom(error)
    if not failure.agent:
        failure.agent, failure.invocation_id = owner.agent, owner.invocation_id
    return event


class Cancellation:
    """The closed scopes of one run, and how they end."""

    def __init__(self, writer: EventWriter, scheduler: Scheduler, clock: Clock, spans: dict[str, Traced]) -> None:
        self._journal, self._writer, self._scheduler = writer.journal, writer, scheduler
        self._clock, self._spans = clock, spans
        self._closed: set[str] = set()
        self._cancelled_by_others: set[str] = set()
        """Scopes that are to end for another reason than their own timeout."""
        self._timeout_ends: dict[str, asyncio.Future[bool]] = {}

    def close_scope(self, scope: str) -> None:
        """Refuse every effect in a scope from now on."""
        self._closed.add(scope)

    def is_closed(self, scope: str) -> bool:
        """True if a scope, or one above it, is closed."""
        return bool(self._closed) and any(keys.covers(closed, scope) for closed in self._closed)

    def raise_if_cancelled(self, scope: str) -> None:
        """Raise CancelledError if a scope is closed; `except Exception` in agent code does not catch it."""
        if self.is_closed(scope):
            raise asyncio.CancelledError

    def raise_if_cancelled_above(self, scope: str) -> None:
        """Raise CancelledError if a scope above this one is closed."""
        if any(closed != scope and keys.covers(closed, scope) for closed in self._closed):
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
        """End everything in a scope; the request is recorded as an event of the invocation `caller`."""
        request = event_pb2.CancelRequested(effect_scope=scope, reason=reason)
        if self.request_cancel(request, caller=caller) or self.is_ending(scope):
            await self.end(scope, error, below)

    async def cancel_siblings(
        self,
        scopes: Sequence[str],
        *,
        caller: str,
        reason: execution_pb2.CancelReason.ValueType,
        error: error_pb2.AgentError,
    ) -> None:
        """End everything in several parallel scopes because their sibling failed."""
        # Close all before awaiting the first: a sibling that fails meanwhile would cancel this coroutine halfway.
        for scope in scopes:
            self.request_cancel(event_pb2.CancelRequested(effect_scope=scope, reason=reason), caller=caller)
        for scope in scopes:
            await self.end(scope, error, error)

    def is_ending(self, scope: str) -> bool:
        """True while another task is ending this scope; wait for it instead of ending it again."""
        return not self._writer.is_offline and self.is_closed(scope) and not self.is_closed("")

    def is_cancelled_by_other(self, scope: str) -> bool:
        """True if a scope is to end for another reason than its own timeout; that canceller records the ends."""
        return scope in self._cancelled_by_others

    def request_cancel(self, request: event_pb2.CancelRequested, *, caller: str) -> bool:
        """Record that a scope is to end, and close it.

        Return True if the caller must now end it, False if it is closed already, its invocation is over or the replay
        is offline.
        """
        writer, scope = self._writer, request.effect_scope
        if caller not in writer.invocations:
            return False
        if request.reason != execution_pb2.CANCEL_REASON_LIMIT:
            self._cancelled_by_others.add(scope)
        if self.is_closed(scope):
            return False
        # If the log holds the caller's end but not this request, nothing in the scope had begun: record no request now.
        is_over = writer.invocations[caller].key in self._journal.ends
        if writer.is_offline or is_over or scope in self._journal.cancelled:
            self.close_scope(scope)
            writer.observe_scope(scope)
            return not writer.is_offline
        # No event of a scope may follow its cancellation but ends, so buffered deltas go first.
        writer.flush_below(scope)
        event = writer.invocations[caller].event(scope)
        event.cancel_requested.CopyFrom(request)
        writer.emit(event)
        self.close_scope(scope)
        return True

    async def end(self, scope: str, error: error_pb2.AgentError, below: error_pb2.AgentError) -> None:
        """Stop the tasks of a closed scope and record the ends of everything open in it."""
        await self._scheduler.stop(scope)
        # Results that were in flight are recorded first: what they ended needs no cancelled end.
        await self._writer.wait_for_commit()
        self.record_ends(scope, error, below)
        await self._writer.wait_for_commit()

    def record_ends(self, scope: str, error: error_pb2.AgentError, below: error_pb2.AgentError) -> None:
        """Record the end of everything open in a scope, leaf first, in one append, and end its spans."""
        ends = build_end_events(self._writer.invocations, scope, error, below=below, now_ns=self._clock.now_ns())
        if ends:
            self._writer.emit(*ends)
        for key in [key for key in self._spans if keys.covers(scope, key)]:
            self._spans.pop(key).end(error=error)

    def timeout_end(self, scope: str) -> "asyncio.Future[bool]":
        """Return the future that is done when a scope has ended by its own timeout while its caller continues.

        Its result is True if the end was replayed from the log: the waiter then has to apply its consequences.
        """
        return self._timeout_ends.setdefault(scope, asyncio.get_running_loop().create_future())

    def close_cancelled_scopes(self) -> None:
        """Close scopes that the log says were cancelled; called before anything of a recovered run goes live.

        The end that caused a cancellation may be missing in the log. In the replay another failure in the cancelled
        scope must not come first and change the outcome: its canceller finds the scope closed and ends it.
        """
        # Scopes with a timeout in the log are closed at that point, and the run's own is closed by its canceller.
        cut = {event.cancel_requested.effect_scope for event in self._journal.timeouts.values()}
        scopes = self._journal.cancelled.keys() - cut - {""}
        self._closed |= scopes
        self._cancelled_by_others |= scopes

    def replay_timeout(self, scope: str) -> None:
        """Close a scope whose timeout is recorded at this point of the log."""
        self.close_scope(scope)
        self._writer.observe_scope(scope)

    def replay_timeout_end(self, scope: str) -> None:
        """Resolve the future of a scope whose end by timeout is recorded at this point of the log."""
        if not self.timeout_end(scope).done():
            self.timeout_end(scope).set_result(True)
