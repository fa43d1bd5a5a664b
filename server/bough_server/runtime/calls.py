"""The tool calls of one step: each a lane of its own, results in call order; linked agents go to the dispatcher."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from google.protobuf import duration_pb2

from bough.v1 import error_pb2, event_pb2, message_pb2
from bough_server import events, ids
from bough_server.cutting import MAX_RESULT_BYTES, cut_result
from bough_server.errors import RunError
from bough_server.runtime import keys
from bough_server.runtime.dispatcher import dispatch
from bough_server.runtime.dispatches import Abort, Dispatch
from bough_server.runtime.execution import as_run_error
from bough_server.runtime.recorder import Piece
from bough_server.runtime.toolset import Offer
from bough_server.tools import execution as tool_execution
from bough_server.tools.arguments import parse_arguments

if TYPE_CHECKING:
    from bough_server.history.transcript import Transcript
    from bough_server.runtime.context import Context

MAX_LANES: Final = 16
"""How many calls of one step run at once."""

_PIECE_CHARACTERS: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a tool may know of the call it answers."""

    run_id: str
    session_id: str
    invocation_id: str
    agent: str
    call_id: str
    idempotency_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A call's result and, for a linked agent, what it saw and said."""

    result: message_pb2.ToolResult
    child: "Transcript | None" = None


class StepCalls:
    """Calls of one step of an invocation, by their positions in the model's answer."""

    def __init__(self, ctx: "Context", *, index: int, calls: Mapping[int, message_pb2.ToolCall]) -> None:
        self._ctx = ctx
        self._execution = ctx.execution
        self._frame = ctx.frame
        self._index = index
        self._calls = calls
        self._answers: dict[int, Answered] = {}
        self._running: set[int] = set()

    def key(self, position: int) -> str:
        """The effect of a call."""
        return keys.below(self._ctx.scope, f"s{self._index}.t{position}")

    async def run(self, *, parallel: bool) -> list[Answered]:
        """Runs the calls; raises Abort where a sub-agent's failure fails the calling invocation."""
        waiting = iter(self._calls)
        lanes = min(len(self._calls), MAX_LANES) if parallel else 1
        self._execution.pump.fork(lanes)
        first = [next(waiting) for _ in range(lanes)]
        ended: asyncio.Queue[tuple[int, BaseException | None]] = asyncio.Queue()
        left = len(self._calls)
        for position in first:
            self._start(position, ended)
        while left:
            position, error = await ended.get()
            left -= 1
            self._running.discard(position)
            if error is not None:
                raise error
            following = next(waiting, None)
            if following is not None:
                self._start(following, ended)
            elif left:
                self._execution.pump.park()
        return [self._answers[position] for position in self._calls]

    def _start(self, position: int, ended: "asyncio.Queue[tuple[int, BaseException | None]]") -> None:
        def done(task: "asyncio.Task[Answered]") -> None:
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                self._answers[position] = task.result()
            ended.put_nowait((position, error))

        self._running.add(position)
        task = self._execution.spawn(self.key(position), self._answer(position))
        task.add_done_callback(done)

    async def _answer(self, position: int) -> Answered:
        call = self._calls[position]
        offer = self._frame.toolset.offers.get(call.name)
        key = self.key(position)
        if offer is not None and offer.link is not None:
            work = Dispatch(key=key, agent=offer.link.agent, link=offer.link, call=call, step_index=self._index)
            ended = await dispatch(self._ctx, work, on_abort=lambda abort: self._abort(position, abort))
            return Answered(result=ended.result, child=ended.transcript)
        return Answered(result=await self._tool(key, call, offer))

    async def _abort(self, position: int, abort: Abort) -> None:
        """Ends the siblings of the call whose failure fails the caller."""
        error = RunError("A sibling failed and aborted the caller.", reason=error_pb2.ERROR_REASON_CANCELLED)
        wish = partial(self._execution.wish, caller=self._frame.invocation_id, reason=event_pb2.CANCEL_REASON_ABORT)
        # All are sealed before the first is waited for: a sibling that fails meanwhile would end this one halfway.
        siblings = [self.key(sibling) for sibling in sorted(self._running - {position})]
        for key in siblings:
            wish(key)
        for key in siblings:
            await self._execution.end(key, error.to_agent_error(), error.to_agent_error())

    async def _tool(self, key: str, call: message_pb2.ToolCall, offer: Offer | None) -> message_pb2.ToolResult:
        execution, frame = self._execution, self._frame
        digest = keys.digest("tool", call.name, call.arguments_json)
        execution.check(key, digest)
        if key in execution.journal.results:
            recorded = await execution.pump.result(key)
            execution.observe_recorded(key)
            if key in execution.journal.started:
                frame.budget.count_tool_call()
                execution.calls_made[frame.name, call.name] += 1
            return _result_of(recorded)
        await execution.pump.until_live(key)
        execution.refuse_sealed(key)
        try:
            admitted = self._admit(call, offer)
        except RunError as refusal:
            return self._refuse(key, digest, call, refusal)
        return await self._run_tool(key, digest, call, admitted)

    def _admit(self, call: message_pb2.ToolCall, offer: Offer | None) -> Offer:
        """Checks a call before it starts and reserves what it takes. Raises RunError to refuse it."""
        execution, frame = self._execution, self._frame
        if offer is None:
            raise unknown_tool(call.name, list(frame.toolset.offers))
        parse_arguments(call.arguments_json, offer.spec.input_schema_json)
        made = execution.calls_made[frame.name, call.name]
        if offer.max_calls is not None and made >= offer.max_calls:
            raise RunError(
                f"The tool {call.name!r} may be called {offer.max_calls} times in a run by {frame.name!r}, "
                "and has been.",
                reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
            )
        frame.budget.reserve_tool_call()
        execution.calls_made[frame.name, call.name] += 1
        return offer

    def _refuse(self, key: str, digest: str, call: message_pb2.ToolCall, refusal: RunError) -> message_pb2.ToolResult:
        event = self._event(key)
        event.effect_digest = digest
        result = event.tool_failed.result
        result.call.CopyFrom(call)
        self._fill(result, refusal)
        self._execution.emit(event)
        return result

    async def _run_tool(
        self,
        key: str,
        digest: str,
        call: message_pb2.ToolCall,
        offer: Offer,
    ) -> message_pb2.ToolResult:
        execution, frame = self._execution, self._frame
        traced = execution.tracing.execute_tool(
            tool=call.name, call_id=call.call_id, description=offer.spec.description, parent=frame.traced.below
        )
        execution.spans[key] = traced
        started = frame.opened.in_step(frame.event(key, traced=traced), self._index)
        started.effect_digest, started.attempt = digest, 1
        started.tool_started.call.CopyFrom(call)
        started.tool_started.idempotency_key = ids.derived_id(execution.facts.run_id, key)
        execution.emit(started)
        await execution.committed()
        result = message_pb2.ToolResult(call=call, start_time=started.time)
        error: RunError | None = None
        try:
            with traced.attached():
                result.parts.extend(await self._execute(key, started, offer))
        except Exception as raised:
            error = as_run_error(raised)
        result = cut_result(result, MAX_RESULT_BYTES)
        self._fill(result, error)
        _measure(result, execution.clock.now_ns())
        ended = frame.opened.in_step(frame.event(key, traced=traced), self._index)
        ended.attempt = 1
        (ended.tool_failed if error else ended.tool_completed).result.CopyFrom(result)
        execution.emit(ended)
        said = "".join(part.text or part.data_json for part in result.parts)
        execution.spans.pop(key).end(error=result.error if error else None, input=call.arguments_json, output=said)
        await execution.committed()
        return result

    async def _execute(self, key: str, started: event_pb2.AgentEvent, offer: Offer) -> list[message_pb2.Part]:
        call = started.tool_started.call
        if offer.tool is None:
            return [message_pb2.Part(text=str(json.loads(call.arguments_json)["answer"]))]
        facts = self._execution.facts
        context = CallContext(
            run_id=facts.run_id,
            session_id=facts.session_id,
            invocation_id=self._frame.invocation_id,
            agent=self._frame.name,
            call_id=call.call_id,
            idempotency_key=started.tool_started.idempotency_key,
        )

        async def say(text: str) -> None:
            for start in range(0, len(text), _PIECE_CHARACTERS):
                await self._output(key, call.call_id, text[start : start + _PIECE_CHARACTERS])

        return await tool_execution.execute(
            offer.tool, arguments_json=call.arguments_json, context=context, emit=say, timeout=offer.timeout
        )

    async def _output(self, key: str, call_id: str, text: str) -> None:
        def make() -> event_pb2.AgentEvent:
            event = self._event(key)
            event.attempt = 1
            event.tool_output.call_id = call_id
            for field in ("effect_key", "trace_id", "span_id"):
                event.ClearField(field)
            return event

        self._execution.refuse_sealed(key)
        if self._execution.delta(Piece(key, events.TOOL_OUTPUT, call_id, text), self._frame.joining, make):
            await self._execution.room()

    def _event(self, key: str) -> event_pb2.AgentEvent:
        return self._frame.opened.in_step(self._frame.event(key), self._index)

    def _fill(self, result: message_pb2.ToolResult, error: RunError | None) -> None:
        result.agent, result.invocation_id = self._frame.name, self._frame.invocation_id
        if error is not None:
            result.error.CopyFrom(error.to_agent_error(agent=result.agent, invocation_id=result.invocation_id))


def unknown_tool(name: str, known: Sequence[str]) -> RunError:
    """The refusal of a tool that is not offered, in words that a model can act on."""
    offered = f" There are: {', '.join(known)}." if known else " There are no tools."
    if name.startswith("call_"):
        return RunError(
            f"The agent {name.removeprefix('call_')!r} is not linked to this one.{offered}",
            reason=error_pb2.ERROR_REASON_NOT_LINKED,
        )
    return RunError(f"There is no tool {name!r}.{offered}", reason=error_pb2.ERROR_REASON_UNKNOWN_TOOL)


def _result_of(event: event_pb2.AgentEvent) -> message_pb2.ToolResult:
    return event.tool_completed.result if event.HasField("tool_completed") else event.tool_failed.result


def _measure(result: message_pb2.ToolResult, now_ns: int) -> None:
    latency = duration_pb2.Duration()
    latency.FromNanoseconds(max(0, now_ns - result.start_time.ToNanoseconds()))
    result.latency.CopyFrom(latency)
