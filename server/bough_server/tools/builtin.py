"""Tools that the server brings itself: what they are called, what they answer, and what they make their caller do.

They touch nothing but the session's values; obeying them is up to the agent that called.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from bough.v1 import action_pb2, error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.models.model import ToolSpec
from bough_server.session_state import KEY, json_of, values_of

FINAL_ANSWER: Final = "final_answer"
"""The name of the tool whose argument is the answer."""
PLAN: Final = "plan"
"""The name of the tool that says what is to be done; plans ask for it, definitions do not name it."""
RESPOND: Final = "respond"
"""The name of the tool that answers instead of planning again; plans ask for it, definitions do not name it."""
EXIT: Final = "exit"
"""The name of the tool that ends the work with a final result."""
TRANSFER: Final = "transfer_to_agent"
"""The name of the tool that hands over to another agent; links make it, definitions do not name it."""
BREAK_LOOP: Final = "break_loop"
"""The name of the tool that ends the nearest loop."""
GET_STATE: Final = "get_state"
"""The name of the tool that reads the session's values."""
SET_STATE: Final = "set_state"
"""The name of the tool that changes one of them."""


def _schema(required: Sequence[str] | None = None, **properties: Mapping[str, object]) -> str:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return json.dumps(schema)


FINAL_ANSWER_SPEC: Final = ToolSpec(
    name=FINAL_ANSWER,
    description="Ends the work with the final answer.",
    input_schema_json=_schema(answer={"type": "string", "minLength": 1, "description": "The whole answer."}),
)

_STEP: Final = {"type": "string", "minLength": 1, "maxLength": 1000, "pattern": r"\S"}

PLAN_SPEC: Final = ToolSpec(
    name=PLAN,
    description="Says what is left to do, step by step, in order. The steps are done one after another.",
    input_schema_json=_schema(
        steps={"type": "array", "items": _STEP, "minItems": 1, "maxItems": 100, "description": "The steps, in order."}
    ),
)

RESPOND_SPEC: Final = ToolSpec(
    name=RESPOND,
    description="Answers the user: all that had to be done is done.",
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
    GET_STATE: ToolSpec(
        name=GET_STATE,
        description="Gives a value that was kept for this conversation, as JSON; without a key all of them, by name.",
        input_schema_json=_schema((), key={"type": "string", "description": "The value's name."}),
    ),
    SET_STATE: ToolSpec(
        name=SET_STATE,
        description="Keeps a value for the rest of this conversation, for you and for others; null deletes it.",
        input_schema_json=_schema(
            key={"type": "string", "pattern": f"^{KEY}$", "description": "The value's name."},
            value={"description": "The value: anything that JSON can hold."},
        ),
    ),
}
"""The tools that a definition may name among its own, by name."""

ACTIONS: Final = frozenset({TRANSFER, EXIT, BREAK_LOOP})
"""The tools that make their caller do something; an answer of a model may take one of them."""

OF_STATE: Final = frozenset({GET_STATE, SET_STATE})
"""The tools that read and write the session's state."""

RESERVED: Final = frozenset({FINAL_ANSWER, PLAN, RESPOND, TRANSFER, *SPECS})
"""The tools that answer without any code of the operator's."""


def transfer_spec(targets: Mapping[str, str]) -> ToolSpec:
    """The tool that hands over to one of these agents: names to descriptions."""
    choices = "".join(f"\n- {name}: {description}" for name, description in targets.items())
    schema = _schema(
        ["agent_name"],
        agent_name={"type": "string", "enum": list(targets), "description": "The agent that is to go on."},
        message={"type": "string", "description": "What to tell it. It sees the conversation in any case."},
    )
    return ToolSpec(
        name=TRANSFER,
        description=f"Hands the conversation over to another agent, which answers in your place.{choices}",
        input_schema_json=schema,
    )


class Values(Protocol):
    """The session's values, as JSON text by name."""

    def texts(self) -> Mapping[str, str]:
        """All of them."""
        ...

    def keep_text(self, key: str, text: str) -> None:
        """Keeps one. Raises RunError BAD_ARGUMENTS for what no state can hold."""
        ...

    def __delitem__(self, key: str) -> None:
        """Deletes one. Raises KeyError for one that is not there."""
        ...


def answer(call: message_pb2.ToolCall, state: Values) -> message_pb2.Part:
    """What a call of one of these tools gives; its arguments fit the tool's schema. Raises RunError BAD_ARGUMENTS."""
    arguments = json.loads(call.arguments_json or "{}")
    if call.name == GET_STATE:
        return message_pb2.Part(data_json=_read(state.texts(), arguments.get("key")))
    if call.name == SET_STATE:
        _write(state, arguments["key"], values_of(call.arguments_json)["value"])
        return message_pb2.Part(text="Kept.")
    return message_pb2.Part(text=_said(call, arguments))


def _read(texts: Mapping[str, str], key: str | None) -> str:
    if key is None:
        return json_of(texts) or "{}"
    if key in texts:
        return texts[key]
    known = f"There are: {', '.join(sorted(texts))}." if texts else "There are none."
    raise RunError(f"There is no value {key!r}. {known}", reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)


def _write(state: Values, key: str, text: str) -> None:
    """A value stays the text that the model wrote it as."""
    if text != "null":
        state.keep_text(key, text)
    elif key in state.texts():
        del state[key]


def _said(call: message_pb2.ToolCall, arguments: Mapping[str, Any]) -> str:
    if call.name in (FINAL_ANSWER, RESPOND):
        return str(arguments["answer"])
    if call.name == PLAN:
        return "Planned."
    if call.name == EXIT:
        return str(arguments["final_result"])
    if call.name == TRANSFER:
        return f"Transferred to {arguments['agent_name']}."
    return "The loop ends here."


def closing_output(result: message_pb2.ToolResult) -> message_pb2.Message:
    """The output of an agent that a call ended: of a plan its arguments, of an answer its text.

    A fork may have edited the result: JSON in that of a plan is the plan.
    """
    if result.call.name != PLAN:
        return message_pb2.Message(parts=result.parts)
    edited = [part for part in result.parts if part.HasField("data_json")]
    return message_pb2.Message(parts=edited[:1] or [message_pb2.Part(data_json=result.call.arguments_json)])


def action_of(result: message_pb2.ToolResult) -> action_pb2.AgentAction | None:
    """What a call makes its caller do; None for a failed one and for any other tool."""
    if result.HasField("error") or result.call.name not in ACTIONS:
        return None
    if result.call.name == TRANSFER:
        return action_pb2.AgentAction(transfer=_transfer(json.loads(result.call.arguments_json)))
    if result.call.name == EXIT:
        return action_pb2.AgentAction(exit=action_pb2.ExitAction(final_answer=message_pb2.Message(parts=result.parts)))
    return action_pb2.AgentAction(break_loop=action_pb2.BreakLoopAction())


def _transfer(arguments: Mapping[str, str]) -> action_pb2.TransferAction:
    transfer = action_pb2.TransferAction(agent=arguments["agent_name"])
    if arguments.get("message", "").strip():
        transfer.message.parts.add(text=arguments["message"])
    return transfer


def target_problem(call: message_pb2.ToolCall, targets: Collection[str]) -> str:
    """What keeps a transfer from having an agent to go to, in words that a model can act on; empty for nothing."""
    try:
        arguments = json.loads(call.arguments_json)
    except ValueError:
        return ""  # the schema says that better
    name = arguments.get("agent_name") if isinstance(arguments, dict) else None
    if not isinstance(name, str) or name in targets:
        return ""
    return f"There is no agent {name!r} to transfer to. There are: {', '.join(targets)}."
