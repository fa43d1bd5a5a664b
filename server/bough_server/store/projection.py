"""Project events to messages, usage and the row of their run, also for a forked log.

A message is stored if its event gave it a kind; nothing is decided here.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import event_pb2, message_pb2
from bough_server import events, ids
from bough_server.run_state import StandingFold
from bough_server.session_state import json_of
from bough_server.session_state_fold import StateFold
from bough_server.store.ports import Record, StoredMessage, UsageEntry
from bough_server.store.projected import NOTHING, LogAddress, Projected, RunEnd, RunStart
from bough_server.usage import is_reported

_STATES: Final = {
    events.RUN_COMPLETED: event_pb2.STATE_SUCCEEDED,
    events.RUN_FAILED: event_pb2.STATE_FAILED,
    events.RUN_CANCELLED: event_pb2.STATE_CANCELLED,
}


def agent_chain(parent: str, name: str) -> str:
    """SHA-256 hex over the agents' names from the root down to `name`; the parent's chain is empty at the root."""
    return hashlib.sha256((f"{parent}/{name}" if parent else name).encode()).hexdigest()


class RunFold:
    """The fold of one run's log: give it every event that is no delta, once and in order."""

    def __init__(self, address: LogAddress) -> None:
        self._address = address
        self._key_root = ""
        self._position = self._shared_position = 0
        self._standing = StandingFold()
        self._state = StateFold()
        self._is_state_new = False
        self._begun: RunStart | None = None
        self._waiting: StoredMessage | None = None
        self._chains: dict[str, tuple[str, str]] = {}
        self._models: dict[str, str] = {}
        self._stored_calls: set[tuple[str, str]] = set()
        self._start: RunStart | None = None
        self._end: RunEnd | None = None
        self._messages: list[StoredMessage] = []
        self._usage: list[UsageEntry] = []

    @property
    def shared_position(self) -> int:
        """Of a fork: the position of the last message that its session shares with its origin's."""
        return self._shared_position

    @property
    def state_json(self) -> str:
        """The session's state as the run has left it so far; empty for none."""
        return json_of(self._state.values)

    def project(self, records: Iterable[Record]) -> Projected:
        """What these events add; NOTHING, without looking, for deltas.

        A run_queued comes with the run_started before it, and a run_forked with all that it is a fork of: what those
        would have added is taken back.
        """
        is_quiet = True
        for record in records:
            fold = _FOLDS.get(record.kind)
            if fold is not None:
                fold(self, record.event)
                is_quiet = False
        if is_quiet:
            return NOTHING
        standing = self._standing.change()
        if not (self._messages or self._usage or self._start or self._end or standing or self._is_state_new):
            return NOTHING
        projected = Projected(
            start=self._start,
            messages=self._messages,
            usage=self._usage,
            end=self._end,
            standing=standing,
            state_json=self.state_json if self._is_state_new else None,
        )
        self._start, self._end, self._messages, self._usage = None, None, [], []
        self._is_state_new = False
        return projected

    def _run_started(self, event: event_pb2.AgentEvent) -> None:
        started = event.run_started
        self._key_root = started.key_root
        self._position = started.session_cut
        self._state.take(event)
        self._chains[event.invocation_id] = (started.agent, agent_chain("", started.agent))
        self._standing.begin(event)
        self._start = self._begun = RunStart(
            agent=started.agent,
            labels=dict(started.labels),
            start_time_ns=event.time.ToNanoseconds(),
            request_id=started.request_id,
            request_digest=started.request_digest,
            revisions=tuple(dict.fromkeys(named.revision for named in started.definitions)),
        )
        self._store(event, started.input)

    def _run_queued(self, event: event_pb2.AgentEvent) -> None:
        """Takes back the user's message: it has no place until the run has its session."""
        self._standing.take(event)
        self._waiting = self._messages.pop() if self._messages else None
        self._position = 0

    def _run_dequeued(self, event: event_pb2.AgentEvent) -> None:
        self._standing.take(event)
        self._position = event.run_dequeued.session_cut
        self._state.take(event)
        self._place_waiting()

    def _run_forked(self, event: event_pb2.AgentEvent) -> None:
        """Leaves to the origin what its part of the log adds; its messages are the fork's session's as they are."""
        forked = event.run_forked
        assert self._begun is not None, "a log begins with run_started"
        self._standing.take(event)
        self._start = self._begun = of_fork(self._begun, forked)
        if forked.changes.HasField("input") and self._messages:
            self._waiting = said_instead(self._messages[0], forked.changes.input, event.time)
            self._position = self._messages[0].message.position - 1
        self._messages, self._usage = [], []
        self._shared_position = self._position
        self._is_state_new = bool(self._state.values)
        self._place_waiting()

    def _stand(self, event: event_pb2.AgentEvent) -> None:
        self._standing.take(event)

    def _sub_agent_started(self, event: event_pb2.AgentEvent) -> None:
        _, above = self._chains.get(event.parent_invocation_id, ("", ""))
        self._chains[event.invocation_id] = (event.agent, agent_chain(above, event.agent))
        self._store(event, event.sub_agent_started.input)

    def _sub_agent_completed(self, event: event_pb2.AgentEvent) -> None:
        self._store(event, event.sub_agent_completed.output)
        self._asks_no_more(event)

    def _asks_no_more(self, event: event_pb2.AgentEvent) -> None:
        """Closes what is asked by who ends; in most runs nobody asks anything."""
        if self._standing.asks:
            self._standing.take(event)

    def _llm_started(self, event: event_pb2.AgentEvent) -> None:
        self._models[event.effect_key] = event.llm_started.model

    def _llm_retrying(self, event: event_pb2.AgentEvent) -> None:
        self._charge(event, event.llm_retrying.lost_usage)
        if event.llm_retrying.next_model:
            self._models[event.effect_key] = event.llm_retrying.next_model

    def _llm_completed(self, event: event_pb2.AgentEvent) -> None:
        response = event.llm_completed.response
        self._charge(event, response.usage)
        self._models.pop(event.effect_key, None)
        if self._store(event, response.message):
            self._stored_calls.update(
                (event.invocation_id, part.tool_call.call_id)
                for part in response.message.parts
                if part.HasField("tool_call")
            )

    def _llm_failed(self, event: event_pb2.AgentEvent) -> None:
        self._charge(event, event.llm_failed.lost_usage)
        self._models.pop(event.effect_key, None)

    def _history_compacted(self, event: event_pb2.AgentEvent) -> None:
        self._store(event, event.history_compacted.summary)

    def _tool_completed(self, event: event_pb2.AgentEvent) -> None:
        self._answer(event, event.tool_completed.result)
        self._asks_no_more(event)
        if event.tool_completed.state_delta:
            self._change_state(event)

    def _change_state(self, event: event_pb2.AgentEvent) -> None:
        self._is_state_new = self._state.take(event) or self._is_state_new

    def _tool_failed(self, event: event_pb2.AgentEvent) -> None:
        self._answer(event, event.tool_failed.result)
        self._asks_no_more(event)

    def _run_completed(self, event: event_pb2.AgentEvent) -> None:
        self._store(event, event.run_completed.final_answer)
        self._run_ended(event, event.run_completed)

    def _run_failed(self, event: event_pb2.AgentEvent) -> None:
        self._run_ended(event, event.run_failed)

    def _run_cancelled(self, event: event_pb2.AgentEvent) -> None:
        self._run_ended(event, event.run_cancelled)

    def _run_ended(
        self, event: event_pb2.AgentEvent, end: event_pb2.RunCompleted | event_pb2.RunFailed | event_pb2.RunCancelled
    ) -> None:
        error = None if isinstance(end, event_pb2.RunCompleted) or not end.HasField("error") else end.error
        self._end = RunEnd(
            state=_STATES[events.kind_of(event)],
            end_time_ns=event.time.ToNanoseconds(),
            error=None if error is None else error.SerializeToString(deterministic=True),
            tree_usage=end.tree_usage.SerializeToString(deterministic=True) if end.HasField("tree_usage") else None,
        )

    def _answer(self, event: event_pb2.AgentEvent, result: message_pb2.ToolResult) -> None:
        """Stores an ordinary tool's result where the message that called for it is stored."""
        call = (event.invocation_id, result.call.call_id)
        if result.child_invocation_id or not event.effect_key or call not in self._stored_calls:
            return
        self._stored_calls.discard(call)
        message = message_pb2.Message(
            message_id=ids.message_id(self._key_root, event.effect_key, "TOOL"),
            role=message_pb2.ROLE_TOOL,
            kind=message_pb2.MESSAGE_KIND_TOOL,
            author=result.agent,
            parts=[message_pb2.Part(tool_result=result)],
            invocation_id=event.invocation_id,
        )
        self._store(event, message)

    def _store(self, event: event_pb2.AgentEvent, message: message_pb2.Message) -> bool:
        if message.kind == message_pb2.MESSAGE_KIND_UNSPECIFIED:
            return False
        self._position += 1
        stored = message_pb2.Message()
        stored.CopyFrom(message)
        stored.position = self._position
        if not stored.HasField("create_time"):
            stored.create_time.CopyFrom(event.time)
        agent, chain = self._chains.get(event.invocation_id, (event.agent, ""))
        self._messages.append(StoredMessage(message=stored, run_id=self._address.run_id, agent=agent, chain=chain))
        return True

    def _place_waiting(self) -> None:
        """Gives the message that waited for it the next place."""
        if self._waiting is not None:
            self._position += 1
            message = message_pb2.Message()
            message.CopyFrom(self._waiting.message)
            message.position = self._position
            self._messages.append(replace(self._waiting, message=message))
            self._waiting = None

    def _charge(self, event: event_pb2.AgentEvent, usage: message_pb2.Usage) -> None:
        if not is_reported(usage):
            return
        entry = message_pb2.Usage()
        entry.CopyFrom(usage)
        self._usage.append(
            UsageEntry(
                run_id=self._address.run_id,
                sequence=event.sequence,
                tenant_id=self._address.tenant_id,
                user_id=self._address.user_id,
                session_id=self._address.session_id,
                agent=event.agent,
                invocation_id=event.invocation_id,
                model=self._models.get(event.effect_key, ""),
                time_ns=event.time.ToNanoseconds(),
                usage=entry,
            )
        )


_FOLDS: Final = {
    events.RUN_STARTED: RunFold._run_started,
    events.RUN_QUEUED: RunFold._run_queued,
    events.RUN_DEQUEUED: RunFold._run_dequeued,
    events.RUN_FORKED: RunFold._run_forked,
    events.RUN_RESUMED: RunFold._stand,
    events.RUN_INTERRUPTED: RunFold._stand,
    events.CANCEL_REQUESTED: RunFold._stand,
    events.INPUT_REQUESTED: RunFold._stand,
    events.INPUT_RECEIVED: RunFold._stand,
    events.SUB_AGENT_STARTED: RunFold._sub_agent_started,
    events.SUB_AGENT_COMPLETED: RunFold._sub_agent_completed,
    events.SUB_AGENT_FAILED: RunFold._asks_no_more,
    events.LLM_STARTED: RunFold._llm_started,
    events.LLM_RETRYING: RunFold._llm_retrying,
    events.LLM_COMPLETED: RunFold._llm_completed,
    events.LLM_FAILED: RunFold._llm_failed,
    events.HISTORY_COMPACTED: RunFold._history_compacted,
    events.TOOL_COMPLETED: RunFold._tool_completed,
    events.TOOL_FAILED: RunFold._tool_failed,
    events.STATE_CHANGED: RunFold._change_state,
    events.RUN_COMPLETED: RunFold._run_completed,
    events.RUN_FAILED: RunFold._run_failed,
    events.RUN_CANCELLED: RunFold._run_cancelled,
}


def of_fork(origin: RunStart, forked: event_pb2.RunForked) -> RunStart:
    """What a fork's row takes from its beginning: its origin's, but for what it says itself."""
    revisions = (*origin.revisions, *(named.revision for named in forked.definitions))
    return RunStart(
        agent=origin.agent,
        labels=dict(forked.labels) or origin.labels,
        start_time_ns=origin.start_time_ns,
        request_id=forked.request_id,
        request_digest=forked.request_digest,
        revisions=tuple(dict.fromkeys(revisions)),
        origin_run_id=forked.origin_run_id,
        origin_sequence=forked.origin_sequence,
    )


def said_instead(said: StoredMessage, instead: message_pb2.Message, time: Timestamp) -> StoredMessage:
    """The user's message with other content: whose it is and what it is of stay."""
    message = message_pb2.Message()
    message.CopyFrom(said.message)
    message.ClearField("parts")
    message.parts.extend(instead.parts)
    message.create_time.CopyFrom(time)
    return replace(said, message=message)
