"""The effect of a model call: answered from the log, refused, or sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bough.v1 import event_pb2, message_pb2, step_pb2
from bough_server.engine import keys
from bough_server.engine.execution import Execution, to_run_error
from bough_server.engine.limits import Amount, estimate_amount
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.messages import calls_of, copy_of
from bough_server.models.model import Model, ModelRequest, forms_of
from bough_server.runtime.lane import Lane
from bough_server.runtime.model_attempts import FallbackChain, ModelAttempts, build_fallback_chain
from bough_server.runtime.running_agent import RunningAgent

_DIGEST: Final = keys.digest("model")
"""One digest for all model calls: requests follow from the log, and a new version may build them differently."""

RequestSource = ModelRequest | Callable[[], ModelRequest]
"""A request, or a function that builds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCallSpec:
    """Key and step of a model call, and the events to append together with its answer."""

    key: str
    index: int | None
    """Its step; None for a call that is no step of its agent, such as a summary: it records no deltas."""
    beside: Callable[[step_pb2.LlmResponse], Sequence[event_pb2.AgentEvent]] | None = None
    is_value: bool = False
    """True if its answer is the value of a graph's node, which no history and no session holds."""


def check_call(execution: Execution, key: str) -> None:
    """Note a model call that its agent is about to make.

    Raises CancelledError and stops the run if the log holds another effect under its key.
    """
    execution.writer.check(key, _DIGEST)


async def call_model(lane: Lane, effect: ModelCallSpec, request: RequestSource, name: str) -> step_pb2.LlmResponse:
    """Call a model and return its answer, or return the recorded one. Raises RunError if it is refused or fails."""
    execution, running, key, index = lane.execution, lane.running, effect.key, effect.index
    if (replayed := await lane.replay_result(key, _DIGEST)) is not None:
        response = _replay_response(replayed)
        _complete_step(lane, effect, response)
        return response
    await lane.go_live(key)
    async with execution.concurrency.hold_slot(key, running.budget):
        try:
            made = _build_request(running, effect, request)
            models, amount = await _admit(lane, key, name, made)
        except RunError as refusal:
            event = running.event(key, index)
            event.effect_digest = _DIGEST
            event.llm_failed.error.CopyFrom(running.error_of(refusal))
            event.llm_failed.not_sent = True
            execution.emit(event)
            raise
        return await _send(lane, effect, made, models=models, amount=amount)


def _build_request(running: RunningAgent, effect: ModelCallSpec, request: RequestSource) -> ModelRequest:
    """Return the request as it is sent. Raises RunError if building it fails."""
    agent = running.name if effect.index is not None else f"{running.name}.summary"
    try:
        return replace(request() if callable(request) else request, agent=agent)
    except RunError:
        raise
    except Exception as error:
        raise to_run_error(error) from error


async def _admit(lane: Lane, key: str, name: str, request: ModelRequest) -> tuple[FallbackChain, Amount]:
    """Return the models to call and the amount to reserve, 0 for a call that the log shows as started.

    Raises RunError LIMIT_EXCEEDED, INSUFFICIENT_BALANCE, QUOTA_EXCEEDED or MODEL_UNAVAILABLE.
    """
    journal, budget = lane.execution.journal, lane.running.budget
    is_new = key not in journal.started
    # A started call was admitted and holds its reservation: it is not checked again, against its own reservation too.
    models = build_fallback_chain(lane.running.resolver, name, () if is_new else journal.of_effect[key])
    amount = Amount()
    if is_new:
        if budget.is_metered:
            amount = estimate_amount(request, models.model)
            await budget.prepare_spending(amount)
        # No await from here to llm_started, which counts the call: another call must not take the same remainder.
        budget.check_concurrency()
        budget.check_model_call()
        if budget.is_metered:
            budget.check_spending(amount)
    return models, amount


async def _send(
    lane: Lane, effect: ModelCallSpec, request: ModelRequest, *, models: FallbackChain, amount: Amount
) -> step_pb2.LlmResponse:
    execution, running, model, key, index = lane.execution, lane.running, models.model, effect.key, effect.index
    traced = execution.tracing.chat(model=model.model or model.name, provider=model.provider, parent=lane.traced.below)
    execution.spans[key] = traced
    lost = execution.journal.attempts.get(key, 0)
    call = ModelAttempts(execution, running, key=key, index=index, chain=models, traced=traced, attempt=lost + 1)
    if lost:
        call.recover()
    else:
        started = running.event(key, index, traced=traced)
        started.effect_digest, started.attempt = _DIGEST, 1
        started.llm_started.CopyFrom(_build_start(request, model, amount))
        execution.emit(started)
    running.open_invocation.unsent.add(key)  # until the first attempt: a cancellation may come before it
    await execution.writer.wait_for_commit()
    ended = running.event(key, index, traced=traced)
    try:
        response = await call.answer(await _load_files(execution, request))
    except Exception as raised:  # not CancelledError: the cancellation records the end, from what the call noted
        error = to_run_error(raised)
        ended.attempt = call.attempt
        lost_usage = getattr(raised, "lost_usage", None)
        ended.llm_failed.CopyFrom(
            event_pb2.LlmFailed(
                error=running.error_of(error),
                not_sent=not call.is_sent,
                lost_usage=lost_usage,
                unanswered=call.is_unanswered,
            )
        )
        if call.fault is not None:
            ended.llm_failed.fault_index = call.fault
        execution.emit(ended)
        execution.spans.pop(key).end(error=ended.llm_failed.error, input=request.messages)
        await execution.writer.wait_for_commit()
        if error is raised:
            raise  # from itself, it would lose its cause
        raise error from raised
    _attribute(execution, running, effect, response.message)
    ended.attempt = call.attempt
    ended.llm_completed.response.CopyFrom(response)
    execution.emit(ended, *(effect.beside(response) if effect.beside is not None else ()))
    execution.spans.pop(key).end(response=response, input=request.messages, output=[response.message])
    _complete_step(lane, effect, response)
    return response


async def _load_files(execution: Execution, request: ModelRequest) -> ModelRequest:
    """Return the request with the bytes of its files."""
    if not any(form.has_files for form in forms_of(request)):
        return request
    files = execution.files
    messages = await files.load_data(request.messages) if files is not None else request.messages
    return replace(request, messages=messages, forms=())


def _build_start(request: ModelRequest, model: Model, amount: Amount) -> event_pb2.LlmStarted:
    """Return the llm_started of a call; settings that leave all to the provider are left out."""
    return event_pb2.LlmStarted(
        model=model.name,
        provider=model.provider,
        message_count=len(request.messages) + bool(request.instruction),
        tool_names=[tool.name for tool in request.tools],
        reserved_tokens=amount.tokens,
        reserved_cost_nanos=amount.cost_nanos,
        reserved_currency_code=amount.currency_code if amount.cost_nanos else "",
        settings=request.settings if request.settings.ListFields() else None,
    )


def _complete_step(lane: Lane, effect: ModelCallSpec, response: step_pb2.LlmResponse) -> None:
    """End the step of an answer without calls."""
    if effect.index is not None and not calls_of(response.message):
        lane.complete_steps()


def _attribute(
    execution: Execution, running: RunningAgent, effect: ModelCallSpec, message: message_pb2.Message
) -> None:
    """Set the author of a model's message and, if it belongs in the session, its kind and message id."""
    message.role, message.author = message_pb2.ROLE_ASSISTANT, running.name
    message.invocation_id = running.invocation_id
    if effect.index is None or effect.is_value or not _is_for_the_session(message, running):
        return
    kind = "ASSISTANT" if running.parent is None else "SUB_AGENT_ASSISTANT"
    message.kind = message_pb2.MessageKind.Value(f"MESSAGE_KIND_{kind}")
    message.message_id = execution.message_id(effect.key, events.LLM_COMPLETED, kind)


def _replay_response(recorded: event_pb2.AgentEvent) -> step_pb2.LlmResponse:
    if recorded.HasField("llm_failed"):
        raise RunError.of(recorded.llm_failed.error)
    return copy_of(recorded.llm_completed.response)


def _is_for_the_session(message: message_pb2.Message, running: RunningAgent) -> bool:
    """True if a message with calls has content that its children's messages do not repeat: text, or tool calls."""
    calls = calls_of(message)
    if not calls:
        return False
    linked = {name for name, offer in running.toolset.offers.items() if offer.link is not None}
    has_text = any(part.text.strip() for part in message.parts)
    return has_text or any(call.name not in linked for call in calls)
