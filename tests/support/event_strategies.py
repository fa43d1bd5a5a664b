"""Strategies for events from any system: invocations with links of any kind that say anything, in any order."""

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from bough.v1 import event_pb2, fork_pb2, input_pb2, message_pb2, step_pb2, usage_pb2
from tests.support.logs import AgentEvent, numbered, says

IDS = ("R", "a", "b", "c", "d", "e")
PAYLOADS = tuple(field.name for field in AgentEvent.DESCRIPTOR.oneofs_by_name["payload"].fields)

Story = Mapping[str, Sequence[AgentEvent]]
"""What each invocation says, in its own order."""


def named(payload: str) -> AgentEvent:
    """An event with an empty payload."""
    event = AgentEvent()
    getattr(event, payload).SetInParent()
    return event


def used(tokens: int | None) -> AgentEvent:
    """A model's answer."""
    reported = usage_pb2.Usage(input_tokens=tokens, cost_nanos=tokens, currency_code="USD" if tokens else "")
    return AgentEvent(llm_completed=event_pb2.LlmCompleted(response=step_pb2.LlmResponse(usage=reported)))


def ended(tokens: int | None) -> AgentEvent:
    """A sub-agent's end."""
    spent = usage_pb2.Usage(output_tokens=tokens, model_calls=2)
    return AgentEvent(sub_agent_completed=event_pb2.SubAgentCompleted(usage=spent, output=says("done")))


def called(call_id: str, attempt: int = 0) -> AgentEvent:
    """A tool's start."""
    call = message_pb2.ToolCall(call_id=call_id, name="t")
    return AgentEvent(attempt=attempt, tool_started=event_pb2.ToolStarted(call=call))


def gave(call_id: str) -> AgentEvent:
    """A tool's end."""
    result = message_pb2.ToolResult(call=message_pb2.ToolCall(call_id=call_id, name="t"))
    return AgentEvent(tool_completed=event_pb2.ToolCompleted(result=result))


def request(request_id: str, call_id: str, invocation_id: str = "") -> input_pb2.InputRequest:
    """A request, about a call or a question."""
    return input_pb2.InputRequest(input_id=request_id, call_id=call_id, invocation_id=invocation_id)


def asked(request_id: str, call_id: str) -> AgentEvent:
    """A request as it is made."""
    return AgentEvent(input_requested=event_pb2.InputRequested(request=request(request_id, call_id)))


def answered(request_id: str) -> AgentEvent:
    """The answer to a request."""
    return AgentEvent(input_received=event_pb2.InputReceived(answer=input_pb2.InputAnswer(input_id=request_id)))


def waiting(requests: Sequence[input_pb2.InputRequest]) -> AgentEvent:
    """An interruption that names these requests."""
    return AgentEvent(run_interrupted=event_pb2.RunInterrupted(requests=requests))


def forked(label: str, agent: str) -> AgentEvent:
    """A fork that changes something."""
    payload = event_pb2.RunForked(
        origin=fork_pb2.ForkOrigin(run_id="origin"),
        changes=fork_pb2.ForkChanges(input=says(label)),
        labels={"label": label} if label else {},
        definition_refs=[event_pb2.DefinitionRef(name=agent, revision=label)],
    )
    return AgentEvent(run_forked=payload)


TOKENS = st.none() | st.integers(0, 50)
CALL_IDS = st.sampled_from(("", "1", "2"))
REQUEST_IDS = st.sampled_from(("", "p", "q"))
REQUESTS = st.builds(request, REQUEST_IDS, CALL_IDS, st.sampled_from(("", "absent", *IDS)))
TOLD = st.one_of(
    st.sampled_from(("", *PAYLOADS)).map(lambda payload: named(payload) if payload else AgentEvent()),
    TOKENS.map(used),
    TOKENS.map(ended),
    st.builds(called, CALL_IDS, st.integers(0, 3)),
    CALL_IDS.map(gave),
    st.builds(asked, REQUEST_IDS, CALL_IDS),
    REQUEST_IDS.map(answered),
    st.lists(REQUESTS, max_size=3).map(waiting),
    st.builds(forked, st.sampled_from(("", "x", "y")), st.sampled_from(IDS)),
)
"""What an event may say, without where it stands."""


@st.composite
def events_of(draw: st.DrawFn, invocation_id: str, parents: Sequence[str]) -> list[AgentEvent]:
    """What one invocation says, in its own order; any of its events may name a parent, and not always the same."""
    told = []
    for payload in draw(st.lists(TOLD, min_size=1, max_size=5)):
        event = AgentEvent(
            invocation_id=invocation_id,
            parent_invocation_id=draw(st.sampled_from(("", *parents))),
            branch=draw(st.sampled_from(("", f"r/{invocation_id}"))),
            agent=draw(st.sampled_from(("", "user", invocation_id))),
        )
        event.MergeFrom(payload)
        told.append(event)
    return told


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Invocations with links of any kind: to none, to themselves, around in a ring."""
    parents = (*IDS, "absent")
    return {one: draw(events_of(one, parents)) for one in draw(st.permutations(IDS))[: draw(st.integers(1, len(IDS)))]}


@st.composite
def interleavings(draw: st.DrawFn, story: Story) -> list[AgentEvent]:
    """The events of a story in an order that keeps each invocation's own."""
    turns = draw(st.permutations([one for one, told in story.items() for _ in told]))
    ahead = {one: iter(told) for one, told in story.items()}
    return [next(ahead[one]) for one in turns]


@st.composite
def told_logs(draw: st.DrawFn) -> list[AgentEvent]:
    """Events of invocations and of none, in any order."""
    log = draw(interleavings(draw(stories())))
    for payload in draw(st.lists(st.sampled_from(PAYLOADS), max_size=3)):
        log.insert(draw(st.integers(0, len(log))), named(payload))
    return numbered(log)
