"""A run's events folded into what is kept beside them: messages, usage entries and the run's row; pure.

It decides nothing about what is worth storing: a message is stored where whoever recorded it gave it a kind.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2, message_pb2
from bough_server import events, ids
from bough_server.store.ports import Record, StoredMessage, UsageEntry
from bough_server.usage import is_reported

_STATES: Final = {
    events.RUN_COMPLETED: event_pb2.STATE_SUCCEEDED,
    events.RUN_FAILED: event_pb2.STATE_FAILED,
    events.RUN_CANCELLED: event_pb2.STATE_CANCELLED,
}


def agent_chain(parent: str, name: str) -> str:
    """SHA-256 hex over the agents' names from the root down to `name`; the parent's chain is empty at the root."""
    return hashlib.sha256((f"{parent}/{name}" if parent else name).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAddress:
    """What a log is of: fixed when its run is accepted, and in no event."""

    run_id: str
    tenant_id: str
    user_id: str
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What the run's row takes from its first event."""

    agent: str
    labels: dict[str, str]
    start_time_ns: int
    request_id: str
    request_digest: str
    revisions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What the run's row takes from its last event; `error` is a serialized AgentError, None where there is none."""

    state: int
    end_time_ns: int
    error: bytes | None
    tree_usage: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """What some events of a run add to what is kept beside them."""

    start: RunStart | None
    messages: Sequence[StoredMessage]
    usage: Sequence[UsageEntry]
    end: RunEnd | None


NOTHING: Final = Projected(start=None, messages=(), usage=(), end=None)


class RunFold:
    """The fold of one run's log: give it every event that is no delta, once and in order."""

    def __init__(self, address: LogAddress) -> None:
        self._address = address
        self._key_root = ""
        self._position = 0
        self._chains: dict[str, tuple[str, str]] = {}
        self._models: dict[str, str] = {}
        self._stored_calls: set[tuple[str, str]] = set()
        self._start: RunStart | None = None
        self._end: RunEnd | None = None
        self._messages: list[StoredMessage] = []
        self._usage: list[UsageEntry] = []

    def project(self, records: Iterable[Record]) -> Projected:
        """What these events add; NOTHING, without looking, for deltas."""
        for record in records:
            fold = _FOLDS.get(record.kind)
            if fold is not None:
                fold(self, record.event)
        if not (self._messages or self._usage or self._start or self._end):
            return NOTHING
        projected = Projected(start=self._start, messages=self._messages, usage=self._usage, end=self._end)
        self._start, self._end, self._messages, self._usage = None, None, [], []
        return projected

    def _run_started(self, event: event_pb2.AgentEvent) -> None:
        started = event.run_started
        self._key_root = started.key_root
        self._position = started.session_cut
        self._chains[event.invocation_id] = (started.agent, agent_chain("", started.agent))
        self._start = RunStart(
            agent=started.agent,
            labels=dict(started.labels),
            start_time_ns=event.time.ToNanoseconds(),
            request_id=started.request_id,
            request_digest=started.request_digest,
            revisions=tuple(dict.fromkeys(named.revision for named in started.definitions)),
        )
        self._store(event, started.input)

    def _sub_agent_started(self, event: event_pb2.AgentEvent) -> None:
        _, above = self._chains.get(event.parent_invocation_id, ("", ""))
        self._chains[event.invocation_id] = (event.agent, agent_chain(above, event.agent))
        self._store(event, event.sub_agent_started.input)

    def _sub_agent_completed(self, event: event_pb2.AgentEvent) -> None:
        self._store(event, event.sub_agent_completed.output)

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

    def _tool_completed(self, event: event_pb2.AgentEvent) -> None:
        self._answer(event, event.tool_completed.result)

    def _tool_failed(self, event: event_pb2.AgentEvent) -> None:
        self._answer(event, event.tool_failed.result)

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
    events.SUB_AGENT_STARTED: RunFold._sub_agent_started,
    events.SUB_AGENT_COMPLETED: RunFold._sub_agent_completed,
    events.LLM_STARTED: RunFold._llm_started,
    events.LLM_RETRYING: RunFold._llm_retrying,
    events.LLM_COMPLETED: RunFold._llm_completed,
    events.LLM_FAILED: RunFold._llm_failed,
    events.TOOL_COMPLETED: RunFold._tool_completed,
    events.TOOL_FAILED: RunFold._tool_failed,
    events.RUN_COMPLETED: RunFold._run_completed,
    events.RUN_FAILED: RunFold._run_failed,
    events.RUN_CANCELLED: RunFold._run_cancelled,
}
