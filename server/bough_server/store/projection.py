"""Project events to messages, usage and the row of their run, also for a forked log.

A message is stored if its event gave it a kind; nothing is decided here.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import event_pb2, execution_pb2, message_pb2, usage_pb2
from bough_server import events, ids
from bough_server.run_state import RunStateFold, deadline_after
from bough_server.session_state import json_of
from bough_server.session_state_fold import StateFold
from bough_server.store.ports import Record, StoredMessage, UsageEntry
from bough_server.store.projected import NOTHING, LogAddress, Projected, RunEnd, RunStart
from bough_server.store.usage_so_far import COUNTED, UsageSoFar
from bough_server.usage import Sums, is_reported

_STATES: Final = {
    events.RUN_COMPLETED: execution_pb2.EXECUTION_STATE_SUCCEEDED,
    events.RUN_FAILED: execution_pb2.EXECUTION_STATE_FAILED,
    events.RUN_CANCELLED: execution_pb2.EXECUTION_STATE_CANCELLED,
}


MAX_EXCERPT: Final = 200
"""The most characters of an excerpt."""

_WORD: Final = re.compile(r"\S+")


def agent_chain(parent: str, name: str) -> str:
    """SHA-256 hex over the agents' names from the root down to `name`; the parent's chain is empty at the root."""
    return hashlib.sha256((f"{parent}/{name}" if parent else name).encode()).hexdigest()


class RunFold:
    """The fold of one run's log: give it every event that is no delta, once and in order."""

    def __init__(self, address: LogAddress) -> None:
        self._address = address
        self._message_root = ""
        """What ids of messages are derived from that no event has."""
        self._position = self._shared_position = self._session_cut = 0
        self._standing = RunStateFold()
        self._used = UsageSoFar()
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
        self._results: list[tuple[StoredMessage, str]] = []
        """Of the messages, those that results of tools made, with the keys of their effects."""
        self._usage: list[UsageEntry] = []

    @property
    def session_cut(self) -> int:
        """The position of the last message that the run found in its session."""
        return self._session_cut

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
            if record.kind in COUNTED:
                self._used.take(record.event, record.kind)
                is_quiet = False
            fold = _FOLDS.get(record.kind)
            if fold is not None:
                fold(self, record.event)
                is_quiet = False
        return NOTHING if is_quiet else self._projected()

    def _projected(self) -> Projected:
        standing, used = self._standing.change(), self._used.change()
        is_said = self._messages or self._usage or self._start or self._end or self._is_state_new
        if not (is_said or standing or used is not None):
            return NOTHING
        projected = Projected(
            start=self._start,
            messages=self._messages,
            usage=self._usage,
            end=self._end,
            standing=standing,
            state_json=self.state_json if self._is_state_new else None,
            tree_usage=used,
            begin_time_ns=self._begin_time_ns,
            shared=self._shared,
        )
        self._start, self._end, self._begin_time_ns = None, None, None
        self._messages, self._usage, self._shared, self._results = [], [], [], []
        self._is_state_new = False
        return projected

    def _run_started(self, event: event_pb2.AgentEvent) -> None:
        started = event.run_started
        self._message_root = started.key_root
        self._position = self._session_cut = started.session_cut
        self._state.take(event)
        self._chains[event.invocation_id] = (started.agent, agent_chain("", started.agent))
        self._standing.begin(event)
        self._start = self._begun = RunStart(
            agent=started.agent,
            labels=dict(started.labels),
            input_excerpt=excerpt_of(started.input),
            start_time_ns=event.record_time.ToNanoseconds(),
            deadline_time_ns=deadline_after(event, None),
            request_id=started.request_id,
            request_digest=started.request_digest,
            revisions=tuple(dict.fromkeys(named.revision for named in started.definition_refs)),
        )
        self._store(event, started.input)

    def _run_queued(self, event: event_pb2.AgentEvent) -> None:
        """Takes back the user's message: it has no place until the run has its session."""
        self._standing.take(event)
        self._waiting = self._messages.pop() if self._messages else None
        self._position = self._session_cut = 0

    def _run_dequeued(self, event: event_pb2.AgentEvent) -> None:
        self._standing.take(event)
        self._position = self._session_cut = event.run_dequeued.session_cut
        self._begin_time_ns = event.record_time.ToNanoseconds()
        self._state.take(event)
        self._place_waiting()

    def _run_forked(self, event: event_pb2.AgentEvent) -> None:
        """Leaves to the origin what its part of the log adds; the messages of the run so far are the fork's as well."""
        forked = event.run_forked
        assert self._begun is not None, "a log begins with run_started"
        self._standing.take(event)
        is_fork_of_a_fork = bool(self._begun.origin_run_id)
        self._start = self._begun = of_fork(self._begun, forked)
        if is_fork_of_a_fork:  # whose own messages are named after it: which run it is, is said only here
            for stored, effect_key in self._results:
                stored.message.message_id = ids.message_id(forked.origin.run_id, effect_key, "TOOL")
        self._shared += self._messages
        if forked.changes.HasField("input") and self._shared:
            self._waiting = said_instead(self._shared[0], forked.changes.input, event.record_time)
            self._position = self._shared[0].message.position - 1
            self._shared = []
        self._messages, self._usage, self._results, self._begin_time_ns = [], [], [], None
        self._message_root = self._address.run_id
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
        if event.tool_completed.state_changes:
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
            end_time_ns=event.record_time.ToNanoseconds(),
            error=None if error is None else error.SerializeToString(deterministic=True),
            tree_usage=end.tree_usage.SerializeToString(deterministic=True)
            if end.HasField("tree_usage")
            else self._used.serialized(),
        )

    def _answer(self, event: event_pb2.AgentEvent, result: message_pb2.ToolResult) -> None:
        """Stores an ordinary tool's result where the message that called for it is stored."""
        call = (event.invocation_id, result.call.call_id)
        if result.child_invocation_id or not event.effect_key or call not in self._stored_calls:
            return
        self._stored_calls.discard(call)
        message = message_pb2.Message(
            message_id=ids.message_id(self._message_root, event.effect_key, "TOOL"),
            role=message_pb2.ROLE_TOOL,
            kind=message_pb2.MESSAGE_KIND_TOOL,
            author=result.agent,
            parts=[message_pb2.Part(tool_result=result)],
            invocation_id=event.invocation_id,
        )
        if self._store(event, message):
            self._results.append((self._messages[-1], event.effect_key))

    def _store(self, event: event_pb2.AgentEvent, message: message_pb2.Message) -> bool:
        if message.kind == message_pb2.MESSAGE_KIND_UNSPECIFIED:
            return False
        self._position += 1
        stored = message_pb2.Message()
        stored.CopyFrom(message)
        stored.position = self._position
        if not stored.HasField("create_time"):
            stored.create_time.CopyFrom(event.record_time)
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

    def _charge(self, event: event_pb2.AgentEvent, usage: usage_pb2.Usage) -> None:
        if not is_reported(usage):
            return
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
                time_ns=event.record_time.ToNanoseconds(),
                usage=Sums.of_attempt(usage).usage(),
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
    events.SESSION_STATE_CHANGED: RunFold._change_state,
    events.RUN_COMPLETED: RunFold._run_completed,
    events.RUN_FAILED: RunFold._run_failed,
    events.RUN_CANCELLED: RunFold._run_cancelled,
}


def excerpt_of(said: message_pb2.Message) -> str:
    """The beginning of a message's text, with one space for each run of white space."""
    words = (found.group()[:MAX_EXCERPT] for part in said.parts for found in _WORD.finditer(part.text))
    return " ".join(islice(words, MAX_EXCERPT))[:MAX_EXCERPT].rstrip()


def of_fork(origin: RunStart, forked: event_pb2.RunForked) -> RunStart:
    """What a fork's row takes from its beginning: its origin's, but for what it says itself."""
    revisions = (*origin.revisions, *(named.revision for named in forked.definition_refs))
    return replace(
        origin,
        labels=dict(forked.labels) or origin.labels,
        input_excerpt=excerpt_of(forked.changes.input) if forked.changes.HasField("input") else origin.input_excerpt,
        request_id=forked.request_id,
        request_digest=forked.request_digest,
        revisions=tuple(dict.fromkeys(revisions)),
        origin_run_id=forked.origin.run_id,
        origin_sequence=forked.origin.sequence,
    )


def said_instead(said: StoredMessage, instead: message_pb2.Message, time: Timestamp) -> StoredMessage:
    """The user's message with other content, which is another message: whose it is and what it is of stay."""
    message = message_pb2.Message()
    message.CopyFrom(said.message)
    message.ClearField("parts")
    message.parts.extend(instead.parts)
    message.message_id, message.metadata_json = instead.message_id, instead.metadata_json
    message.create_time.CopyFrom(time)
    return replace(said, message=message)
