"""Lanes of an agent's code that run at once and are joined in order; what they do is theirs."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from bough_server.runtime.execution import as_run_error

if TYPE_CHECKING:
    from bough_server.runtime.context import Context

T = TypeVar("T")


async def gather(ctx: "Context", group: str, lanes: "Sequence[Callable[[Context], Awaitable[T]]]") -> list[T]:
    """The results of lanes in their order, once all have ended; `group` is the effect that they are of.

    Raises what aborted the invocation, or what the first lane in order raised.
    """
    execution, frame = ctx.execution, ctx.frame
    contexts = ctx.forks(group, len(lanes))

    async def run(lane_ctx: "Context", lane: "Callable[[Context], Awaitable[T]]") -> T:
        try:
            result = await lane(lane_ctx)
            await lane_ctx.record_state()
            return result
        except SystemExit as error:  # it would end the server's event loop
            raise as_run_error(error) from error

    pairs = zip(contexts, lanes, strict=True)
    tasks = [execution.tasks.spawn(lane_ctx.scope, run(lane_ctx, lane)) for lane_ctx, lane in pairs]
    frame.lanes.update({task: lane_ctx.scope for task, lane_ctx in zip(tasks, contexts, strict=True)})
    await execution.tasks.join(*tasks)
    for task in tasks:
        frame.lanes.pop(task, None)
    ctx.join(contexts)
    failures = [task.exception() for task in tasks if not task.cancelled()]
    if frame.abort is not None:
        raise frame.abort
    if first := next(filter(None, failures), None):
        raise first
    return [task.result() for task in tasks]
