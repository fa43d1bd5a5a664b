"""The effect that asks a model: answered from the log, refused, or made; its attempts are attempts.py's."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.v1 import error_pb2, event_pb2, message_pb2, step_pb2
from bough_server import ids
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest
from bough_server.runtime import keys
from bough_server.runtime.attempts import ModelCall
from bough_server.runtime.execution import Execution, as_run_error
from bough_server.runtime.frame import Frame
from bough_server.runtime.spending import Amount, estimated
from bough_server.runtime.succession import Succession, succession

if TYPE_CHECKING:
    from bough_server.runtime.context import Context


_DIGEST: Final = keys.digest("model")
"""Of every model call: what a model is asked follows from the log, and may be built otherwise one day."""

Asked = ModelRequest | Callable[[], ModelRequest]
"""A request, or what makes one."""


async def ask(ctx: "Context", key: str, index: int, request: Asked, name: str) -> step_pb2.LlmResponse:
    execution, frame = ctx.execution, ctx.frame
    digest = _DIGEST
    execution.check(key, digest)
    if key in execution.journal.results:
        recorded = await execution.pump.result(key)
        execution.observe_recorded(key)
        return _answered(ctx, recorded)
    await ctx.until_live(key)
    execution.cancelling.refuse_sealed(key)
    async with execution.slots.place(key, frame.budget):
        made = replace(request() if callable(request) else request, agent=frame.name)
        try:
            models, amount = _admitted(ctx, key, name, made)
        except RunError as refusal:
            event = frame.opened.in_step(frame.event(key), index)
            event.effect_digest = digest
            event.llm_failed.error.CopyFrom(_error(frame, refusal))
            execution.emit(event)
            raise
        return await _ask(ctx, key, index, made, models, amount)


def _admitted(ctx: "Context", key: str, name: str, request: ModelRequest) -> tuple[Succession, Amount]:
    """Who is asked, and what that reserves; a call that the log holds begun has reserved it there."""
    journal, budget = ctx.execution.journal, ctx.frame.budget
    is_new = key not in journal.started
    models = succession(ctx.execution.resolver, name, () if is_new else journal.of_effect[key])
    amount = Amount()
    if is_new:
        budget.check_parallel()
        budget.check_model_call()
        if budget.is_metered:
            amount = estimated(request, models.model)
            budget.check_spending(amount)
    return models, amount


async def _ask(
    ctx: "Context", key: str, index: int, request: ModelRequest, models: Succession, amount: Amount
) -> step_pb2.LlmResponse:
    execution, frame, model = ctx.execution, ctx.frame, models.model
    traced = execution.tracing.chat(model=model.model or model.name, provider=model.provider, parent=frame.traced.below)
    execution.spans[key] = traced
    lost = execution.journal.attempts.get(key, 0)
    call = ModelCall(execution, frame, key=key, index=index, succession=models, traced=traced, attempt=lost + 1)
    if lost:
        call.recover()
    else:
        started = frame.opened.in_step(frame.event(key, traced=traced), index)
        started.effect_digest, started.attempt = _DIGEST, 1
        begun = started.llm_started
        begun.model, begun.provider = model.name, model.provider
        begun.message_count = len(request.messages) + bool(request.instruction)
        begun.tool_names.extend(tool.name for tool in request.tools)
        begun.reserved_tokens, begun.reserved_cost_micros = amount.tokens, amount.cost_micros
        execution.emit(started)
    await execution.committed()
    ended = frame.opened.in_step(frame.event(key, traced=traced), index)
    try:
        response = await call.answer(request)
    except Exception as raised:
        error = as_run_error(raised)
        ended.attempt = call.attempt
        ended.llm_failed.error.CopyFrom(_error(frame, error))
        ended.llm_failed.not_sent = not call.is_sent
        used = getattr(raised, "lost_usage", None)
        if used is not None:
            ended.llm_failed.lost_usage.CopyFrom(used)
        execution.emit(ended)
        execution.spans.pop(key).end(error=ended.llm_failed.error, input=request.messages)
        await execution.committed()
        raise error from raised
    _place(execution, frame, key, response.message)
    ended.attempt = call.attempt
    ended.llm_completed.response.CopyFrom(response)
    execution.emit(ended)
    execution.spans.pop(key).end(response=response, input=request.messages, output=[response.message])
    if not any(part.HasField("tool_call") for part in response.message.parts):
        ctx.complete_steps()
    return response


def _place(execution: Execution, frame: Frame, key: str, message: message_pb2.Message) -> None:
    """Says whose a model's message is and, where it asks for calls, what it is in the session."""
    message.role, message.author = message_pb2.ROLE_ASSISTANT, frame.name
    message.invocation_id = frame.invocation_id
    if not _is_for_the_session(message, frame):
        return
    kind = "ASSISTANT" if frame.parent is None else "SUB_AGENT_ASSISTANT"
    message.kind = message_pb2.MessageKind.Value(f"MESSAGE_KIND_{kind}")
    message.message_id = ids.message_id(execution.facts.key_root, key, kind)


def _answered(ctx: "Context", recorded: event_pb2.AgentEvent) -> step_pb2.LlmResponse:
    if recorded.HasField("llm_failed"):
        error = recorded.llm_failed.error
        raise RunError(error.message, reason=error.reason, retryable=error.retryable, details_json=error.details_json)
    response = step_pb2.LlmResponse()
    response.CopyFrom(recorded.llm_completed.response)
    if not any(part.HasField("tool_call") for part in response.message.parts):
        ctx.complete_steps()
    return response


def _error(frame: Frame, error: RunError) -> error_pb2.AgentError:
    return error.to_agent_error(agent=frame.name, invocation_id=frame.invocation_id)


def _is_for_the_session(message: message_pb2.Message, frame: Frame) -> bool:
    """Whether a message with calls says something that its children's messages do not say: text, or ordinary calls."""
    calls = [part.tool_call for part in message.parts if part.HasField("tool_call")]
    if not calls:
        return False
    linked = {name for name, offer in frame.toolset.offers.items() if offer.link is not None}
    said = any(part.text.strip() for part in message.parts)
    return said or any(call.name not in linked for call in calls)
