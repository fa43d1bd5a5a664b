"""Built-in tools: their names, specs and results, and the actions that they request of the calling agent.

They change nothing but session state; carrying out an action is up to the calling agent.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from bough.v1 import action_pb2, error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.log.session_state import KEY, json_of, values_of
from bough_server.models.model import ToolSpec

FINAL_ANSWER: Final = "final_answer"
"""Name of the tool whose argument is the final answer."""
PLAN: Final = "plan"
"""Name of the tool that lists the remaining steps; plan_execute agents add it, definitions do not name it."""
RESPOND: Final = "respond"
"""Name of the tool that answers instead of planning again; plan_execute agents add it, definitions do not name it."""
EXIT: Final = "exit"
"""Name of the tool that ends the work with a final result."""
TRANSFER: Final = "transfer_to_agent"
"""Name of the tool that transfers to another agent; created from links, definitions do not name it."""
BREAK_LOOP: Final = "break_loop"
"""Name of the tool that ends the nearest loop."""
GET_STATE: Final = "get_state"
"""Name of the tool that reads session state."""
SET_STATE: Final = "set_state"
"""Name of the tool that sets or deletes a value of session state."""


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
    description="Lists what is left to do, step by step, in order. The steps are done one after another.",
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
        description="Ends everything with a final answer. No agent after you runs.",
        input_schema_json=_schema(
            final_answer={"type": "string", "minLength": 1, "description": "The whole final answer."}
        ),
    ),
    BREAK_LOOP: ToolSpec(
        name=BREAK_LOOP,
        description="Ends the loop that you are in: the work is good enough.",
        input_schema_json=_schema(),
    ),
    GET_STATE: ToolSpec(
        name=GET_STATE,
        description="Returns a value that was kept for this conversation, as JSON; without a key all of them, by name.",
        input_schema_json=_schema((), key={"type": "string", "description": "The value's name."}),
    ),
    SET_STATE: ToolSpec(
        name=SET_STATE,
        description="Keeps a value for the rest of this conversation, for you and other agents; null deletes it.",
        input_schema_json=_schema(
            key={"type": "string", "pattern": f"^{KEY}$", "description": "The value's name."},
            value={"description": "The value: anything that JSON can hold."},
        ),
    ),
}
"""The tools that a definition may list among its own, by name."""

ACTIONS: Final = frozenset({TRANSFER, EXIT, BREAK_LOOP})
"""The tools that request an action of the calling agent; one answer of a model may call only one of them."""

OF_STATE: Final = frozenset({GET_STATE, SET_STATE})
"""The tools that read and write the session's state."""

RESERVED: Final = frozenset({FINAL_ANSWER, PLAN, RESPOND, TRANSFER, *SPECS})
"""The names of all built-in tools, which tools of the operator may not have."""


def transfer_spec(targets: Mapping[str, str]) -> ToolSpec:
    """Return the tool that transfers to one of `targets`: agent names with their descriptions."""
    choices = "".join(f"\n- {name}: {description}" for name, description in targets.items())
    schema = _schema(
        ["agent_name"],
        agent_name={"type": "string", "enum": list(targets), "description": "The agent that is to continue."},
        message={"type": "string", "description": "A message for it. It sees the conversation in any case."},
    )
    return ToolSpec(
        name=TRANSFER,
        description=f"Transfers the conversation to another agent, which answers in your place.{choices}",
        input_schema_json=schema,
    )


class WritableState(Protocol):
    """Session state, as JSON text by name."""

    def texts(self) -> Mapping[str, str]:
        """Return all values."""
        ...

    def keep_text(self, key: str, text: str) -> None:
        """Set a value. Raises RunError BAD_ARGUMENTS if session state cannot hold it."""
        ...

    def __delitem__(self, key: str) -> None:
        """Delete a value. Raises KeyError if there is none."""
        ...


def answer(call: message_pb2.ToolCall, state: WritableState) -> message_pb2.Part:
    """Return the result of a call whose arguments match the tool's schema. Raises RunError BAD_ARGUMENTS."""
    arguments = json.loads(call.arguments_json or "{}")
    if call.name == GET_STATE:
        return message_pb2.Part(data_json=_read(state.texts(), arguments.get("key")))
    if call.name == SET_STATE:
        _write(state, arguments["key"], values_of(call.arguments_json)["value"])
        return message_pb2.Part(text="Kept.")
    return message_pb2.Part(text=_result_text(call, arguments))


def _read(texts: Mapping[str, str], key: str | None) -> str:
    if key is None:
        return json_of(texts) or "{}"
    if key in texts:
        return texts[key]
    known = f"There are: {', '.join(sorted(texts))}." if texts else "There are none."
    raise RunError(f"There is no value {key!r}. {known}", reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)


def _write(state: WritableState, key: str, text: str) -> None:
    """Set a value to the JSON text exactly as the model wrote it; null deletes it."""
    if text != "null":
        state.keep_text(key, text)
    elif key in state.texts():
        del state[key]


def _result_text(call: message_pb2.ToolCall, arguments: Mapping[str, Any]) -> str:
    if call.name in (FINAL_ANSWER, RESPOND):
        return str(arguments["answer"])
    if call.name == PLAN:
        return "Planned."
    if call.name == EXIT:
        return str(arguments["final_answer"])
    if call.name == TRANSFER:
        return f"Transferred to {arguments['agent_name']}."
    return "The loop ends here."


def closing_output(result: message_pb2.ToolResult) -> message_pb2.Message:
    """Return the output of an agent that ended with this call: the arguments of a plan, the text of an answer.

    A fork may have edited the result: JSON in the result of a plan replaces the plan.
    """
    if result.call.name != PLAN:
        return message_pb2.Message(parts=result.parts)
    edited = [part for part in result.parts if part.HasField("data_json")]
    return message_pb2.Message(parts=edited[:1] or [message_pb2.Part(data_json=result.call.arguments_json)])


def action_of(result: message_pb2.ToolResult) -> action_pb2.AgentAction | None:
    """Return the action that a call requests of its caller; None for a failed call and for other tools."""
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
    """Return why a transfer has no valid target, as a message for the model; empty if it has one."""
    try:
        arguments = json.loads(call.arguments_json)
    except ValueError:
        return ""  # validation against the schema reports this better
    name = arguments.get("agent_name") if isinstance(arguments, dict) else None
    if not isinstance(name, str) or name in targets:
        return ""
    return f"There is no agent {name!r} to transfer to. There are: {', '.join(targets)}."
