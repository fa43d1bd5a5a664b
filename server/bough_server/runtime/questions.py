"""What a run asks of the outside, put into words and an event: approvals, client-side tools, recovery, questions.

Asking is the execution's; what an answer means to the effect that asked is the effect's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2
from bough_server import ids
from bough_server.errors import RunError
from bough_server.runtime import keys
from bough_server.runtime.frame import Frame
from bough_server.runtime.lane import Lane
from bough_server.tools.arguments import schema_mistakes, value_schema_problem
from bough_server.truncation import MAX_TEXT_BYTES, size_of

NO_DEFAULT: Final = object()
"""The default of a question that fails where nobody answers it in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What is asked: under which effect, why, in which words; `within` is seconds."""

    key: str
    reason: input_pb2.InputReason.ValueType
    prompt: str
    schema_json: str = ""
    digest: str = ""
    call: message_pb2.ToolCall | None = None
    step_index: int | None = None
    within: float | None = None
    default_json: str | None = None


async def ask_outside(lane: Lane, asking: Asking) -> input_pb2.InputAnswer:
    """Asks, and gives the answer, whenever it comes; what the log holds of it is used."""
    execution, frame = lane.execution, lane.frame
    asked = next(
        (event for event in execution.journal.of_effect.get(asking.key, ()) if event.HasField("input_requested")), None
    )
    if asked is None:
        asked = _requested(lane, asking)
    answer = await execution.ask_outside(asked)
    execution.refuse(frame.invocation_id, asking.key)
    return answer


def _requested(lane: Lane, asking: Asking) -> event_pb2.AgentEvent:
    execution, frame = lane.execution, lane.frame
    event = frame.event(asking.key)
    if asking.step_index is not None:
        frame.opened.in_step(event, asking.step_index)
    event.effect_digest = asking.digest
    request = event.input_requested.request
    request.request_id = ids.derived_id(execution.facts.key_root, asking.key)
    request.invocation_id, request.reason, request.prompt = frame.invocation_id, asking.reason, asking.prompt
    request.answer_schema_json = asking.schema_json
    request.address.extend(_address(frame))
    if asking.call is not None:
        request.call_id = asking.call.call_id
        request.call.CopyFrom(asking.call)
    if asking.within is not None:
        request.expire_time.FromNanoseconds(execution.clock.now_ns() + int(asking.within * 1e9))
    if asking.default_json is not None:
        request.default_answer.value_json = asking.default_json
    return event


def _address(frame: Frame) -> list[str]:
    names: list[str] = []
    above: Frame | None = frame
    while above is not None:
        names.append(above.name)
        above = above.parent
    return names[::-1]


async def question(
    lane: Lane, key: str, prompt: str, *, schema: Mapping[str, Any] | None, within: float | None, default: object
) -> str:
    """The answer to a question of an agent's code, as JSON text.

    Raises RunError: BAD_ARGUMENTS where nobody could answer it or the default does not fit, INPUT_EXPIRED.
    """
    execution = lane.execution
    schema_json = json.dumps(schema, allow_nan=False) if schema is not None else ""
    default_json = json.dumps(default, allow_nan=False) if default is not NO_DEFAULT else None
    _check_sizes(prompt, schema_json, default_json)
    if schema is not None and (problem := value_schema_problem(schema)):
        raise _bad(f"The schema of the question {prompt!r} {problem}")
    if schema_json and default_json is not None and (wrong := schema_mistakes(default, schema_json)):
        raise _bad(f"The default of the question {prompt!r} does not fit its schema: {'; '.join(wrong)}.")
    digest = keys.digest("ask", schema_json)
    execution.check(key, digest)
    if key in execution.journal.results:
        recorded = await execution.pump.result(key)
        execution.observe_recorded(key)
        return _value_of(recorded.input_received.answer, prompt)
    await lane.until_live(key)
    execution.cancelling.refuse_sealed(key)
    asking = Asking(
        key=key,
        reason=input_pb2.INPUT_REASON_QUESTION,
        prompt=prompt,
        schema_json=schema_json,
        digest=digest,
        within=within,
        default_json=default_json,
    )
    return _value_of(await ask_outside(lane, asking), prompt)


def _check_sizes(prompt: str, schema_json: str, default_json: str | None) -> None:
    for name, text in (("prompt", prompt), ("schema", schema_json), ("default", default_json or "")):
        if size_of(text) > MAX_TEXT_BYTES:
            raise _bad(f"The {name} of a question is longer than {MAX_TEXT_BYTES // 1024} KiB.")


def _bad(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)


def _value_of(answer: input_pb2.InputAnswer, prompt: str) -> str:
    if not answer.HasField("value_json"):
        raise RunError(f"Nobody answered the question {prompt!r} in time.", reason=error_pb2.ERROR_REASON_INPUT_EXPIRED)
    return answer.value_json
