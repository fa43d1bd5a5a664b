"""Runs and events to put into a store; nothing here knows an implementation."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import agent_pb2, event_pb2, message_pb2, usage_pb2
from bough.v1.evaluation_ref_pb2 import EvaluationRef
from bough_server import ids
from bough_server.identity import Principal, WholeTenant
from bough_server.log import events
from bough_server.store.ports.log import AnyLogEvent, EventLog, LogEvent, NewRun, StoredEvent

ANNE: Final = Principal(tenant_id="acme", user_id="anne")
ALL: Final = WholeTenant(tenant_id="acme")
"""All users of Anne's tenant."""

BERT: Final = Principal(tenant_id="other", user_id="bert")

START_NS: Final = 1_700_000_000_000_000_000
SECOND: Final = 1_000_000_000


def record(event: event_pb2.AgentEvent, sequence: int) -> LogEvent:
    """An event at its place in a log, a second after the one before."""
    event.sequence = sequence
    event.record_time.FromNanoseconds(START_NS + sequence * SECOND)
    data = event.SerializeToString(deterministic=True)
    return LogEvent(sequence=sequence, kind=events.kind_of(event), data=data, event=event)


def records(batch: Sequence[event_pb2.AgentEvent], *, after: int) -> list[LogEvent]:
    """Events at consecutive places."""
    return [record(event, sequence) for sequence, event in enumerate(batch, after + 1)]


def text(words: str, kind: str = "UNSPECIFIED") -> message_pb2.Message:
    """A message of one text; stored where it has a kind."""
    return message_pb2.Message(
        kind=message_pb2.MessageKind.Value(f"MESSAGE_KIND_{kind}"), parts=[message_pb2.Part(text=words)]
    )


def delta(words: str = "so ") -> event_pb2.AgentEvent:
    """A piece of a model's answer."""
    return event_pb2.AgentEvent(llm_output_text_delta=event_pb2.LlmOutputTextDelta(text=words))


def completed(answer: message_pb2.Message | None = None) -> event_pb2.AgentEvent:
    """The end of a run that went well."""
    usage = usage_pb2.Usage(input_tokens=3, model_calls=1)
    return event_pb2.AgentEvent(run_completed=event_pb2.RunCompleted(final_answer=answer, tree_usage=usage))


def definition(name: str, revision: str) -> agent_pb2.AgentDefinition:
    """A definition that runs may name; its description is the revision that they name it by."""
    return agent_pb2.AgentDefinition(name=name, description=revision)


def resumed(epoch: int, owner: str = "") -> event_pb2.AgentEvent:
    """The first event of another owner."""
    return event_pb2.AgentEvent(run_resumed=event_pb2.RunResumed(epoch=epoch, owner=owner))


@dataclass(kw_only=True)
class Made:
    """A run of which a test appends the rest."""

    number: int = 1
    principal: Principal = ANNE
    session_number: int = 0
    """The session it continues; 0 for a new one."""
    session_cut: int = 0
    state_json: str = ""
    """The session's state that it begins with."""
    request_id: str = ""
    request_digest: str = ""
    owner: str = ""
    agent: str = "lead"
    labels: dict[str, str] = field(default_factory=dict)
    definitions: Sequence[agent_pb2.AgentDefinition] = ()
    question: message_pb2.Message | None = None
    is_queued: bool = False
    evaluation: EvaluationRef | None = None
    last_sequence: int = 0

    def __post_init__(self) -> None:
        self.last_sequence = self.last_sequence or len(self.first())

    @property
    def run_id(self) -> str:
        """The run's id; a later number is a later id."""
        return f"01890000-0000-7000-8000-{self.number:012d}"

    @property
    def session_id(self) -> str:
        """The session's id."""
        return session_id(self.session_number or self.number)

    @property
    def create_time_ns(self) -> int:
        """When it was made: a later number is a later time."""
        return START_NS + self.number * 60 * SECOND

    def started(self) -> event_pb2.AgentEvent:
        """The first event."""
        return event_pb2.AgentEvent(
            invocation_id=self.run_id,
            agent=self.agent,
            branch=self.agent,
            run_started=event_pb2.RunStarted(
                invocation_id=self.run_id,
                key_root=self.run_id,
                agent=self.agent,
                input=self.question,
                labels=self.labels,
                session_cut=self.session_cut,
                state_json=self.state_json,
                request_id=self.request_id,
                request_digest=self.request_digest,
                evaluation=self.evaluation,
                definition_refs=[
                    event_pb2.DefinitionRef(name=named.name, revision=named.description) for named in self.definitions
                ],
            ),
        )

    def first(self) -> list[LogEvent]:
        """What the run is accepted with."""
        queued = event_pb2.AgentEvent(invocation_id=self.run_id, agent=self.agent, run_queued=event_pb2.RunQueued())
        return records([self.started(), queued] if self.is_queued else [self.started()], after=0)

    def new(self) -> NewRun:
        """The run as a log is asked to accept it."""
        return NewRun(
            run_id=self.run_id,
            principal=self.principal,
            session_id=self.session_id,
            new_session=not self.session_number,
            session_position=self.session_cut,
            state_json=self.state_json,
            request_id=self.request_id,
            request_digest=self.request_digest,
            create_time_ns=self.create_time_ns,
            first=self.first()[0],
            definitions={one.description: one for one in self.definitions},
            owner=self.owner,
            queued=self.first()[1] if self.is_queued else None,
        )

    def next(self, *batch: event_pb2.AgentEvent) -> list[LogEvent]:
        """The next records of the run; events that name no invocation are its root's."""
        for event in batch:
            if not event.invocation_id:
                of_invocation(event, self, effect=event.effect_key)
        made = records(batch, after=self.last_sequence)
        self.last_sequence += len(made)
        return made


def session_id(number: int) -> str:
    """The id of a session."""
    return f"01890000-0000-7000-9000-{number:012d}"


def of_invocation(event: event_pb2.AgentEvent, run: Made, *, effect: str = "", scope: str = "") -> event_pb2.AgentEvent:
    """An event as the run's root, or the invocation of a scope, makes it."""
    event.invocation_id = ids.invocation_id(run.run_id, scope)
    event.agent = event.agent or run.agent
    event.effect_key = effect
    return event


def as_stored(made: Sequence[AnyLogEvent]) -> list[StoredEvent]:
    """Records as a log gives them back."""
    return [StoredEvent(one.sequence, one.kind, one.data) for one in made]


async def everything(log: EventLog, run_id: str, *, after: int = 0) -> list[StoredEvent]:
    """All that a tail gives until it ends."""
    return [event async for page in log.tail(run_id, after=after) for event in page]


async def next_page(tail: AsyncIterator[Sequence[StoredEvent]]) -> list[StoredEvent]:
    """The next page of a tail."""
    return list(await anext(tail))
