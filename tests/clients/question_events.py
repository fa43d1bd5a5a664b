"""A run with questions, built by hand: its events until it waits, and those after each answer."""

from collections.abc import Sequence

from bough.v1 import event_pb2, fork_pb2, input_pb2
from tests.clients.run_events import AgentEvent, Turn


def question(name: str) -> input_pb2.InputRequest:
    """A question by its name."""
    return input_pb2.InputRequest(input_id=f"ask-{name}", kind=input_pb2.INPUT_KIND_QUESTION, prompt=f"What is {name}?")


def ask(turn: Turn, *names: str) -> None:
    """The run asks."""
    for name in names:
        turn.add("lead", input_requested=event_pb2.InputRequested(request=question(name)))


def wait_for(turn: Turn, *names: str) -> None:
    """The run waits for these answers."""
    turn.add("lead", run_interrupted=event_pb2.RunInterrupted(requests=[question(name) for name in names]))


def hear(turn: Turn, name: str) -> None:
    """The run continues with an answer."""
    turn.add("lead", run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_ANSWER))
    answer = input_pb2.InputAnswer(input_id=f"ask-{name}", value_json=f'"{name}"')
    turn.add("lead", input_received=event_pb2.InputReceived(answer=answer))


def asking() -> list[list[AgentEvent]]:
    """A run that asks for a and b at once, receives a alone, then b, asks for c, receives it, and ends."""
    turn = Turn()
    turn.start()
    turn.model("lead", "Let me ", "ask.")
    ask(turn, "a", "b")
    wait_for(turn, "a", "b")
    ends = [len(turn.events)]
    hear(turn, "a")
    wait_for(turn, "b")
    ends.append(len(turn.events))
    hear(turn, "b")
    turn.model("lead", "And ", "c?", step=1)
    ask(turn, "c")
    wait_for(turn, "c")
    ends.append(len(turn.events))
    hear(turn, "c")
    turn.model("lead", "That ", "is all.", step=2)
    turn.end("That is all.")
    return [turn.events[start:end] for start, end in zip([0, *ends], [*ends, len(turn.events)], strict=True)]


def forked(run_id: str, log: Sequence[AgentEvent], shared: int) -> list[AgentEvent]:
    """The whole log of a fork after a sequence: the shared events under the fork's id, then its own events."""
    turn = Turn(run_id)
    for event in log[:shared]:
        copy = AgentEvent()
        copy.CopyFrom(event)
        copy.run_id = run_id
        turn.events.append(copy)
    origin = fork_pb2.ForkOrigin(run_id=log[0].run_id, sequence=shared)
    turn.add("lead", run_forked=event_pb2.RunForked(origin=origin))
    turn.model("lead", "Other", "wise.", step=3)
    turn.end("Otherwise.")
    return turn.events
