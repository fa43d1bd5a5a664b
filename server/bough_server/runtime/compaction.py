"""A model call's request made to fit its agent's history policy: older exchanges left out, or summarized by a model.

Whether a step was preceded by a summary is told by the log alone; what is left out is not recorded. A summary that
cannot be made fails no agent: what it was to stand for is left out of that one step.
"""

from collections.abc import Callable, Sequence
from typing import Final

from bough.v1 import event_pb2, message_pb2, step_pb2
from bough_server import events
from bough_server.engine import keys
from bough_server.errors import RunError
from bough_server.history.overflow import Plan, Unit, summary_of, summary_request, to_be_summarized, window
from bough_server.models.model import Model, ModelRequest
from bough_server.models.tokens import BYTES_PER_TOKEN, counted, message_tokens, request_tokens
from bough_server.runtime.lane import Lane
from bough_server.runtime.model_call import Asked, ModelCallSpec, ask, check_asked

_TRIES: Final = 4
"""How often a request is made shorter: more than once only where a tokenizer counts otherwise than the estimate."""
_SHARE: Final = 4
"""A summary takes at most this part of what a request may have."""
_FRAME_TOKENS: Final = 20
"""What a summary begins with when it is shown, and what a provider puts around it."""
_LEAST_WORDS: Final = 20
_MOST_WORDS: Final = 500


async def fitted(lane: Lane, index: int, make: Callable[[], ModelRequest], *, name: str) -> Asked:
    """What a step asks, made to fit; what makes it where nothing of it is sent, or there is no bound.

    `name` is the model that is asked. A log is handed back as it is: what it says was asked is not made again.
    """
    if lane.frame.history.WhichOneof("overflow") is None:
        return make
    return await _Fitting(lane, index, make, name).run()


class _Fitting:
    """One step's request."""

    def __init__(self, lane: Lane, index: int, make: Callable[[], ModelRequest], name: str) -> None:
        self._lane, self._make, self._name = lane, make, name
        self._key = keys.below(lane.scope, f"s{index}.m")
        self._effect = keys.below(lane.scope, f"s{index}.compact")
        policy = lane.frame.history
        self._summarize = policy.summarize if policy.HasField("summarize") else None
        window = policy.sliding_window
        self._limit = self._summarize.max_tokens if self._summarize else window.max_tokens - window.reserve_tokens
        self._words = max(_LEAST_WORDS, min(_MOST_WORDS, self._limit // (2 * _SHARE)))

    async def run(self) -> Asked:
        execution, journal = self._lane.execution, self._lane.execution.journal
        is_asked, is_over = self._key in journal.results, self._effect in journal.results
        is_begun = self._effect in journal.started and not is_over
        is_new = self._key not in journal.started
        unused = await self._handed_back() if is_over else ""
        if is_asked:
            return self._make
        check_asked(execution, self._key)
        if is_begun:
            check_asked(execution, self._effect)
        await self._lane.go_live(self._key)
        try:
            made = self._make()
        except Exception:
            return self._make  # the call itself records what goes wrong
        size = await self._measure(made)
        if unused and is_new:
            self._compact(unused, self._plan(made, size))
        elif self._summarize is not None and (is_begun or (is_new and not is_over and self._is_worth(size))):
            await self._summarized(self._plan(made, size))
        else:
            return await self._windowed(made, size)
        made = self._make()
        return await self._windowed(made, await self._measure(made))

    async def _handed_back(self) -> str:
        """Takes a recorded summary; gives the text of one whose log was cut off right behind the model's answer."""
        recorded = [event.history_compacted for event in self._lane.execution.journal.of_effect.get(self._effect, ())]
        compacted = next((one for one in recorded if one.HasField("summary")), None)
        try:
            response = await ask(self._lane, ModelCallSpec(key=self._effect, index=None), self._make, self._name)
        except RunError:
            return ""
        if compacted is None:
            return self._text(response)
        self._lane.sight.take(compacted)
        return ""

    async def _summarized(self, plan: Plan | None) -> None:
        """Has a model summarize what is planned, if there is anything."""
        if plan is None or self._summarize is None:
            return
        name = self._summarize.model or self._name
        made: list[event_pb2.AgentEvent] = []

        def beside(response: step_pb2.LlmResponse) -> Sequence[event_pb2.AgentEvent]:
            text = self._text(response)
            made.extend([self._event(text, plan)] if text else [])
            return made

        request = await self._asked(plan, name)
        try:
            await ask(self._lane, ModelCallSpec(key=self._effect, index=None, beside=beside), request, name)
        except RunError:
            return
        for event in made:
            self._lane.sight.take(event.history_compacted)

    def _compact(self, text: str, plan: Plan | None) -> None:
        if plan is not None:
            event = self._event(text, plan)
            self._lane.execution.emit(event)
            self._lane.sight.take(event.history_compacted)

    async def _windowed(self, made: ModelRequest, size: int) -> ModelRequest:
        """The request without its oldest units, as many as have to go."""
        if size <= self._limit:
            return made
        narrower, left, room = made, size, self._limit
        parts, kept = self._lane.sight.units(), list[int]()
        for _ in range(_TRIES):
            if left <= self._limit:
                break
            before, kept = kept, window(parts, _sizes(parts), self._room(room, made, size, parts))
            if kept == before:
                break  # there is no more to leave out
            with self._lane.sight.narrowed([parts[index] for index in kept]):
                narrower = self._make()
            left = await self._measure(narrower)
            room -= left - self._limit
        return narrower

    def _plan(self, made: ModelRequest, size: int) -> Plan | None:
        assert self._summarize is not None, "who does not summarize plans nothing"
        parts = self._lane.sight.units()
        room = self._room(self._limit, made, size, parts) - self._limit // _SHARE - _FRAME_TOKENS
        before, policy = self._lane.sight.standing(), self._summarize
        keep = policy.keep_recent_exchanges if policy.HasField("keep_recent_exchanges") else 1
        if size <= self._limit:
            # It was too long when it was begun, by another count than today's: as little as can be is kept.
            keep, room = 1, 0
        return to_be_summarized(parts, _sizes(parts), room, keep_recent_exchanges=keep, before=before)

    def _room(self, limit: int, made: ModelRequest, size: int, parts: Sequence[Unit]) -> int:
        """The tokens by the estimate that are left for the history, where all of the request may take `limit`."""
        estimated = request_tokens(made)
        return limit * estimated // max(1, size) - (estimated - sum(_sizes(parts)))

    def _is_worth(self, size: int) -> bool:
        """Whether a summary is called for: the request is too long, and one could be asked for within the bound."""
        return size > self._limit and self._room_to_ask() > 0

    def _room_to_ask(self) -> int:
        """The tokens by the estimate that a summary's request has left for what is summarized."""
        return self._limit - request_tokens(summary_request([], room=0, words=self._words))

    async def _asked(self, plan: Plan, name: str) -> ModelRequest:
        room = self._room_to_ask() * BYTES_PER_TOKEN
        for _ in range(_TRIES):
            request = summary_request(plan.messages, room=room, words=self._words)
            over = await counted(self._model(name), request) - self._limit
            if over <= 0:
                break
            room -= over * BYTES_PER_TOKEN
        return request

    def _text(self, response: step_pb2.LlmResponse) -> str:
        return summary_of(response.message, most=max(1, self._limit // _SHARE) * BYTES_PER_TOKEN)

    def _event(self, text: str, plan: Plan) -> event_pb2.AgentEvent:
        frame = self._lane.frame
        event = frame.event(self._effect)
        compacted, summary = event.history_compacted, event.history_compacted.summary
        compacted.run_message_count = plan.run_message_count
        summary.message_id = self._lane.execution.message_id(self._effect, events.HISTORY_COMPACTED, "SUMMARY")
        summary.role, summary.kind = message_pb2.ROLE_USER, message_pb2.MESSAGE_KIND_SUMMARY
        summary.author, summary.invocation_id = frame.name, frame.invocation_id
        summary.parts.add(text=text)
        summary.summary_range.from_position, summary.summary_range.to_position = plan.from_position, plan.to_position
        is_of_branch = frame.history.scope == message_pb2.HISTORY_SCOPE_BRANCH
        summary.summary_range.scope = (
            message_pb2.HISTORY_SCOPE_BRANCH if is_of_branch else message_pb2.HISTORY_SCOPE_SESSION
        )
        return event

    async def _measure(self, request: ModelRequest) -> int:
        return await counted(self._model(self._name), request)

    def _model(self, name: str) -> Model | None:
        try:
            return self._lane.frame.resolver.model(name)
        except KeyError:
            return None  # the call itself says so


def _sizes(parts: Sequence[Unit]) -> list[int]:
    return [sum(message_tokens(one.message) for one in unit) for unit in parts]
