"""A server on loopback with one run that waits for answers, continues when it has them, and can be forked."""

from collections.abc import Sequence

import grpc
from google.protobuf import timestamp_pb2

from bough.v1 import (
    agent_service_pb2,
    event_pb2,
    execution_pb2,
    follow_pb2,
    fork_pb2,
    input_pb2,
    message_pb2,
    run_pb2,
)
from bough_server.log.events import name_of
from tests.clients.run_events import RUN_ID, AgentEvent, Turn, batch_of
from tests.clients.stream_server import LoopbackService

APPROVAL_ID = "6f1c2d3e-0000-5000-8000-00000000aaaa"
QUESTION_ID = "7a2b3c4d-0000-5000-8000-00000000bbbb"
CARD_ID = "8b3c4d5e-0000-5000-8000-00000000cccc"
FORK_ID = "0193d6b4-0000-7000-8000-0000000f0f0f"
_STATES = {
    "run_interrupted": execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
    "run_completed": execution_pb2.EXECUTION_STATE_SUCCEEDED,
    "run_failed": execution_pb2.EXECUTION_STATE_FAILED,
    "run_cancelled": execution_pb2.EXECUTION_STATE_CANCELLED,
}


def approval(arguments: str = '{"amount": 180}') -> input_pb2.InputRequest:
    """An approval request for a refund, which expires at noon and is refused then."""
    return input_pb2.InputRequest(
        input_id=APPROVAL_ID,
        call_id="c2",
        kind=input_pb2.INPUT_KIND_APPROVAL,
        call=message_pb2.ToolCall(call_id="c2", name="refund", arguments_json=arguments),
        prompt="Is that much to be paid?",
        agent_path=["lead", "refunds"],
        expire_time=timestamp_pb2.Timestamp(seconds=1_700_000_000),
        default_answer=input_pb2.InputAnswer(approval=input_pb2.ApprovalDecision(approved=False, note="too late")),
    )


def question(schema: str = '{"type": "string"}') -> input_pb2.InputRequest:
    """A question of an agent's code."""
    return input_pb2.InputRequest(
        input_id=QUESTION_ID,
        kind=input_pb2.INPUT_KIND_QUESTION,
        prompt="Why does it come back?",
        answer_schema_json=schema,
        agent_path=["lead", "interviewer"],
    )


def card(reason: input_pb2.InputKind.ValueType = input_pb2.INPUT_KIND_CLIENT_TOOL) -> input_pb2.InputRequest:
    """A tool that the client runs, or one that was running when its server crashed."""
    return input_pb2.InputRequest(
        input_id=CARD_ID,
        call_id="c1",
        kind=reason,
        call=message_pb2.ToolCall(call_id="c1", name="read_card", arguments_json='{"reader": "counter"}'),
        agent_path=["lead"],
    )


def interrupted(*requests: input_pb2.InputRequest) -> Sequence[AgentEvent]:
    """A run up to the interruption that waits for these."""
    turn = Turn()
    turn.start()
    turn.model("lead", "One moment.")
    for request in requests:
        chain = "/".join(request.agent_path)
        turn.add(chain, input_requested=event_pb2.InputRequested(request=request))
    turn.add("lead", run_interrupted=event_pb2.RunInterrupted(requests=requests))
    return turn.events


class WaitingService(LoopbackService):
    """Streams the run to its interruption. Answers and forks continue it with `rest`."""

    def __init__(self, events: Sequence[AgentEvent], rest: Sequence[AgentEvent] = ()) -> None:
        super().__init__(events, runs=[RUN_ID])
        self.rest = list(rest)
        self.resumed: list[agent_service_pb2.ResumeRunRequest] = []
        self.forked: list[agent_service_pb2.ForkRunRequest] = []
        self.fork: list[AgentEvent] = []

    def events_of(self, run_id: str) -> Sequence[AgentEvent]:
        """The log of the run, or of its fork."""
        return self.fork if run_id == FORK_ID else self.events

    async def WatchRun(self, request, context):
        self.asked.append(request)
        await context.send_initial_metadata((("bough-run-id", request.run_id),))
        for event in self.events_of(request.run_id):
            if event.sequence <= request.after_sequence:
                continue
            if not request.follow.event_names or name_of(event) in request.follow.event_names:
                yield agent_service_pb2.WatchRunResponse(batch=batch_of([event]))
            is_last = event.HasField("run_interrupted") and request.until == follow_pb2.WATCH_UNTIL_INTERRUPTED
            if is_last:
                return

    async def ResumeRun(self, request, context):
        self.resumed.append(request)
        first = len(self.events) + 1
        turn = Turn()
        turn.events = list(self.events)
        turn.add("lead", run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_ANSWER, epoch=2))
        for answer in request.answers:
            received = event_pb2.InputReceived(answer=answer)
            received.answer.source = input_pb2.ANSWER_SOURCE_CALLER
            turn.add("lead", input_received=received)
        self.events = _numbered([*turn.events, *self.rest])
        await context.send_initial_metadata((("bough-run-id", request.run_id),))
        for event in self.events[first - 1 :]:
            yield agent_service_pb2.ResumeRunResponse(batch=batch_of([event]))

    async def ForkRun(self, request, context):
        self.forked.append(request)
        if request.run_id != RUN_ID:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such run.")
        turn = Turn(FORK_ID)
        turn.events = [*self.events[: request.after_sequence]]
        origin = fork_pb2.ForkOrigin(run_id=RUN_ID, sequence=request.after_sequence)
        forked = event_pb2.RunForked(origin=origin, changes=request.changes)
        turn.add("lead", run_forked=forked)
        self.fork = _numbered([*turn.events, *self.rest], FORK_ID)
        await context.send_initial_metadata((("bough-run-id", FORK_ID),))
        for event in self.fork[request.after_sequence :]:
            yield agent_service_pb2.ForkRunResponse(batch=batch_of([event]))

    async def GetRun(self, request, context):
        last = self.events_of(request.run_id)[-1]
        run = run_pb2.Run(
            run_id=request.run_id,
            agent="lead",
            state=_STATES.get(last.WhichOneof("payload"), execution_pb2.EXECUTION_STATE_RUNNING),
            open_requests=last.run_interrupted.requests,
            last_sequence=last.sequence,
        )
        if request.run_id == FORK_ID:
            run.forked_from.CopyFrom(fork_pb2.ForkOrigin(run_id=RUN_ID, sequence=1))
        return agent_service_pb2.GetRunResponse(run=run)


def _numbered(events: Sequence[AgentEvent], run_id: str = RUN_ID) -> list[AgentEvent]:
    numbered = []
    for sequence, event in enumerate(events, start=1):
        copy = AgentEvent()
        copy.CopyFrom(event)
        copy.sequence, copy.run_id = sequence, run_id
        numbered.append(copy)
    return numbered


def ended(text: str = "All done.") -> Sequence[AgentEvent]:
    """The rest of a run that answers."""
    turn = Turn()
    turn.model("lead", text, step=1)
    turn.step_end("lead", text, step=1)
    turn.end(text)
    return turn.events
