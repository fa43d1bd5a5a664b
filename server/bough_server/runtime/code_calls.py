"""Calls of tools that an agent's code makes by itself."""

import json
from collections.abc import Mapping

from bough.v1 import error_pb2, message_pb2
from bough_server import ids
from bough_server.errors import RunError
from bough_server.runtime.lane import Lane
from bough_server.runtime.tool_call import ToolCallEffect
from bough_server.runtime.toolset import ToolOffer
from bough_server.tools import builtin
from bough_server.truncation import MAX_TEXT_BYTES


async def call_from_code(lane: Lane, key: str, name: str, arguments: Mapping[str, object]) -> message_pb2.ToolResult:
    """Return the result of a tool that an agent's code calls: an effect of its lane, which belongs to no step.

    Raises RunError BAD_ARGUMENTS for arguments that no call can hold; any other refusal is a failed result.
    """
    running, tasks = lane.running, lane.execution.scheduler
    offer = running.toolset.offers.get(name)
    # The number of the effect; in lanes of the code, whose effects have the same numbers, after that of the lane.
    call_id = key.removeprefix(f"{running.scope}/")
    if call_id in running.call_ids:  # a provider has chosen the same id
        call_id = ids.derive_id(lane.execution.facts.run_id, key)
    call = message_pb2.ToolCall(call_id=call_id, name=name, arguments_json=_arguments_json(name, arguments))
    running.call_ids.add(call_id)  # a model's call gets another one
    effect = ToolCallEffect(
        lane, key=key, index=None, call=call, state=lane.lane_state, refusal=_refusal_to_code(name, offer)
    )
    # In a task with the call's scope, as the calls of a step: what ends the call alone must not end its caller.
    task = tasks.spawn(key, effect.run_or_replay(offer))
    await tasks.join(task)
    if task.cancelled():
        await tasks.rest_forever()  # what ended the call ends the lane as well
    return task.result()


def _arguments_json(name: str, arguments: Mapping[str, object]) -> str:
    try:
        text = json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad_arguments(f"The arguments of {name!r} cannot be serialized as JSON: {error}.") from None
    if len(text) > MAX_TEXT_BYTES:
        raise _bad_arguments(
            f"The arguments of {name!r} are longer than {MAX_TEXT_BYTES // 1024} KiB. Pass a reference instead."
        )
    return text


def _refusal_to_code(name: str, offer: ToolOffer | None) -> RunError | None:
    """Why code cannot call something that a model may call; None if it can."""
    if offer is None or offer.tool is not None or name in builtin.OF_STATE:
        return None
    if offer.link is not None:
        return _bad_arguments(f"{name!r} is an agent: run it by ctx.dispatch({offer.link.agent!r}, ...).")
    instead = "return Outcome.exit(...) instead" if name == builtin.EXIT else "return an Outcome instead"
    return _bad_arguments(f"The tool {name!r} is for models. In Python, {instead}.")


def _bad_arguments(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
