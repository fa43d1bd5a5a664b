"""Input of a child whose link has a template or an input builder, and the snapshot passed to functions."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.functions import InputBuilder, Snapshot, Values
from bough_server.history.rewrite import as_context
from bough_server.log import events
from bough_server.messages import copy_of, text_of
from bough_server.runtime.dispatch import Dispatch, parse_call_text
from bough_server.runtime.lane import Lane
from bough_server.runtime.state import LaneState
from bough_server.templates import names_in, render


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


def build_child_input(lane: Lane, work: Dispatch) -> Dispatch:
    """Return the dispatch with the input that its link's builder makes, or that the log recorded at its start.

    Raises RunError BAD_ARGUMENTS if a template names a missing value or the input is empty, and what the operator's
    function raises.
    """
    if not work.link.HasField("input"):
        return work
    recorded = lane.execution.journal.recorded.get((work.key, events.SUB_AGENT_STARTED, 0))
    if recorded is not None:
        return replace(work, input=recorded.sub_agent_started.input)
    built = _build_message(lane, work)
    if not any(part.text.strip() or part.data_json or part.HasField("blob") for part in built.parts):
        raise RunError(
            f"The input for {work.agent!r} is empty. Change the `input` of its link, or what it is built from.",
            reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
        )
    return replace(work, input=built)


def _build_message(lane: Lane, work: Dispatch) -> message_pb2.Message:
    snapshot = snapshot_of(
        lane,
        message=_message(lane, work),
        arguments=json.loads(work.call.arguments_json or "{}") if work.call is not None else None,
        state=work.state,
        facts=work.facts,
    )
    builder = work.link.input
    if builder.HasField("function"):
        function = lane.running.resolver.functions[builder.function]
        assert isinstance(function, InputBuilder)  # validated when the run started
        return function.build(snapshot)
    return _fill_template(builder.template, snapshot, what=f"The `input` of the link to {work.agent!r}")


def _message(lane: Lane, work: Dispatch) -> message_pb2.Message | None:
    """Return the message of the call or dispatch; arguments are validated even if the builder does not use them."""
    if work.call is None:
        return work.input
    return message_pb2.Message(parts=[message_pb2.Part(text=parse_call_text(work.call, lane.running))])


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
