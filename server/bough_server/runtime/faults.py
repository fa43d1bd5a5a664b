"""Faults of a run: what a case of an evaluation injects into a share of the calls of tools and the attempts of models.

They are mocks that answer some of the calls: a run has them in its mocks, and which calls they are is drawn by a hash
of the seed there and of the call's effect key.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Final

from bough.v1 import error_pb2, eval_set_pb2, event_pb2, message_pb2
from bough_server.engine.input_requests import value_mistakes
from bough_server.errors import ModelError, RunError
from bough_server.tools.builtin import RESERVED

MAX_DELAY_SECONDS: Final = 600
"""The longest delay of a call."""

_DRAWS: Final = 2**64


def find_fault(
    mocks: eval_set_pb2.ToolMocks, key: str, *, agent: str, is_meant: Callable[[eval_set_pb2.EvalFault], bool]
) -> int | None:
    """Return the number of the fault that is injected into an agent's call or attempt, or None.

    It is the first that concerns the call, by `is_meant`, and is drawn for its `key`, which is unique in the run.
    """
    for index, fault in enumerate(mocks.faults):
        if is_meant(fault) and fault.agent in ("", agent) and is_drawn(mocks.fault_seed, index, key, fault.share):
            return index
    return None


def is_drawn(seed: str, index: int, key: str, share: float) -> bool:
    """Return whether a fault is drawn for a key; true of a share of all keys, and always the same of equal values."""
    digest = hashlib.sha256(f"{seed}\0{index}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * _DRAWS


def replaces_tool(fault: eval_set_pb2.EvalFault) -> bool:
    """Return whether a fault takes the place of a tool, so that it does not run."""
    return fault.WhichOneof("fault") != "delay"


def build_tool_error(fault: eval_set_pb2.EvalFault, call: message_pb2.ToolCall) -> RunError:
    """Return the error of a call that a fault fails."""
    error = RunError.of(fault.fail)
    error.reason = error.reason or error_pb2.ERROR_REASON_TOOL_FAILED
    return error if fault.fail.message else RunError(f"The tool {call.name} failed.", reason=error.reason)


def build_model_error(fault: eval_set_pb2.EvalFault, model: str) -> ModelError:
    """Return the error of an attempt that a fault fails: that of an answer with status 429."""
    return ModelError(
        fault.fail.message or f"The model {model!r} is rate limited.",
        reason=error_pb2.ERROR_REASON_MODEL_RATE_LIMITED,
        retry=event_pb2.RETRY_REASON_RATE_LIMITED,
        provider_status=429,
    )


def fault_mistakes(fault: eval_set_pb2.EvalFault) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a fault: the path of each wrong field in it, empty for the whole, and a sentence."""
    target, kind = fault.WhichOneof("target"), fault.WhichOneof("fault")
    if target is None or not getattr(fault, target):
        yield "", "concerns nothing: set `tool` or `model`."
    if fault.tool in RESERVED:
        yield "tool", f"{fault.tool!r} is a built-in tool, which cannot be mocked."
    if not 0 < fault.share <= 1:
        yield "share", "must be over 0 and at most 1: the share of the calls that have the fault."
    if kind is None:
        yield "", "does nothing: set `fail`, `delay` or `answer`."
    elif target == "model" and kind != "fail":
        yield kind, "is for tools: attempts of a model only fail, with `fail`."
    elif target == "model" and fault.fail.reason not in (0, error_pb2.ERROR_REASON_MODEL_RATE_LIMITED):
        yield "fail.reason", "must be MODEL_RATE_LIMITED, or left out: so attempts of a model fail."
    elif kind == "delay" and not 0 < fault.delay.ToNanoseconds() <= MAX_DELAY_SECONDS * 10**9:
        yield "delay", f"must be over 0 and at most {MAX_DELAY_SECONDS // 60} minutes."
    elif kind == "answer_json":
        yield from (("answer_json", mistake) for mistake in value_mistakes(fault.answer_json, "", "answer_json"))
