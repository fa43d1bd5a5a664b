"""Parallel tool calls of one step, with results in call order; calls of linked agents go to the dispatcher."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

from bough.v1 import error_pb2, execution_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.runtime.agent import CallResult
from bough_server.runtime.child_call import Dispatch
from bough_server.runtime.dispatcher import dispatch
from bough_server.runtime.lane import Lane
from bough_server.runtime.state import LaneState
from bough_server.runtime.tool_call import ToolCallEffect
from bough_server.runtime.toolset import ToolOffer
from bough_server.tools.arguments import parse_arguments
from bough_server.tools.builtin import ACTIONS, target_problem

MAX_LANES: Final = 16
"""How many calls of one step run in parallel."""


class ParallelToolCalls:
    """Calls of one step of an invocation, by their positions in the model's answer."""

    def __init__(
        self,
        lane: Lane,
        *,
        index: int | None,
        calls: Mapping[int, message_pb2.ToolCall],
        offers: Mapping[str, ToolOffer] | None = None,
    ) -> None:
        """Without an `index` the calls are those of a message that a graph's node got, in no step.

        `offers` are what may be called; default: all that the invocation offers.
        """
        self._lane = lane
        self._offers = lane.running.toolset.offers if offers is None else offers
        self._execution = lane.execution
        self._running = lane.running
        self._index = index
        self._calls = calls
        self._answers: dict[int, CallResult] = {}
        self._tasks: dict[int, asyncio.Task[CallResult]] = {}
        self._is_parallel = True

    def key(self, position: int) -> str:
        """Return the key of a call."""
        # A lane for each, with one effect in it.
        name = f"e0.{position}/e0" if self._index is None else f"s{self._index}.t{position}"
        return self._lane.key(name)

    async def run(self, *, parallel: bool) -> list[CallResult]:
        """Run the calls and return their answers. Raises Abort if a sub-agent's failure aborts the caller."""
        self._is_parallel = parallel
        # The common case of a replay, without a task for each call.
        if parallel and len(self._calls) <= MAX_LANES and all(map(self._is_recorded, self._calls)):
            return await self._replay_all()
        waiting = iter(self._calls)
        lanes = min(len(self._calls), MAX_LANES) if parallel else 1
        for position in [next(waiting) for _ in range(lanes)]:
            self._start(position)
        while self._tasks:
            await self._execution.scheduler.join(*self._tasks.values(), first=True)
            for position, task in [(each, task) for each, task in self._tasks.items() if task.done()]:
                del self._tasks[position]
                if task.cancelled():
                    continue
                self._answers[position] = task.result()
                following = next(waiting, None)
                if following is not None:
                    self._start(following)
        if len(self._answers) < len(self._calls):
            await self._execution.scheduler.rest_forever()  # a call was cancelled, and the step with it: wait for that
        return [self._answers[position] for position in self._calls]

    def _is_recorded(self, position: int) -> bool:
        """True if the replay delivers the result of a call: not of one that ran an agent or was cancelled."""
        journal, key = self._execution.journal, self.key(position)
        recorded = journal.results.get(key)
        is_delivered = recorded is not None and not journal.is_cancelled(recorded)
        return is_delivered and key not in journal.dispatched and not self._is_of_an_agent(position)

    def _is_of_an_agent(self, position: int) -> bool:
        offer = self._offers.get(self._calls[position].name)
        return offer is not None and offer.link is not None

    async def _replay_all(self) -> list[CallResult]:
        """Return the results of calls that are all in the log; none of them needs its own task."""
        effects = [self._effect(position) for position in self._calls]
        # All are expected before the first is awaited: the log may deliver them in any order.
        waiters = [effect.expect_result() for effect in effects]
        return [
            CallResult(result=await effect.await_result(waiter))
            for effect, waiter in zip(effects, waiters, strict=True)
            if waiter is not None
        ]

    def _effect(self, position: int) -> ToolCallEffect:
        return ToolCallEffect(
            self._lane,
            key=self.key(position),
            index=self._index,
            call=self._calls[position],
            state=self._fork_state(position),
            refusal=self._refusal(position),
        )

    def _start(self, position: int) -> None:
        task = self._execution.scheduler.spawn(self.key(position), self._run_call(position))
        self._tasks[position] = task

    async def _run_call(self, position: int) -> CallResult:
        call, offer = self._calls[position], self._offers.get(self._calls[position].name)
        if offer is not None and offer.link is not None:
            work = Dispatch(
                key=self.key(position),
                link=offer.link,
                call=call,
                step_index=self._index,
                state=self._fork_state(position),
            )
            dispatched = await dispatch(self._lane, work, on_failure=partial(self._cancel_siblings, position))
            return CallResult(result=dispatched.result, child=dispatched.transcript)
        return CallResult(result=await self._effect(position).run_or_replay(offer))

    def _fork_state(self, position: int) -> LaneState:
        """Return the session state for a call that starts now; parallel calls do not see each other's writes."""
        state = self._lane.lane_state
        if not self._is_parallel:
            state.join()
        return state.fork(self._lane.key("e0." if self._index is None else f"s{self._index}.t"), position)

    def _refusal(self, position: int) -> RunError | None:
        """Return the error of an action that follows another in the same answer; only the first valid one is taken."""
        offers, targets = self._running.toolset.offers, self._running.toolset.targets
        if self._calls[position].name not in ACTIONS:
            return None
        for earlier in sorted(self._calls):
            call = self._calls[earlier]
            is_ending = call.name in ACTIONS or call.name in self._running.toolset.closing
            if earlier >= position or not is_ending or call.name not in offers:
                continue
            if not target_problem(call, targets) and _has_valid_arguments(call, offers[call.name]):
                return RunError(
                    f"{_describe_earlier_call(call.name)} This call was not carried out.",
                    reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
                )
        return None

    async def _cancel_siblings(self, position: int, failure: RunError) -> None:
        """Cancel the siblings of a call whose failure aborts the caller."""
        if failure is not self._running.abort:
            return
        error = RunError("A sibling failed and aborted the caller.", reason=error_pb2.ERROR_REASON_CANCELLED)
        await self._execution.cancellation.cancel_siblings(
            [self.key(sibling) for sibling in sorted(self._tasks.keys() - {position})],
            caller=self._running.invocation_id,
            reason=execution_pb2.CANCEL_REASON_ABORT,
            error=error.to_agent_error(),
        )


def _describe_earlier_call(name: str) -> str:
    if name not in ACTIONS:
        return f"An earlier call of {name} ends the agent."
    return f"An answer can take one of {', '.join(sorted(ACTIONS))}, and an earlier call took {name}."


def _has_valid_arguments(call: message_pb2.ToolCall, offer: ToolOffer) -> bool:
    try:
        parse_arguments(call.arguments_json, offer.spec.input_schema_json)
    except RunError:
        return False
    return True
