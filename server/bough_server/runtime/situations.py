"""What the operator's pure functions are shown of an invocation; asking them is their callers'."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bough.v1 import message_pb2
from bough_server.functions import Situation, Values, copied
from bough_server.runtime.state import LaneState

if TYPE_CHECKING:
    from bough_server.runtime.context import Context


def situation_of(
    ctx: "Context",
    *,
    message: message_pb2.Message | None = None,
    arguments: Mapping[str, Any] | None = None,
    state: LaneState | None = None,
    round: int | None = None,
    facts: Mapping[str, str] | None = None,
) -> Situation:
    """What is known in a lane of an invocation; `state` are the session's values where they are not the lane's."""
    plan = facts or {}
    return Situation(
        agent=ctx.frame.name,
        state=Values((state or ctx.lane_state).values),
        input=copied(ctx.frame.told),
        user=copied(ctx.execution.told),
        message=copied(message) if message is not None else None,
        arguments=arguments or {},
        round=round,
        plan=plan.get("plan", ""),
        step=plan.get("step", ""),
        executed_steps=plan.get("executed_steps", ""),
        look=ctx.sight.frozen().messages,
    )
