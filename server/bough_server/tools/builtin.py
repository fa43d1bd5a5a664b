"""Tools that the server brings itself: what they are called, what they answer, and what they make their caller do.

They touch nothing; obeying them is up to the agent that called.
"""

import json
from collections.abc import Mapping
from typing import Final

from bough.v1 import event_pb2, message_pb2
from bough_server.models.model import ToolSpec

FINAL_ANSWER: Final = "final_answer"
"""The name of the tool whose argument is the answer."""
EXIT: Final = "exit"
"""The name of the tool that ends the work with a final result."""
BREAK_LOOP: Final = "break_loop"
"""The name of the tool that ends the nearest loop."""


def _schema(**properties: Mapping[str, object]) -> str:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps(schema)


FINAL_ANSWER_SPEC: Final = ToolSpec(
    name=FINAL_ANSWER,
    description="Ends the work with the final answer.",
    input_schema_json=_schema(answer={"type": "string", "minLength": 1, "description": "The whole answer."}),
)

SPECS: Final[Mapping[str, ToolSpec]] = {
    EXIT: ToolSpec(
        name=EXIT,
        description="Ends everything with a final result. Nobody after you is asked.",
        input_schema_json=_schema(
            final_result={"type": "string", "minLength": 1, "description": "The whole final result."}
        ),
    ),
    BREAK_LOOP: ToolSpec(
        name=BREAK_LOOP,
        description="Ends the loop that you are in: the work is good enough.",
        input_schema_json=_schema(),
    ),
}
"""The tools that a definition may name among its own, by name."""

RESERVED: Final = frozenset({FINAL_ANSWER, *SPECS})
"""Names that no other tool may have."""


def answer(call: message_pb2.ToolCall) -> str:
    """What a call of one of these tools gives; its arguments fit the tool's schema."""
    arguments = json.loads(call.arguments_json or "{}")
    if call.name == FINAL_ANSWER:
        return str(arguments["answer"])
    if call.name == EXIT:
        return str(arguments["final_result"])
    return "The loop ends here."


def action_of(result: message_pb2.ToolResult) -> event_pb2.Action | None:
    """What a call makes its caller do; None for a failed one and for any other tool."""
    if result.HasField("error") or result.call.name not in SPECS:
        return None
    if result.call.name == EXIT:
        return event_pb2.Action(exit=event_pb2.Exit(final_result=message_pb2.Message(parts=result.parts)))
    return event_pb2.Action(break_loop=event_pb2.BreakLoop())
