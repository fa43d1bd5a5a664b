"""Mocks of tools, and runs of a case that has them; it runs nothing."""

import json

from bough.v1 import eval_set_pb2, message_pb2
from bough_server.runs.admission import CaseRun

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


def case_of(*mocks: ToolMock, strict: bool = False) -> CaseRun:
    """A run of a case with these mocks."""
    return CaseRun(
        evaluation_id="an-evaluation", case_id="a case", mocks=eval_set_pb2.ToolMocks(tools=mocks, strict=strict)
    )
