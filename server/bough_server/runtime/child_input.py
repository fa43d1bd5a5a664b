"""The input of a child: a message, its caller's input, or what its link builds; the snapshot passed to functions."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from bough.v1 import error_pb2, message_pb2
from bough_server import ids
from bough_server.errors import RunError
from bough_server.functions import InputBuilder, Snapshot, Values
from bough_server.history.rewrite import as_context
from bough_server.log import events
from bough_server.messages import copy_of, text_of
from bough_server.runtime.child_call import Dispatch
from bough_server.runtime.lane import Lane
from bough_server.runtime.running_agent import RunningAgent
from bough_server.runtime.state import LaneState
from bough_server.templates import names_in, render
from bough_server.tools.arguments import parse_arguments
from bough_server.truncation import MAX_TEXT_BYTES, fits


def snapshot_of(
    lane: Lane,
    *,
    message: message_pb2.Message | None = None,
    arguments: Mapping[str, Any] | None = None,
    state: LaneState | None = None,
    iteration: int | None = None,
    facts: Mapping[str, str] | None = None,
) -> Snapshot:
    """Return the snapshot of a lane for a function; default of `state`: the lane's."""
    plan = facts or {}
    return Snapshot(
        agent=lane.running.name,
        state=Values((state or lane.lane_state).values),
        # Copies: operators' functions are meant to be pure, but may change what they are given.
        input=copy_of(lane.running.input),
        user=copy_of(lane.execution.input),
        message=copy_of(message) if message is not None else None,
        arguments=arguments or {},
        iteration=iteration,
        plan=plan.get("plan", ""),
        step=plan.get("step", ""),
        executed_steps=plan.get("executed_steps", ""),
        read_history=lane.visible_history.freeze().messages,
    )


_CONTEXT: Final = "For context: "


def build_child_input(lane: Lane, work: Dispatch) -> message_pb2.Message:
    """Return the input of a child as it is stored in the session.

    Raises RunError BAD_ARGUMENTS, and what the operator's function raises if its link's builder is one.
    """
    execution, caller, name = lane.execution, lane.running, work.link.agent
    given = _build_from_link(lane, work) if work.link.HasField("input") else work.input
    message, invocation_id = message_pb2.Message(), ids.invocation_id(execution.facts.key_root, work.key)
    if given is not None:
        message.CopyFrom(execution.keep_files(given))
        if any(part.WhichOneof("content") in ("tool_call", "tool_result") for part in message.parts):
            raise _refusal(f"The message to {name!r} contains a tool call or a tool result; write it as text.")
    elif work.call is not None:
        message.parts.add(text=parse_call_text(work.call, caller))
    else:
        # Histories contain it already as the caller's input, so it gets no kind and no place in the session.
        message.role, message.author = caller.input.role, caller.input.author
        message.parts.extend(caller.input.parts)
        message.invocation_id = invocation_id
        return message
    if not fits(message):
        raise _refusal(f"The message to {name!r} is too large: a text may have {MAX_TEXT_BYTES // 1024} KiB.")
    message.role, message.kind = message_pb2.ROLE_USER, message_pb2.MESSAGE_KIND_SUB_AGENT_USER
    message.author = work.transfer.by if work.transfer is not None else caller.name
    message.invocation_id = invocation_id
    message.message_id = execution.message_id(work.key, events.SUB_AGENT_STARTED, "SUB_AGENT_USER")
    return message


def parse_call_text(call: message_pb2.ToolCall, caller: RunningAgent) -> str:
    """Return the text of a model's call to a linked agent: its `message`, or all arguments as JSON.

    Raises RunError BAD_ARGUMENTS.
    """
    offer = caller.toolset.offers[call.name]
    arguments = parse_arguments(call.arguments_json, offer.spec.input_schema_json)
    message = arguments.get("message")
    if set(arguments) == {"message"} and isinstance(message, str):
        if not message.strip():
            raise _refusal("`message` must not be empty.")
        return message
    return call.arguments_json


def _refusal(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)


def _build_from_link(lane: Lane, work: Dispatch) -> message_pb2.Message:
    """Return the input that the link's builder makes, or that the log recorded at its start."""
    recorded = lane.execution.journal.recorded.get((work.key, events.SUB_AGENT_STARTED, 0))
    if recorded is not None:
        return recorded.sub_agent_started.input
    message = work.input
    if work.call is not None:  # its arguments are validated even if the builder does not use them
        message = message_pb2.Message(parts=[message_pb2.Part(text=parse_call_text(work.call, lane.running))])
    snapshot = snapshot_of(
        lane,
        message=message,
        arguments=json.loads(work.call.arguments_json or "{}") if work.call is not None else None,
        state=work.state,
        facts=work.facts,
    )
    builder, name = work.link.input, work.link.agent
    if builder.HasField("function"):
        function = lane.running.resolver.functions[builder.function]
        assert isinstance(function, InputBuilder)  # validated when the run started
        built = function.build(snapshot)
    else:
        built = _fill_template(builder.template, snapshot, what=f"The `input` of the link to {name!r}")
    if not any(part.text.strip() or part.data_json or part.HasField("blob") for part in built.parts):
        raise _refusal(f"The input for {name!r} is empty. Change the `input` of its link, or what it is built from.")
    return built


def _fill_template(template: str, snapshot: Snapshot, *, what: str) -> message_pb2.Message:
    """Return a filled template, followed by the files of the messages that it names."""
    messages = {
        "input": snapshot.input,
        "message": snapshot.message or message_pb2.Message(),
        "user": snapshot.user,
    }
    known: dict[str, Callable[[], str]] = {name: partial(text_of, message) for name, message in messages.items()}
    known |= {
        "history": lambda: _render_messages(snapshot.history),
        "plan": lambda: snapshot.plan,
        "step": lambda: snapshot.step,
        "executed_steps": lambda: snapshot.executed_steps,
    }
    built = message_pb2.Message()
    text = render(template, known, snapshot.state, what=what)
    if text:
        built.parts.add(text=text)
    for name in sorted(names_in(template) & messages.keys()):
        built.parts.extend(part for part in messages[name].parts if part.HasField("blob") and part not in built.parts)
    return built


def _render_messages(messages: Iterable[message_pb2.Message]) -> str:
    """Return messages as lines of text that name their authors."""
    lines = []
    for message in messages:
        is_rewritten = message.role == message_pb2.ROLE_USER and not message.kind
        shown = [message] if is_rewritten else as_context(message)
        lines += [text.removeprefix(_CONTEXT) for one in shown if (text := text_of(one))]
    return "\n".join(lines)
