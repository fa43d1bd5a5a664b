"""Mocks of tools and faults, and turns of a case that has them; it runs nothing."""

import json
from collections.abc import Sequence

from bough.v1 import eval_set_pb2, evaluation_ref_pb2, message_pb2
from bough_server.runs.admission import EvaluationRun

ToolMock = eval_set_pb2.ToolMock


def mock(name: str, result: object = None, *, agent: str = "", **arguments: object) -> ToolMock:
    """A mock that answers with a JSON value: calls with exactly these arguments, or without any named, all."""
    made = ToolMock(name=name, agent=agent, result_json=json.dumps(result))
    if arguments:
        made.arguments_match.equals_json = json.dumps(arguments)
    return made


def failing(name: str, message: str, *parts: message_pb2.Part, **fields: object) -> ToolMock:
    """A mock that answers with a failure, and with parts beside it."""
    failure = message_pb2.ToolFailure(message=message, **fields)  # type: ignore[arg-type]
    return ToolMock(name=name, outcome=message_pb2.ToolOutcome(parts=parts, failure=failure))


def returning(name: str, *parts: message_pb2.Part) -> ToolMock:
    """A mock that answers with parts."""
    return ToolMock(name=name, outcome=message_pb2.ToolOutcome(parts=parts))


TURN = evaluation_ref_pb2.EvaluationRef(
    evaluation_id="an-evaluation",
    case_id="a case",
    trial=2,
    turn=0,
    role=evaluation_ref_pb2.EVALUATION_ROLE_TURN,
)
"""A turn of a trial."""


def case_of(
    *mocks: ToolMock, strict: bool = False, faults: Sequence[eval_set_pb2.EvalFault] = (), seed: str = ""
) -> EvaluationRun:
    """A turn of a case with these mocks and faults."""
    made = eval_set_pb2.ToolMocks(tools=mocks, strict=strict, faults=faults, fault_seed=seed)
    return EvaluationRun(ref=TURN, mocks=made)
