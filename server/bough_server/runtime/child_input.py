"""The input of a child whose link has a template or an input builder, and the snapshot that functions are given."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from bough.v1 import error_pb2, message_pb2
from bough_server import events
from bough_server.errors import RunError
from bough_server.functions import InputBuilder, Snapshot, Values, copied, text_of
from bough_server.history.rewrite import as_context
from bough_server.runtime.dispatch import Dispatch, said_by
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
    """What is known in a lane of an invocation; `state` are the session's values where they are not the lane's."""
    plan = facts or {}
    return Snapshot(
        agent=lane.frame.name,
        state=Values((state or lane.lane_state).values),
        input=copied(lane.frame.told),
        user=copied(lane.execution.told),
        message=copied(message) if message is not None else None,
        arguments=arguments or {},
        iteration=iteration,
        plan=plan.get("plan", ""),
        step=plan.get("step", ""),
        executed_steps=plan.get("executed_steps", ""),
        look=lane.sight.frozen().messages,
    )


_CONTEXT: Final = "For context: "


def build_child_input(lane: Lane, work: Dispatch) -> Dispatch:
    """The same dispatch with what its link's builder makes, which is taken from the log where that holds its start.

    Raises RunError: BAD_ARGUMENTS where a template names a value that is not there or nothing is left to say, and what
    the operator's function raises.
    """
    if not work.link.HasField("input"):
        return work
    recorded = lane.execution.journal.recorded.get((work.key, events.SUB_AGENT_STARTED, 0))
    if recorded is not None:
        return replace(work, input=recorded.sub_agent_started.input)
    told = _told(lane, work)
    if not any(part.text.strip() or part.data_json or part.HasField("blob") for part in told.parts):
        raise RunError(
            f"There is nothing to tell {work.agent!r}: what its link's `input` makes is empty.",
            reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
        )
    return replace(work, input=told)


def _told(lane: Lane, work: Dispatch) -> message_pb2.Message:
    situation = snapshot_of(
        lane,
        message=_message(lane, work),
        arguments=json.loads(work.call.arguments_json or "{}") if work.call is not None else None,
        state=work.state,
        facts=work.facts,
    )
    builder = work.link.input
    if builder.HasField("function"):
        function = lane.frame.resolver.function(builder.function)
        assert isinstance(function, InputBuilder)  # judged when the run began
        return function.built(situation)
    return _filled(builder.template, situation, what=f"The `input` of the link to {work.agent!r}")


def _message(lane: Lane, work: Dispatch) -> message_pb2.Message | None:
    """What the call says; arguments that do not fit are refused whatever the builder does with them."""
    if work.call is None:
        return work.input
    return message_pb2.Message(parts=[message_pb2.Part(text=said_by(work.call, lane.frame))])


def _filled(template: str, situation: Snapshot, *, what: str) -> message_pb2.Message:
    """A template filled in; the files of the messages that it names come after it."""
    messages = {
        "input": situation.input,
        "message": situation.message or message_pb2.Message(),
        "user": situation.user,
    }
    known: dict[str, Callable[[], str]] = {name: partial(text_of, said) for name, said in messages.items()}
    known |= {
        "history": lambda: _as_text(situation.history),
        "plan": lambda: situation.plan,
        "step": lambda: situation.step,
        "executed_steps": lambda: situation.executed_steps,
    }
    told = message_pb2.Message()
    text = render(template, known, situation.state, what=what)
    if text:
        told.parts.add(text=text)
    for name in sorted(names_in(template) & messages.keys()):
        told.parts.extend(part for part in messages[name].parts if part.HasField("blob") and part not in told.parts)
    return told


def _as_text(messages: Iterable[message_pb2.Message]) -> str:
    """Messages as lines of text: who said and did what."""
    lines = []
    for message in messages:
        is_rewritten = message.role == message_pb2.ROLE_USER and not message.kind
        shown = [message] if is_rewritten else as_context(message)
        lines += [text.removeprefix(_CONTEXT) for one in shown if (text := text_of(one))]
    return "\n".join(lines)
