"""The embedded model: a very small one in a separate process, for trying things without a network or a key.

It cannot plan, and would call the same tool forever. So as long as there are tools without a result in this turn, it
must call one of those, in JSON that a grammar enforces; after that it answers in text. Its prompts are cut to its
context, oldest and longest texts first. Settings other than the temperature and the output limit are ignored.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from bough.v1 import message_pb2, step_pb2
from bough.v1.event_pb2 import RETRY_REASON_TRANSPORT
from bough_server.errors import ModelError
from bough_server.models.endpoint import Endpoint, Timeouts
from bough_server.models.failures import Failures
from bough_server.models.http import Address, HttpConnection
from bough_server.models.limiter import ModelLimiter
from bough_server.models.local.engine import LocalEngine, find_problem
from bough_server.models.local.process import SLOTS
from bough_server.models.local.prompt import ANSWER_TOKENS, Prompt, call_prompt, count_tokens, question_of, text_prompt
from bough_server.models.local.schema import Schema, arguments_schema, call_schema, example
from bough_server.models.model import (
    AttemptMeter,
    Deltas,
    ModelRequest,
    Price,
    RetryPolicy,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
)
from bough_server.models.openai.chat import Completion
from bough_server.models.scripted.script import current_turn, find_answered_tools, step_of

__all__ = ["MODEL", "LocalModel", "find_problem"]

MODEL: Final = "SmolLM2-135M-Instruct"
_CALL_TOKENS: Final = 120
_MOST_TOOLS: Final = 4
_TIMEOUTS: Final = Timeouts(start=120.0, idle=60.0)
_Offer = tuple[str, str, Schema]


class LocalModel:
    """The embedded model. Its first call starts the process."""

    def __init__(
        self,
        *,
        name: str,
        retry: RetryPolicy | None = None,
        fallbacks: Sequence[str] = (),
        price: Price | None = None,
        config_digest: str = "",
        limiter: ModelLimiter | None = None,
        engine: LocalEngine | None = None,
    ) -> None:
        self.name = name
        self.provider = "local"
        self.model = MODEL
        self.retry = retry or RetryPolicy()
        self.fallbacks = tuple(fallbacks)
        self.price = price
        self.config_digest = config_digest
        self._engine = engine or LocalEngine(name=name)
        self._endpoint: Endpoint | None = None
        self._base_url = ""
        self._limiter = limiter or ModelLimiter(name=name, max_concurrency=SLOTS)

    @property
    def process_id(self) -> int | None:
        """Id of the model's process; None while there is none."""
        return self._engine.process_id

    async def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncGenerator[Deltas | step_pb2.LlmResponse, None]:
        """Make one attempt, as the Model protocol specifies."""
        offers = select_offers(request)
        meter = meter or AttemptMeter()
        async with self._limiter.admit(request, meter):
            if offers:
                for call_item in await self._call(request, offers, meter):
                    yield call_item
                return
            form: dict[str, object] = {}
            if request.output_schema_json:
                schema = {"name": "answer", "schema": arguments_schema(request.output_schema_json)}
                form = {"response_format": {"type": "json_schema", "json_schema": schema}}
            tokens = _answer_tokens(request)
            items = self._ask(text_prompt(request), max_tokens=tokens, request=request, meter=meter, **form)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Return the tokens of the whole request by the model's tokenizer; the prompt that is sent may be shorter."""
        return await count_tokens(await self._engine.base_url(), request)

    async def close(self) -> None:
        """Close the connections and end the process."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
        await self._engine.close()

    async def _call(
        self, request: ModelRequest, offers: Sequence[_Offer], meter: AttemptMeter | None
    ) -> tuple[Deltas, step_pb2.LlmResponse]:
        """Ask for a tool call. Its JSON is not streamed as text."""
        schema = call_schema([(name, arguments) for name, _, arguments in offers])
        form = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
        prompt = call_prompt(request, offers)
        items = self._ask(prompt, max_tokens=_CALL_TOKENS, request=request, meter=meter, response_format=form)
        response = step_pb2.LlmResponse()
        async with aclosing(items):
            async for item in items:
                if isinstance(item, step_pb2.LlmResponse):
                    response = item
        name, arguments = _parse_call(response, offers, question_of(request))
        call_id = f"call_{step_of(current_turn(request.messages))}"
        call = message_pb2.ToolCall(name=name, arguments_json=arguments, provider_call_id=call_id)
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(tool_call=call)])
        response.message.CopyFrom(message)
        response.finish_reason = step_pb2.FINISH_REASON_TOOL_CALLS
        return (ToolCallDelta(0, "", call_id, name), ToolCallDelta(0, arguments)), response

    async def _ask(
        self, prompt: Prompt, *, max_tokens: int, request: ModelRequest, meter: AttemptMeter | None, **further: object
    ) -> AsyncGenerator[Deltas | step_pb2.LlmResponse, None]:
        """Stream from the process. Retry once if the connection drops before the first text, as it does at times."""
        body = {
            "model": MODEL,
            "messages": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "temperature": request.settings.temperature,
            "repeat_penalty": 1.1,
            **further,
        }
        for is_last in (False, True):
            began = False
            endpoint = await self._connect()
            completion = Completion(meter)
            items = endpoint.stream("/chat/completions", body, completion, provider=self.provider, model=MODEL)
            try:
                async for item in items:
                    if not isinstance(item, step_pb2.LlmResponse):
                        began = began or any(isinstance(delta, TextDelta) for delta in item)
                    yield item
                return
            except ModelError as error:
                if is_last or began or error.retry != RETRY_REASON_TRANSPORT:
                    raise
                await self._engine.wait_for_exit()
            finally:
                await items.aclose()

    async def _connect(self) -> Endpoint:
        base_url = await self._engine.base_url()
        if self._endpoint is None or base_url != self._base_url:
            before, self._base_url = self._endpoint, base_url
            address = Address(base_url=base_url, keeps_connections=False)
            endpoint = self._endpoint = Endpoint(
                HttpConnection(lambda: address),
                failures=Failures(name=self.name, url=base_url),
                timeouts=_TIMEOUTS,
            )
            if before is not None:
                await before.close()
            return endpoint
        return self._endpoint


def select_offers(request: ModelRequest) -> list[_Offer]:
    """Return the tools that the model may call now: the first 4 without a result since the user's last message.

    If it must call a tool and all have results, these are the first 4 of all.
    """
    answered = find_answered_tools(current_turn(request.messages))
    unused: list[ToolSpec] = [tool for tool in request.tools if tool.name not in answered]
    if not unused and request.tool_choice == "required":
        unused = list(request.tools)
    return [(tool.name, tool.description, arguments_schema(tool.input_schema_json)) for tool in unused[:_MOST_TOOLS]]


def _answer_tokens(request: ModelRequest) -> int:
    settings = request.settings
    limit = settings.max_output_tokens if settings.HasField("max_output_tokens") else ANSWER_TOKENS
    return max(1, min(limit, ANSWER_TOKENS))


def _parse_call(response: step_pb2.LlmResponse, offers: Sequence[_Offer], question: str) -> tuple[str, str]:
    """Return the tool and its arguments; if the JSON was cut off, the first tool with the turn's question."""
    text = "".join(part.text for part in response.message.parts)
    try:
        chosen = json.loads(text)
        name, arguments = chosen["tool"], chosen["arguments"]
    except (ValueError, KeyError, TypeError):
        name, arguments = None, None
    if name not in [offered for offered, _, _ in offers] or not isinstance(arguments, dict):
        name, arguments = offers[0][0], example(offers[0][2], question)
    return str(name), json.dumps(arguments, ensure_ascii=False)
