"""Records of runs for tests of metrics, in few words."""

import json
from collections.abc import Sequence

from google.protobuf import timestamp_pb2

from bough.v1 import eval_set_pb2, execution_pb2, usage_pb2
from bough.v1.eval_set_pb2 import EvalCase, EvalMetric, EvalTurn, ExpectedTool, ToolTrajectoryMetric, TrajectoryMode
from bough.v1.invocation_pb2 import AgentInvocation, Invocation, InvocationOptions, ToolInvocation
from bough.v1.message_pb2 import Message, Part
from bough_server.evals.metrics.turn import Turn

SUCCEEDED = execution_pb2.EXECUTION_STATE_SUCCEEDED
FAILED = execution_pb2.EXECUTION_STATE_FAILED

_MOST = 2**31 - 1
WHOLE = InvocationOptions(
    max_agents=_MOST, max_tools=_MOST, max_tool_args_bytes=_MOST, max_tool_result_bytes=_MOST, max_bytes=_MOST
)
"""The options of a record that is judged: without the limits of an answer."""


def said(text: str) -> Message:
    """A message of one text."""
    return Message(parts=[Part(text=text)])


def did(
    name: str, arguments: object = None, result: object = None, *, agent: str = "lead", edited: object = None
) -> ToolInvocation:
    """A call that succeeded; `edited` are those that an approver put in place of the arguments."""
    return ToolInvocation(
        name=name,
        agent=agent,
        arguments_json="" if arguments is None else json.dumps(arguments),
        executed_arguments_json="" if edited is None else json.dumps(edited),
        result_json=json.dumps(result),
        state=SUCCEEDED,
    )


def in_order(*calls: ToolInvocation) -> list[ToolInvocation]:
    """The calls with rising sequences, but listed in another order."""
    for sequence, call in enumerate(calls, start=1):
        call.sequence = sequence
    return [*calls[1::2], *calls[::2]]


def node(
    name: str, depth: int = 0, parent: str = "", *, seconds: tuple[int, int] | None = None, answer: str | None = None
) -> AgentInvocation:
    """An agent of a tree; its invocation id is its name."""
    made = AgentInvocation(invocation_id=name, name=name, depth=depth, parent_invocation_id=parent, state=SUCCEEDED)
    if seconds is not None:
        made.start_time.CopyFrom(timestamp_pb2.Timestamp(seconds=seconds[0]))
        made.end_time.CopyFrom(timestamp_pb2.Timestamp(seconds=seconds[1]))
    if answer is not None:
        made.output.CopyFrom(said(answer))
    return made


def record(
    *calls: ToolInvocation,
    agents: Sequence[AgentInvocation] = (),
    answer: str | None = "Done.",
    usage: usage_pb2.Usage | None = None,
    seconds: tuple[int, int] = (0, 1),
) -> Invocation:
    """The record of a run that succeeded."""
    return Invocation(
        agents=agents,
        agents_total=len(agents),
        tools=in_order(*calls),
        tools_total=len(calls),
        state=SUCCEEDED,
        complete=True,
        final_response=None if answer is None else said(answer),
        tree_usage=usage,
        start_time=timestamp_pb2.Timestamp(seconds=seconds[0]),
        end_time=timestamp_pb2.Timestamp(seconds=seconds[1]),
    )


def wants(name: str, **matchers: object) -> ExpectedTool:
    """A call that is expected."""
    return ExpectedTool(name=name, **matchers)  # type: ignore[arg-type]


def trajectory(
    mode: TrajectoryMode.ValueType = eval_set_pb2.TRAJECTORY_MODE_UNSPECIFIED, *, agent: str = "", name: str = ""
) -> EvalMetric:
    """A tool_trajectory metric."""
    return EvalMetric(name=name, tool_trajectory=ToolTrajectoryMetric(mode=mode, agent=agent))


def case_of(*expectations: eval_set_pb2.EvalExpectation | None, metrics: Sequence[EvalMetric] = ()) -> EvalCase:
    """A case with one turn for each expectation."""
    return EvalCase(id="one", turns=[EvalTurn(user="Do it.", expect=each) for each in expectations], metrics=metrics)


def turns_of(case: EvalCase, *invocations: Invocation) -> list[Turn]:
    """The turns of a trial."""
    return [
        Turn(index=index, expect=turn.expect if turn.HasField("expect") else None, invocation=invocation)
        for index, (turn, invocation) in enumerate(zip(case.turns, invocations, strict=True))
    ]
