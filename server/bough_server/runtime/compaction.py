"""Fit a model call's request into its agent's history policy: leave out older exchanges, or summarize them.

The log alone says whether a step was preceded by a summary; omissions are not recorded. If a summary cannot be made,
the agent does not fail: the messages to be summarized are left out of that one step.
"""

from collections.abc import Callable, Sequence
from typing import Final

from bough.v1 import event_pb2, message_pb2, step_pb2
from bough_server.engine import keys
from bough_server.errors import RunError
from bough_server.history.overflow import Plan, Unit, plan_summary, summary_of, summary_request, window
from bough_server.log import events
from bough_server.messages import text_of
from bough_server.models.model import Model, ModelRequest
from bough_server.models.tokens import BYTES_PER_TOKEN, count_request_tokens, form_tokens, request_tokens
from bough_server.runtime.lane import Lane
from bough_server.runtime.model_call import ModelCallSpec, RequestSource, call_model, check_call
from bough_server.truncation import size_of

_TRIES: Final = 4
"""How often a request is shortened: more than once only if a tokenizer counts more than the estimate."""
_SHARE: Final = 4
"""A summary takes at most one in so many of the tokens that a request may have."""
_FRAME_TOKENS: Final = 20
"""Tokens for the words with which a shown summary begins, and for its provider's framing."""
_LEAST_WORDS: Final = 20
_MOST_WORDS: Final = 500


async def fit_request(lane: Lane, index: int, make: Callable[[], ModelRequest], *, name: str) -> RequestSource:
    """Return the request of a step, made to fit; return `make` itself if it is not sent or there is no limit.

    `name` is the model to be called. During a replay no request is built.
    """
    if lane.running.history.WhichOneof("overflow") is None:
        return make
    return await _Fitting(lane, index, make, name).run()


class _Fitting:
    """One step's request."""

    def __init__(self, lane: Lane, index: int, make: Callable[[], ModelRequest], name: str) -> None:
        self._lane, self._make, self._name = lane, make, name
        self._key = keys.below(lane.scope, f"s{index}.m")
        self._effect = keys.below(lane.scope, f"s{index}.compact")
        policy = lane.running.history
        self._summarize = policy.summarize if policy.HasField("summarize") else None
        window = policy.sliding_window
        self._limit = self._summarize.max_tokens if self._summarize else window.max_tokens - window.reserve_tokens
        self._words = max(_LEAST_WORDS, min(_MOST_WORDS, self._limit // (2 * _SHARE)))

    async def run(self) -> RequestSource:
        execution, journal = self._lane.execution, self._lane.execution.journal
        is_answered, is_summarized = self._key in journal.results, self._effect in journal.results
        is_summarizing = self._effect in journal.started and not is_summarized
        is_new = self._key not in journal.started
        unused = await self._replay_summary() if is_summarized else ""
        if is_answered:
            return self._make
        # Counted as asked for before going live: an effect that the log holds as started and that the replay does not
        # ask for again is a divergence.
        check_call(execution, self._key)
        if is_summarizing:
            check_call(execution, self._effect)
        await self._lane.go_live(self._key)
        try:
            made = self._make()
        except Exception:
            return self._make  # the call itself raises it again and records it
        size = await self._measure(made)
        if unused and is_new:
            self._compact(unused, self._plan(made, size))
        elif self._summarize is not None and (
            is_summarizing or (is_new and not is_summarized and self._is_worth(size))
        ):
            await self._request_summary(self._plan(made, size))
        else:
            return await self._drop_oldest_units(made, size)
        made = self._make()
        return await self._drop_oldest_units(made, await self._measure(made))

    async def _replay_summary(self) -> str:
        """Apply the recorded summary; return its text if the log ends before its history_compacted, else ""."""
        recorded = [event.history_compacted for event in self._lane.execution.journal.of_effect.get(self._effect, ())]
        compacted = next((one for one in recorded if one.HasField("summary")), None)
        try:
            response = await call_model(self._lane, ModelCallSpec(key=self._effect, index=None), self._make, self._name)
        except RunError:
            return ""
        if compacted is None:
            return self._text(response)
        self._lane.visible_history.apply(compacted)
        return ""

    async def _request_summary(self, plan: Plan | None) -> None:
        """Have a model summarize the messages of a plan, if there is one."""
        if plan is None or self._summarize is None:
            return
        name = self._summarize.model or self._name
        made: list[event_pb2.AgentEvent] = []

        def build_compaction(response: step_pb2.LlmResponse) -> Sequence[event_pb2.AgentEvent]:
            text = self._text(response)
            made.extend([self._event(text, plan)] if text else [])
            return made

        request = await self._build_summary_request(plan, name)
        try:
            await call_model(
                self._lane, ModelCallSpec(key=self._effect, index=None, beside=build_compaction), request, name
            )
        except RunError:
            return
        for event in made:
            self._lane.visible_history.apply(event.history_compacted)

    def _compact(self, text: str, plan: Plan | None) -> None:
        if plan is not None:
            event = self._event(text, plan)
            self._lane.execution.emit(event)
            self._lane.visible_history.apply(event.history_compacted)

    async def _drop_oldest_units(self, made: ModelRequest, size: int) -> ModelRequest:
        """Return the request without as many of its oldest units as do not fit."""
        if size <= self._limit:
            return made
        narrower, left, room = made, size, self._limit
        parts, kept = self._lane.visible_history.units(), list[int]()
        for _ in range(_TRIES):
            if left <= self._limit:
                break
            before, kept = kept, window(parts, _sizes(parts), self._room(room, made, size, parts))
            if kept == before:
                break  # nothing more can be left out
            with self._lane.visible_history.narrow_to([parts[index] for index in kept]):
                narrower = self._make()
            left = await self._measure(narrower)
            # The model's tokenizer may count more than the estimate: take the excess off the room and try again.
            room -= left - self._limit
        return narrower

    def _plan(self, made: ModelRequest, size: int) -> Plan | None:
        assert self._summarize is not None, "only a policy that summarizes plans a summary"
        parts = self._lane.visible_history.units()
        room = self._room(self._limit, made, size, parts) - self._limit // _SHARE - _FRAME_TOKENS
        before, policy = self._lane.visible_history.active_summary(), self._summarize
        keep = policy.keep_recent_exchanges if policy.HasField("keep_recent_exchanges") else 1
        if size <= self._limit:
            # The summary was started by an earlier execution, which counted more tokens: keep as little as possible.
            keep, room = 1, 0
        return plan_summary(parts, _sizes(parts), room, keep_recent_exchanges=keep, before=before)

    def _room(self, limit: int, made: ModelRequest, size: int, parts: Sequence[Unit]) -> int:
        """Return the estimated tokens left for the history if the whole request may take `limit` tokens."""
        estimated = request_tokens(made)
        return limit * estimated // max(1, size) - (estimated - sum(_sizes(parts)))

    def _is_worth(self, size: int) -> bool:
        """True if the request is too long and a request for a summary would fit the limit."""
        return size > self._limit and self._room_to_ask() > 0

    def _room_to_ask(self) -> int:
        """Return the estimated tokens that a summary's request has left for the messages."""
        return self._limit - request_tokens(summary_request([], room=0, words=self._words))

    async def _build_summary_request(self, plan: Plan, name: str) -> ModelRequest:
        room = self._room_to_ask() * BYTES_PER_TOKEN
        frame = _bytes_of(summary_request([], room=0, words=self._words))
        for _ in range(_TRIES):
            request = summary_request(plan.messages, room=room, words=self._words)
            over = await count_request_tokens(self._model(name), request) - self._limit
            if over <= 0:
                break
            # From what the conversation takes: the room may be larger, by the estimate, and cut nothing.
            room = min(room, _bytes_of(request) - frame) - over * BYTES_PER_TOKEN
        return request

    def _text(self, response: step_pb2.LlmResponse) -> str:
        return summary_of(response.message, most=max(1, self._limit // _SHARE) * BYTES_PER_TOKEN)

    def _event(self, text: str, plan: Plan) -> event_pb2.AgentEvent:
        running = self._lane.running
        event = running.event(self._effect)
        compacted, summary = event.history_compacted, event.history_compacted.summary
        compacted.run_message_count = plan.run_message_count
        summary.message_id = self._lane.execution.message_id(self._effect, events.HISTORY_COMPACTED, "SUMMARY")
        summary.role, summary.kind = message_pb2.ROLE_USER, message_pb2.MESSAGE_KIND_SUMMARY
        summary.author, summary.invocation_id = running.name, running.invocation_id
        summary.parts.add(text=text)
        summary.summary_range.from_position, summary.summary_range.to_position = plan.from_position, plan.to_position
        is_narrow = running.history.scope in (message_pb2.HISTORY_SCOPE_BRANCH, message_pb2.HISTORY_SCOPE_CALLS)
        summary.summary_range.scope = running.history.scope if is_narrow else message_pb2.HISTORY_SCOPE_SESSION
        return event

    async def _measure(self, request: ModelRequest) -> int:
        return await count_request_tokens(self._model(self._name), request)

    def _model(self, name: str) -> Model | None:
        try:
            return self._lane.running.resolver.model(name)
        except KeyError:
            return None  # the call itself fails with MODEL_UNAVAILABLE


def _bytes_of(request: ModelRequest) -> int:
    return sum(size_of(text_of(message)) for message in request.messages)


def _sizes(parts: Sequence[Unit]) -> list[int]:
    return [sum(form_tokens(one.forms) for one in unit) for unit in parts]
