"""Project events to messages, usage and the row of their run, also for a forked log.

A message is stored in the session if its event gave it a kind; that decision is made before it is recorded.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import event_pb2, execution_pb2, message_pb2, usage_pb2
from bough_server import ids
from bough_server.log import events
from bough_server.log.charges import NOTHING as NO_CHARGE
from bough_server.log.charges import Charge, ChargeFold
from bough_server.log.run_state import RunStateFold
from bough_server.log.session_state import json_of
from bough_server.log.session_state_fold import StateFold
from bough_server.messages import calls_of, copy_of
from bough_server.store.linked_calls import LinkedCalls
from bough_server.store.ports.log import LogEvent
from bough_server.store.ports.sessions import StoredCall, StoredMessage
from bough_server.store.ports.usage import LineKind, UsageLine
from bough_server.store.projected import NOTHING, LogAddress, Projected, RunEnd, RunStart
from bough_server.store.usage_so_far import COUNTED, UsageSoFar

_STATES: Final = {
    events.RUN_COMPLETED: execution_pb2.EXECUTION_STATE_SUCCEEDED,
    events.RUN_FAILED: execution_pb2.EXECUTION_STATE_FAILED,
    events.RUN_CANCELLED: execution_pb2.EXECUTION_STATE_CANCELLED,
}


MAX_EXCERPT: Final = 200
"""The most characters of an excerpt."""

_WORD: Final = re.compile(r"\S+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class RunFold:
    """The fold of one run's log. Apply every event except deltas, once and in order."""

    def __init__(self, address: LogAddress) -> None:
        self._address = address
        self._message_root = ""
        """The root of the ids of tool messages, which no event holds; see ids.message_id."""
        self._position = self._shared_position = self._session_position = 0
        self._run_state = RunStateFold()
        self._used = UsageSoFar()
        self._charges = ChargeFold()
        self._reserved_nanos = 0
        self._state = StateFold()
        self._is_state_new = False
        self._begun: RunStart | None = None
        self._waiting: StoredMessage | None = None
        self._chains: dict[str, tuple[str, str]] = {}
        self._models: dict[str, str] = {}
        self._stored_calls: set[tuple[str, str]] = set()
        self._start: RunStart | None = None
        self._end: RunEnd | None = None
        self._begin_time_ns: int | None = None
        self._messages: list[StoredMessage] = []
        self._shared: list[StoredMessage] = []
        self._linked_calls = LinkedCalls()
        self._calls: list[StoredCall] = []
        self._shared_calls: list[StoredCall] = []
        self._results: list[tuple[StoredMessage, str]] = []
        """The messages made from tool results, with their effect keys."""
        self._usage: list[UsageLine] = []

    @property
    def session_position(self) -> int:
        """Position of the session's last message when the run started."""
        return self._session_position

    @property
    def shared_position(self) -> int:
        """For a fork: position of the last message that its session shares with its origin's."""
        return self._shared_position

    @property
    def state_json(self) -> str:
        """The session state after the events so far; empty if it has no values."""
        return json_of(self._state.values)

    def project(self, log_events: Iterable[LogEvent]) -> Projected:
        """Return the changes that these events cause; NOTHING for deltas, which are not read.

        A run_queued must come in one call with the run_started before it, and a run_forked with all events that the
        fork shares: each removes changes that those events would have caused.
        """
        is_quiet = True
        for record in log_events:
            if record.kind in COUNTED:
                attempt = self._used.apply(record.event, record.kind)
                charge = self._charges.apply(record.event, record.kind)
                if attempt is not None:  # before the fold below forgets the call's model
                    self._add_entry(record.event, usage=attempt.usage(), charge=charge or NO_CHARGE)
                is_quiet = False
            fold = _FOLDS.get(record.kind)
            if fold is not None:
                fold(self, record.event)
                is_quiet = False
        return NOTHING if is_quiet else self._take_changes()

    def _take_changes(self) -> Projected:
        run_state, used = self._run_state.change(), self._used.change()
        if self._charges.total_reserved_nanos != self._reserved_nanos:
            self._reserved_nanos = self._charges.total_reserved_nanos
            used = used or self._used.serialize()
        has_changes = self._messages or self._calls or self._usage or self._start or self._end or self._is_state_new
        if not (has_changes or run_state or used is not None):
            return NOTHING
        projected = Projected(
            start=self._start,
            messages=self._messages,
            usage=self._usage,
            end=self._end,
            run_state=run_state,
            state_json=self.state_json if self._is_state_new else None,
            tree_usage=used,
            reserved_nanos=self._reserved_nanos,
            begin_time_ns=self._begin_time_ns,
            shared=self._shared,
            calls=tuple(self._calls),
            shared_calls=tuple(self._shared_calls),
        )
        self._start, self._end, self._begin_time_ns = None, None, None
        self._messages, self._usage, self._shared, self._results = [], [], [], []
        self._calls, self._shared_calls = [], []
        self._is_state_new = False
        return projected

    def _on_run_started(self, event: event_pb2.AgentEvent) -> None:
        started = event.run_started
        self._message_root = started.key_root
        self._position = self._session_position = started.session_cut
        self._state.apply(event)
        self._chains[event.invocation_id] = (started.agent, ids.agent_chain("", started.agent))
        self._run_state.apply(event)
        self._start = self._begun = RunStart(
            agent=started.agent,
            labels=dict(started.labels),
            input_excerpt=excerpt_of(started.input),
            start_time_ns=event.record_time.ToNanoseconds(),
            deadline_time_ns=self._run_state.deadline_ns,
            request_id=started.request_id,
            request_digest=started.request_digest,
            revisions=tuple(
                dict.fromkeys(
                    [
                        *(named.revision for named in started.definition_refs),
                        *(named.revision for named in started.tool_refs),
                    ]
                )
            ),
            evaluation=started.evaluation if started.HasField("evaluation") else None,
        )
        self._add_entry(event, kind=LineKind.START)
        self._store(event, started.input)

    def _on_run_queued(self, event: event_pb2.AgentEvent) -> None:
        """Hold the user's message back: it has no position until the run leaves the queue."""
        self._run_state.apply(event)
        self._waiting = self._messages.pop() if self._messages else None
        self._position = self._session_position = 0

    def _on_run_dequeued(self, event: event_pb2.AgentEvent) -> None:
        self._run_state.apply(event)
        self._position = self._session_position = event.run_dequeued.session_cut
        self._begin_time_ns = event.record_time.ToNanoseconds()
        self._state.apply(event)
        self._store_waiting()

    def _on_run_forked(self, event: event_pb2.AgentEvent) -> None:
        """Drop the usage of the shared events, which the origin is charged for; share the run's messages so far."""
        forked = event.run_forked
        assert self._begun is not None, "a log begins with run_started"
        self._run_state.apply(event)
        is_fork_of_a_fork = bool(self._begun.origin_run_id)
        self._start = self._begun = _fork_start(self._begun, event)
        # Tool messages since the earlier fork have ids derived from that fork's run id, which only this event names.
        if is_fork_of_a_fork:
            for stored, effect_key in self._results:
                stored.message.message_id = ids.message_id(forked.origin.run_id, effect_key, "TOOL")
        self._shared += self._messages
        self._shared_calls += self._calls
        if forked.changes.HasField("input") and self._shared:
            self._waiting = _replace_content(self._shared[0], forked.changes.input, event.record_time)
            self._position = self._shared[0].message.position - 1
            self._shared = []
        self._messages, self._usage, self._results, self._begin_time_ns = [], [], [], None
        self._calls = []
        self._charges.apply(event, events.RUN_FORKED)
        self._add_entry(event, kind=LineKind.START)
        self._message_root = self._address.run_id  # from here on ids must differ from those of the origin
        self._shared_position = self._position
        self._is_state_new = bool(self._state.values)
        self._store_waiting()

    def _apply_run_state(self, event: event_pb2.AgentEvent) -> None:
        self._run_state.apply(event)

    def _on_sub_agent_started(self, event: event_pb2.AgentEvent) -> None:
        _, above = self._chains.get(event.parent_invocation_id, ("", ""))
        self._chains[event.invocation_id] = (event.agent, ids.agent_chain(above, event.agent))
        self._linked_calls.apply_start(event)
        self._store(event, event.sub_agent_started.input)

    def _on_sub_agent_completed(self, event: event_pb2.AgentEvent) -> None:
        self._store(event, event.sub_agent_completed.output)
        self._close_requests(event)

    def _close_requests(self, event: event_pb2.AgentEvent) -> None:
        """Close the open requests of an invocation or a call that has ended."""
        if self._run_state.requests:  # most runs have no open request: skip the fold
            self._run_state.apply(event)

    def _on_llm_started(self, event: event_pb2.AgentEvent) -> None:
        self._models[event.effect_key] = event.llm_started.model

    def _on_llm_retrying(self, event: event_pb2.AgentEvent) -> None:
        if event.llm_retrying.next_model:
            self._models[event.effect_key] = event.llm_retrying.next_model

    def _on_llm_completed(self, event: event_pb2.AgentEvent) -> None:
        response = event.llm_completed.response
        self._models.pop(event.effect_key, None)
        if self._store(event, response.message):
            self._stored_calls.update((event.invocation_id, call.call_id) for call in calls_of(response.message))
        elif self._linked_calls.apply_message(event, response.message):
            self._store_call(event, response.message)

    def _on_llm_failed(self, event: event_pb2.AgentEvent) -> None:
        self._models.pop(event.effect_key, None)

    def _on_history_compacted(self, event: event_pb2.AgentEvent) -> None:
        self._store(event, event.history_compacted.summary)

    def _on_tool_completed(self, event: event_pb2.AgentEvent) -> None:
        self._store_result(event, event.tool_completed.result)
        self._close_requests(event)
        if event.tool_completed.state_changes:
            self._change_state(event)

    def _change_state(self, event: event_pb2.AgentEvent) -> None:
        self._is_state_new = self._state.apply(event) or self._is_state_new

    def _on_tool_failed(self, event: event_pb2.AgentEvent) -> None:
        self._store_result(event, event.tool_failed.result)
        self._close_requests(event)

    def _on_run_completed(self, event: event_pb2.AgentEvent) -> None:
        self._store(event, event.run_completed.final_answer)
        self._set_end(event, event.run_completed)

    def _on_run_failed(self, event: event_pb2.AgentEvent) -> None:
        self._set_end(event, event.run_failed)

    def _on_run_cancelled(self, event: event_pb2.AgentEvent) -> None:
        self._set_end(event, event.run_cancelled)

    def _set_end(
        self, event: event_pb2.AgentEvent, end: event_pb2.RunCompleted | event_pb2.RunFailed | event_pb2.RunCancelled
    ) -> None:
        error = None if isinstance(end, event_pb2.RunCompleted) or not end.HasField("error") else end.error
        self._end = RunEnd(
            state=_STATES[events.kind_of(event)],
            end_time_ns=event.record_time.ToNanoseconds(),
            error=None if error is None else error.SerializeToString(deterministic=True),
            tree_usage=end.tree_usage.SerializeToString(deterministic=True)
            if end.HasField("tree_usage")
            else self._used.serialize(),
        )

    def _store_result(self, event: event_pb2.AgentEvent, result: message_pb2.ToolResult) -> None:
        """Store a tool's result as a message if the message with its call is stored.

        Results of agents are no messages, as the session holds the agents' own; they are stored as calls.
        """
        call = (event.invocation_id, result.call.call_id)
        message = message_pb2.Message(
            role=message_pb2.ROLE_TOOL,
            author=result.agent,
            parts=[message_pb2.Part(tool_result=result)],
            invocation_id=event.invocation_id,
        )
        if result.child_invocation_id or not event.effect_key or call not in self._stored_calls:
            inside = self._linked_calls.apply_result(result, call)
            if inside is not None:
                self._store_call(event, message, inside=inside)
            return
        self._stored_calls.discard(call)
        message.message_id = ids.message_id(self._message_root, event.effect_key, "TOOL")
        message.kind = message_pb2.MESSAGE_KIND_TOOL
        if self._store(event, message):
            self._results.append((self._messages[-1], event.effect_key))

    def _store(self, event: event_pb2.AgentEvent, message: message_pb2.Message) -> bool:
        if message.kind == message_pb2.MESSAGE_KIND_UNSPECIFIED:
            return False
        self._position += 1
        stored = copy_of(message)
        stored.position = self._position
        if not stored.HasField("create_time"):
            stored.create_time.CopyFrom(event.record_time)
        agent, chain = self._chains.get(event.invocation_id, (event.agent, ""))
        self._messages.append(StoredMessage(message=stored, run_id=self._address.run_id, agent=agent, chain=chain))
        return True

    def _store_call(
        self, event: event_pb2.AgentEvent, message: message_pb2.Message, *, inside: tuple[str, ...] = ()
    ) -> None:
        stored = copy_of(message)
        stored.position = self._position
        agent, chain = self._chains.get(event.invocation_id, (event.agent, ""))
        self._calls.append(
            StoredCall(
                message=stored,
                run_id=self._address.run_id,
                agent=agent,
                chain=chain,
                sequence=event.sequence,
                inside=inside,
            )
        )

    def _store_waiting(self) -> None:
        """Store the message that was held back, at the next position."""
        if self._waiting is not None:
            self._position += 1
            message = copy_of(self._waiting.message)
            message.position = self._position
            self._messages.append(replace(self._waiting, message=message))
            self._waiting = None

    def _add_entry(
        self,
        event: event_pb2.AgentEvent,
        *,
        kind: LineKind = LineKind.ATTEMPT,
        usage: usage_pb2.Usage | None = None,
        charge: Charge = NO_CHARGE,
    ) -> None:
        self._usage.append(
            UsageLine(
                run_id=self._address.run_id,
                sequence=event.sequence,
                tenant_id=self._address.tenant_id,
                user_id=self._address.user_id,
                session_id=self._address.session_id,
                agent=event.agent,
                invocation_id=event.invocation_id,
                model=self._models.get(event.effect_key, ""),
                time_ns=event.record_time.ToNanoseconds(),
                usage=usage or usage_pb2.Usage(),
                kind=kind,
                charge=charge,
            )
        )


_FOLDS: Final = {
    events.RUN_STARTED: RunFold._on_run_started,
    events.RUN_QUEUED: RunFold._on_run_queued,
    events.RUN_DEQUEUED: RunFold._on_run_dequeued,
    events.RUN_FORKED: RunFold._on_run_forked,
    events.RUN_RESUMED: RunFold._apply_run_state,
    events.RUN_INTERRUPTED: RunFold._apply_run_state,
    events.CANCEL_REQUESTED: RunFold._apply_run_state,
    events.INPUT_REQUESTED: RunFold._apply_run_state,
    events.INPUT_RECEIVED: RunFold._apply_run_state,
    events.SUB_AGENT_STARTED: RunFold._on_sub_agent_started,
    events.SUB_AGENT_COMPLETED: RunFold._on_sub_agent_completed,
    events.SUB_AGENT_FAILED: RunFold._close_requests,
    events.LLM_STARTED: RunFold._on_llm_started,
    events.LLM_RETRYING: RunFold._on_llm_retrying,
    events.LLM_COMPLETED: RunFold._on_llm_completed,
    events.LLM_FAILED: RunFold._on_llm_failed,
    events.HISTORY_COMPACTED: RunFold._on_history_compacted,
    events.TOOL_COMPLETED: RunFold._on_tool_completed,
    events.TOOL_FAILED: RunFold._on_tool_failed,
    events.SESSION_STATE_CHANGED: RunFold._change_state,
    events.RUN_COMPLETED: RunFold._on_run_completed,
    events.RUN_FAILED: RunFold._on_run_failed,
    events.RUN_CANCELLED: RunFold._on_run_cancelled,
}


def excerpt_of(message: message_pb2.Message) -> str:
    """Return the first MAX_EXCERPT characters of a message's text.

    Whitespace is collapsed to single spaces. Control characters are dropped: not every store can hold U+0000, and a
    terminal obeys the others.
    """
    found = (word.group() for part in message.parts for word in _WORD.finditer(part.text))
    words = filter(None, (_CONTROL.sub("", word)[:MAX_EXCERPT] for word in found))
    return " ".join(islice(words, MAX_EXCERPT))[:MAX_EXCERPT].rstrip()


def _fork_start(origin: RunStart, event: event_pb2.AgentEvent) -> RunStart:
    """Return a fork's row values: those of its origin, except for what its run_forked changes."""
    forked = event.run_forked
    revisions = (*origin.revisions, *(named.revision for named in forked.definition_refs))
    return replace(
        origin,
        labels=dict(forked.labels) or origin.labels,
        start_time_ns=event.record_time.ToNanoseconds(),
        input_excerpt=excerpt_of(forked.changes.input) if forked.changes.HasField("input") else origin.input_excerpt,
        request_id=forked.request_id,
        request_digest=forked.request_digest,
        revisions=tuple(dict.fromkeys(revisions)),
        origin_run_id=forked.origin.run_id,
        origin_sequence=forked.origin.sequence,
        evaluation=forked.evaluation if forked.HasField("evaluation") else None,
    )


def _replace_content(stored: StoredMessage, instead: message_pb2.Message, time: Timestamp) -> StoredMessage:
    """Return a copy of the user's message with other content, id and time; run, agent and position stay."""
    message = copy_of(stored.message)
    message.ClearField("parts")
    message.parts.extend(instead.parts)
    message.message_id, message.metadata_json = instead.message_id, instead.metadata_json
    message.create_time.CopyFrom(time)
    return replace(stored, message=message)
