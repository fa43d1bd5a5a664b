"""The effect that calls an ordinary tool, for a model or for code: checked, approved, run, recorded.

The order is: checks, input_requested, input_received, tool_started. A refused call has tool_failed without
tool_started, and a client-side tool has no tool_started unless a mock answers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import error_pb2, eval_set_pb2, event_pb2, message_pb2, session_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.execution import to_run_error
from bough_server.engine.files import SessionFiles
from bough_server.engine.open_invocations import to_duration
from bough_server.engine.recorder import DeltaChunk
from bough_server.engine.scheduler import Waiter
from bough_server.errors import RunError, ToolOutcomeUnknown
from bough_server.log import events
from bough_server.messages import text_of
from bough_server.observability.tracing import Traced
from bough_server.runtime.faults import build_tool_error, find_fault, replaces_tool
from bough_server.runtime.lane import Lane
from bough_server.runtime.questions import ToolQuestions
from bough_server.runtime.state import LaneState, StateView
from bough_server.runtime.tool_mocks import build_mock_result, find_mock
from bough_server.runtime.toolset import ToolOffer
from bough_server.tools import builtin
from bough_server.tools import execution as tool_execution
from bough_server.tools.arguments import parse_arguments
from bough_server.truncation import MAX_RESULT_BYTES, truncate_result

MOST_REPEATS: Final = 2
"""How often one server makes a call again whose outcome is unknown, if the rule of its tool allows that."""

_CHUNK_CHARACTERS: Final = 64 * 1024
"""Longer output is split into several events, so that none exceeds the size limit of an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallContext:
    """The context of a call that is passed to its tool."""

    run_id: str
    session_id: str
    tenant_id: str
    user_id: str
    invocation_id: str
    agent: str
    call_id: str
    idempotency_key: str
    attempt: int
    state: StateView
    files: SessionFiles | None = None

    async def read_file(self, blob: message_pb2.Blob) -> bytes:
        """See ToolContext."""
        assert self.files is not None, "only an offline replay has no files, and it runs no tool"
        return await self.files.read(blob)


class ToolCallEffect:
    """One call of a tool: `key` is its effect, `index` its step, None if code called.

    A `refusal` keeps it from being made.
    """

    def __init__(
        self,
        lane: Lane,
        *,
        key: str,
        index: int | None,
        call: message_pb2.ToolCall,
        state: LaneState,
        refusal: RunError | None = None,
    ) -> None:
        self._refusal = refusal
        self._state = state
        self._lane = lane
        self._execution = lane.execution
        self._writer = lane.execution.writer
        self._running = lane.running
        self._key = key
        self._index = index
        self._call = call
        self._digest = keys.digest("tool", call.name, call.arguments_json)
        self._attempt = 1
        self._has_started = False
        """Whether an attempt has started here."""
        self._questions = ToolQuestions(lane, key=key, index=index)

    async def run_or_replay(self, offer: ToolOffer | None) -> message_pb2.ToolResult:
        """Return the call's result, from the log or made now. Any RunError becomes a failed result."""
        if (waiter := self.expect_result()) is not None:
            return await self.await_result(waiter)
        await self._lane.go_live(self._key)
        try:
            return await self._run_live(offer)
        finally:
            self._release()

    async def _run_live(self, offer: ToolOffer | None) -> message_pb2.ToolResult:
        started = self._execution.journal.started.get(self._key)
        try:
            if started is not None:
                return await self._recover(started, offer)
            offer = self._admit(offer)
            call = await self._questions.request_approval(self._call, offer)
            is_mocked = self._is_mocked(call, offer)
        except RunError as refusal:
            self._release()  # before the refusal is recorded: code that reacts to it may call again at once
            return self._fail(refusal)
        if not is_mocked and offer.tool is not None and offer.tool.is_client_side:
            return await self._run_in_client(call, offer)
        return await self._run(call, offer, ids.derive_id(self._execution.facts.run_id, self._key))

    def _is_mocked(self, call: message_pb2.ToolCall, offer: ToolOffer) -> bool:
        """Return whether a mock or a fault takes the place of a call's tool. Raises RunError TOOL_NOT_MOCKED."""
        fault = self._find_fault(call, offer)
        is_replaced = fault is not None and replaces_tool(fault[1])
        return is_replaced or self._find_mock(call, offer) is not None

    def _find_fault(self, call: message_pb2.ToolCall, offer: ToolOffer) -> tuple[int, eval_set_pb2.EvalFault] | None:
        """Return the fault that is injected into a call, and its number, or None."""
        mocks = self._execution.mocks
        if mocks is None or offer.tool is None or self._key in self._execution.journal.answered:
            return None
        index = find_fault(mocks, self._key, agent=self._running.name, is_meant=lambda fault: fault.tool == call.name)
        return None if index is None else (index, mocks.faults[index])

    def _find_mock(self, call: message_pb2.ToolCall, offer: ToolOffer) -> int | None:
        """Return the number of the mock that answers a call instead of its tool, or None.

        Raises RunError TOOL_NOT_MOCKED.
        """
        mocks = self._execution.mocks
        # A client that has answered before the fork that brought the mocks is not contradicted by them.
        if mocks is None or offer.tool is None or self._key in self._execution.journal.answered:
            return None
        if (index := self._execution.journal.find_tool_mock(self._key)) is not None:
            return index
        uses = self._execution.journal.tool_mock_uses
        return find_mock(mocks, call, agent=self._running.name, uses=uses)

    def _take_mock(self, call: message_pb2.ToolCall, offer: ToolOffer) -> int | None:
        """Return the number of the mock that answers a call that starts now, and count it, or None.

        Raises RunError TOOL_NOT_MOCKED, also if other calls have used up the last mock of a tool of the client.
        """
        index = self._find_mock(call, offer)
        if index is None:
            if offer.tool is not None and offer.tool.is_client_side:
                raise RunError(
                    f"The mocks of {call.name!r} have answered as often as they may: the tool did not run.",
                    reason=error_pb2.ERROR_REASON_TOOL_NOT_MOCKED,
                )
            return None
        if self._execution.journal.find_tool_mock(self._key) is None:
            self._execution.journal.tool_mock_uses[index] += 1
        return index

    def _release(self) -> None:
        """Release the call's reservation if it has not started."""
        self._running.budget.release_tool_call(self._key, self._running.name, self._call)

    def expect_result(self) -> Waiter[event_pb2.AgentEvent] | None:
        """Return the waiter of its recorded result; None if the log holds none."""
        return self._lane.expect_result(self._key, self._digest)

    async def await_result(self, waiter: Waiter[event_pb2.AgentEvent]) -> message_pb2.ToolResult:
        """Wait for its recorded result and return it."""
        event = await self._lane.await_result(self._key, waiter)
        self._state.apply(event.tool_completed.state_changes)
        return events.tool_result_of(event)

    def _admit(self, offer: ToolOffer | None) -> ToolOffer:
        """Check a call before it starts and reserve its part of the limits. Raises RunError to refuse it."""
        running, call = self._running, self._call
        if offer is None:
            raise unknown_tool(call.name, list(running.toolset.offers))
        if self._refusal is not None:
            raise self._refusal
        if call.name == builtin.TRANSFER and (problem := builtin.target_problem(call, running.toolset.targets)):
            raise RunError(problem, reason=error_pb2.ERROR_REASON_UNKNOWN_AGENT)
        parse_arguments(call.arguments_json, offer.spec.input_schema_json)
        # A client-side tool's call has been counted since its request, and is admitted again when it is answered.
        is_new = not running.budget.is_counted(self._key)
        if (
            is_new
            and offer.max_calls is not None
            and running.budget.count_calls(running.name, call.name) >= offer.max_calls
        ):
            raise RunError(
                f"The limit of calls of {call.name!r} by {running.name!r} in a run is reached: {offer.max_calls}.",
                reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
            )
        if offer.tool is None or not offer.tool.is_client_side:  # a client-side tool takes no slot of the server
            running.budget.check_concurrency()
        running.budget.reserve_tool_call(self._key, running.name, call)
        return offer

    async def _recover(self, started: event_pb2.AgentEvent, offer: ToolOffer | None) -> message_pb2.ToolResult:
        """Run, ask about or fail a call that was running when its server crashed. Raises RunError to refuse it."""
        execution, key = self._execution, self._key
        self._attempt = execution.journal.attempts[key]
        if offer is None:
            raise unknown_tool(self._call.name, list(self._running.toolset.offers))
        # The last start, not the model's call: an approver may have edited the arguments.
        starts = [event for event in execution.journal.of_effect[key] if event.HasField("tool_started")]
        call = starts[-1].tool_started.call
        is_mocked = self._is_mocked(call, offer)
        # A mock answers again: the rule is for tools, which may have changed something.
        rule = offer.tool.on_recovery if offer.tool is not None and not is_mocked else "retry"
        if rule == "fail":
            raise _build_recovery_error(call.name)
        key = self._idempotency_key(started)
        if rule == "ask":
            return await self._ask_again(call, offer, key)
        if not is_mocked and offer.tool is not None and offer.tool.is_client_side:
            return await self._run_in_client(call, offer)  # a fork without the mocks of its origin
        self._attempt += 1
        return await self._run(call, offer, key)

    async def _ask_again(
        self, call: message_pb2.ToolCall, offer: ToolOffer, idempotency_key: str
    ) -> message_pb2.ToolResult:
        """Ask whether a call of unknown outcome may run again, and run it, or return the result that is known.

        Raises RunError if it must not run again.
        """
        answer = await self._questions.ask_for_recovery(call, offer, attempt=self._attempt)
        if isinstance(answer, message_pb2.ToolResult):
            return self._end(answer, None)
        self._attempt += 1
        return await self._run(answer, offer, idempotency_key)

    def _idempotency_key(self, started: event_pb2.AgentEvent) -> str:
        """Return the key of the first attempt, so that the tool can detect the repetition; a fork uses its own."""
        if started.sequence <= self._execution.journal.shared_through:
            return ids.derive_id(self._execution.facts.run_id, self._key)
        return started.tool_started.idempotency_key

    def _fail(self, refusal: RunError) -> message_pb2.ToolResult:
        event = self._event()
        event.effect_digest = self._digest
        if self._has_started or self._key in self._execution.journal.started:
            event.attempt = self._attempt
        result = event.tool_failed.result
        result.call.CopyFrom(self._call)
        self._fill(result, refusal)
        self._execution.emit(event)
        return result

    async def _run_in_client(self, call: message_pb2.ToolCall, offer: ToolOffer) -> message_pb2.ToolResult:
        """Have the client run the call, and record the result that it reports."""
        return self._end(await self._questions.ask_client(call, offer, self._digest), None)

    def _end(
        self,
        result: message_pb2.ToolResult,
        traced: Traced | None,
        written: Sequence[session_pb2.SessionStateChange] = (),
    ) -> message_pb2.ToolResult:
        """Record a result of this server or of the client."""
        result = truncate_result(result, MAX_RESULT_BYTES)
        error = RunError.of(result.error) if result.HasField("error") else None
        self._fill(result, error)
        ended = self._running.event(self._key, self._index, traced=traced)
        ended.attempt = self._attempt
        # A call that ran here has its digest in tool_started; a client's has no other event to carry it.
        if self._key not in self._execution.journal.started and traced is None:
            ended.effect_digest = self._digest
        (ended.tool_failed if error else ended.tool_completed).result.CopyFrom(result)
        if (action := builtin.action_of(result)) is not None:
            ended.tool_completed.action.CopyFrom(action)
        # Only with a success: the writes of a failed call are dropped, so that a repetition does not apply them twice.
        if written and error is None:
            ended.tool_completed.state_changes.extend(written)
        self._execution.emit(ended)
        self._state.apply(ended.tool_completed.state_changes)
        return result

    async def _run(self, call: message_pb2.ToolCall, offer: ToolOffer, idempotency_key: str) -> message_pb2.ToolResult:
        """Run a call, and again under the same key if its outcome is unknown and its tool's rule allows that."""
        last = self._attempt + MOST_REPEATS
        while True:
            try:
                return await self._run_attempt(call, offer, idempotency_key)
            except ToolOutcomeUnknown as unknown:
                rule = offer.tool.on_recovery if offer.tool is not None else "fail"
                if rule == "ask":
                    try:
                        return await self._ask_again(call, offer, idempotency_key)
                    except RunError as refusal:
                        return self._fail(refusal)
                if rule == "fail" or self._attempt >= last:
                    return self._fail(unknown)
                self._attempt += 1

    async def _run_attempt(
        self, call: message_pb2.ToolCall, offer: ToolOffer, idempotency_key: str
    ) -> message_pb2.ToolResult:
        """Run one attempt. Raises ToolOutcomeUnknown: no end is recorded then."""
        execution, running, key = self._execution, self._running, self._key
        async with execution.concurrency.hold_slot(key, running.budget):
            try:
                started = self._start(call, offer, idempotency_key)
            except RunError as refusal:
                return self._fail(refusal)
            # Write ahead: after a crash the log must say that the tool may have run.
            await execution.writer.wait_for_commit()
            traced = execution.spans[key]
            result = message_pb2.ToolResult(call=call, start_time=started.record_time)
            state = StateView(self._state)
            try:
                with traced.attach():
                    result.MergeFrom(await self._answer(started, offer, state))
            except ToolOutcomeUnknown as unknown:
                execution.spans.pop(key).end(error=unknown.to_agent_error(), input=call.arguments_json)
                raise
            except Exception as raised:
                result.error.CopyFrom(to_run_error(raised).to_agent_error())
            result.duration.CopyFrom(to_duration(execution.clock.now_ns() - result.start_time.ToNanoseconds()))
            result = self._end(result, traced, state.take_changes())
            output = text_of(result)
            error = result.error if result.HasField("error") else None
            execution.spans.pop(key).end(error=error, input=call.arguments_json, output=output)
            # Its end is not waited for: whatever its caller does with the result waits for a commit that includes it.
            return result

    def _start(self, call: message_pb2.ToolCall, offer: ToolOffer, idempotency_key: str) -> event_pb2.AgentEvent:
        """Record the start of an attempt, and open its span. Raises RunError TOOL_NOT_MOCKED."""
        execution, running, key = self._execution, self._running, self._key
        fault = self._find_fault(call, offer)
        # With the start, without an await: mocks are counted in the order of the log.
        mock_index = None if fault is not None and replaces_tool(fault[1]) else self._take_mock(call, offer)
        traced = execution.tracing.execute_tool(
            tool=call.name,
            agent=running.name,
            call_id=call.call_id,
            description=offer.spec.description,
            parent=self._lane.traced.below,
        )
        execution.spans[key] = traced
        started = running.event(key, self._index, traced=traced)
        started.effect_digest, started.attempt = self._digest, self._attempt
        started.tool_started.call.CopyFrom(call)
        started.tool_started.idempotency_key = idempotency_key
        started.tool_started.server = offer.tool.server if offer.tool is not None else ""
        if mock_index is not None:
            started.tool_started.mock_index = mock_index
        if fault is not None:
            started.tool_started.fault_index = fault[0]
        execution.emit(started)
        self._has_started = True
        return started

    async def _answer(
        self, started: event_pb2.AgentEvent, offer: ToolOffer, state: StateView
    ) -> message_pb2.ToolResult:
        """Return what its fault, its mock or its tool answers a call that has started. Raises their errors."""
        mocks, start = self._execution.mocks, started.tool_started
        elapsed = 0.0
        if mocks is not None and start.HasField("fault_index"):
            fault = mocks.faults[start.fault_index]
            if fault.HasField("fail"):
                raise build_tool_error(fault, start.call)
            if fault.HasField("answer_json"):
                return build_mock_result(eval_set_pb2.ToolMock(result_json=fault.answer_json), start.call)
            elapsed = await self._delay(start.call, offer, fault.delay.ToNanoseconds() / 1e9)
        if mocks is not None and start.HasField("mock_index"):
            return build_mock_result(mocks.tools[start.mock_index], start.call)
        parts = await self._execute(started, offer, state, elapsed=elapsed)
        return message_pb2.ToolResult(parts=await self._execution.keep_parts(parts))

    async def _delay(self, call: message_pb2.ToolCall, offer: ToolOffer, seconds: float) -> float:
        """Wait before a call is answered, and return the seconds. Raises RunError TOOL_TIMEOUT if that is too long."""
        timeout = offer.timeout if offer.timeout is not None or offer.tool is None else offer.tool.timeout
        if timeout is None or seconds < timeout:
            await self._execution.clock.sleep(seconds)
            return seconds
        await self._execution.clock.sleep(timeout)
        raise tool_execution.build_timeout_error(call.name, timeout)

    async def _execute(
        self, started: event_pb2.AgentEvent, offer: ToolOffer, state: StateView, *, elapsed: float
    ) -> list[message_pb2.Part]:
        call = started.tool_started.call
        if offer.tool is None:
            return [builtin.answer(call, state)]
        facts = self._execution.facts
        context = ToolCallContext(
            run_id=facts.run_id,
            session_id=facts.session_id,
            tenant_id=facts.tenant_id,
            user_id=facts.user_id,
            invocation_id=self._running.invocation_id,
            agent=self._running.name,
            call_id=call.call_id,
            idempotency_key=started.tool_started.idempotency_key,
            attempt=started.attempt,
            state=state,
            files=self._execution.files,
        )

        async def emit(text: str) -> None:
            for start in range(0, len(text), _CHUNK_CHARACTERS):
                await self._buffer_output(call.call_id, text[start : start + _CHUNK_CHARACTERS])

        return await tool_execution.execute(
            offer.tool,
            arguments_json=call.arguments_json,
            context=context,
            emit=emit,
            timeout=offer.timeout,
            elapsed=elapsed,
            abandoned=self._execution.scheduler.abandoned_tasks,
        )

    async def _buffer_output(self, call_id: str, text: str) -> None:
        def make() -> event_pb2.AgentEvent:
            event = self._event()
            event.attempt = self._attempt
            event.tool_output.call_id = call_id
            for field in ("effect_key", "trace_id", "span_id"):
                event.ClearField(field)
            return event

        self._execution.cancellation.raise_if_cancelled(self._key)
        if self._writer.buffer_delta(
            DeltaChunk(self._key, events.TOOL_OUTPUT, call_id, (text,)), self._running.delta_coalescing, make
        ):
            await self._writer.wait_for_room()

    def _event(self) -> event_pb2.AgentEvent:
        return self._running.event(self._key, self._index)

    def _fill(self, result: message_pb2.ToolResult, error: RunError | None) -> None:
        result.agent, result.invocation_id = self._running.name, self._running.invocation_id
        if error is not None:
            result.error.CopyFrom(error.to_agent_error(agent=result.agent, invocation_id=result.invocation_id))


def unknown_tool(name: str, known: Sequence[str]) -> RunError:
    """Return the error of a call to a tool that is not offered, worded so that a model can act on it."""
    offered = f" There are: {', '.join(known)}." if known else " There are no tools."
    if name.startswith("call_"):
        return RunError(
            f"The agent {name.removeprefix('call_')!r} is not linked to this one.{offered}",
            reason=error_pb2.ERROR_REASON_NOT_LINKED,
        )
    return RunError(f"There is no tool {name!r}.{offered}", reason=error_pb2.ERROR_REASON_UNKNOWN_TOOL)


def _build_recovery_error(name: str) -> RunError:
    """Return the error of a call that was running when its server crashed and must not run again."""
    return RunError(
        f"The server was lost while the tool {name!r} was running, and its recovery policy forbids running it again: "
        "it is unknown whether it took effect.",
        reason=error_pb2.ERROR_REASON_TOOL_OUTCOME_UNKNOWN,
    )
