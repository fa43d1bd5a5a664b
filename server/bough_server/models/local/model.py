"""The embedded model: a very small one in a process of its own, for trying things without a network or a key.

It cannot plan, and would call the same tool for ever. So it is asked for a call, in JSON that a grammar enforces, while
a tool is on offer that has given no result in this turn, and may choose among those alone; when there is none left, it
answers in words. Its prompts are cut to its context, oldest and longest first, and further settings are not read.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from bough.v1 import message_pb2, step_pb2
from bough.v1.event_pb2 import RETRY_REASON_TRANSPORT
from bough_server.errors import ModelError
from bough_server.models.limiter import ModelLimiter
from bough_server.models.local.engine import LocalEngine, available
from bough_server.models.local.process import SLOTS
from bough_server.models.local.prompt import ANSWER_TOKENS, Prompt, call_prompt, count_tokens, question_of, text_prompt
from bough_server.models.local.schema import Schema, arguments_schema, call_schema, example
from bough_server.models.model import (
    AttemptMeter,
    Delta,
    ModelRequest,
    Price,
    RetryPolicy,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
)
from bough_server.models.openai.chat import Completion
from bough_server.models.openai.transport import Endpoint, Timeouts
from bough_server.models.scripted.script import answered_tools, current_turn, step_of

__all__ = ["MODEL", "LocalModel", "available"]

MODEL: Final = "SmolLM2-135M-Instruct"
_CALL_TOKENS: Final = 120
_MOST_TOOLS: Final = 4
_TIMEOUTS: Final = Timeouts(start=120.0, idle=60.0)
_Offer = tuple[str, str, Schema]


class LocalModel:
    """The embedded model, started by its first call."""

    def __init__(
        self,
        *,
        name: str,
        retry: RetryPolicy | None = None,
        fallbacks: Sequence[str] = (),
        price: Price | None = None,
        config_digest: str = "",
        turnstile: ModelLimiter | None = None,
    ) -> None:
        self.name = name
        self.provider = "local"
        self.model = MODEL
        self.retry = retry or RetryPolicy()
        self.fallbacks = tuple(fallbacks)
        self.price = price
        self.config_digest = config_digest
        self._engine = LocalEngine(name=name)
        self._endpoint: Endpoint | None = None
        self._base_url = ""
        self._turnstile = turnstile or ModelLimiter(name=name, max_concurrency=SLOTS)

    @property
    def process_id(self) -> int | None:
        """The process that the model runs in, while there is one."""
        return self._engine.process_id

    async def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncGenerator[Delta | step_pb2.LlmResponse, None]:
        """One attempt, by the rules of the Model protocol."""
        offers = open_offers(request)
        meter = meter or AttemptMeter()
        async with self._turnstile.turn(request, meter):
            if offers:
                for made in await self._call(request, offers, meter):
                    yield made
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
        """The tokens of a whole request by its own tokenizer; of what it is really asked, some may be cut."""
        return await count_tokens(await self._engine.base_url(), request)

    async def close(self) -> None:
        """Ends the connections and the process."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
        await self._engine.close()

    async def _call(
        self, request: ModelRequest, offers: Sequence[_Offer], meter: AttemptMeter | None
    ) -> tuple[ToolCallDelta, ToolCallDelta, step_pb2.LlmResponse]:
        """A tool call as the model chose it. Its JSON is not shown as text while it comes."""
        schema = call_schema([(name, arguments) for name, _, arguments in offers])
        form = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
        prompt = call_prompt(request, offers)
        items = self._ask(prompt, max_tokens=_CALL_TOKENS, request=request, meter=meter, response_format=form)
        response = step_pb2.LlmResponse()
        async with aclosing(items):
            async for item in items:
                if isinstance(item, step_pb2.LlmResponse):
                    response = item
        name, arguments = _chosen(response, offers, question_of(request))
        call_id = f"call_{step_of(current_turn(request.messages))}"
        call = message_pb2.ToolCall(name=name, arguments_json=arguments, provider_call_id=call_id)
        said = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(tool_call=call)])
        response.message.CopyFrom(said)
        response.finish_reason = step_pb2.FINISH_REASON_TOOL_CALLS
        return ToolCallDelta(0, "", call_id, name), ToolCallDelta(0, arguments), response

    async def _ask(
        self, prompt: Prompt, *, max_tokens: int, request: ModelRequest, meter: AttemptMeter | None, **further: object
    ) -> AsyncGenerator[Delta | step_pb2.LlmResponse, None]:
        """Asks the process, once more where the connection dropped before the first word: it does so now and then."""
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
            endpoint = await self._connected()
            completion = Completion(meter)
            items = endpoint.stream("/chat/completions", body, completion, provider=self.provider, model=MODEL)
            try:
                async for item in items:
                    began = began or isinstance(item, TextDelta)
                    yield item
                return
            except ModelError as error:
                if is_last or began or error.retry != RETRY_REASON_TRANSPORT:
                    raise
                await self._engine.settle()
            finally:
                await items.aclose()

    async def _connected(self) -> Endpoint:
        base_url = await self._engine.base_url()
        if self._endpoint is None or base_url != self._base_url:
            before, self._base_url = self._endpoint, base_url
            endpoint = self._endpoint = Endpoint(
                name=self.name, base_url=base_url, timeouts=_TIMEOUTS, keeps_connections=False
            )
            if before is not None:
                await before.close()
            return endpoint
        return self._endpoint


def open_offers(request: ModelRequest) -> list[_Offer]:
    """The tools that the model may call now: the first few that have given no result since the user's last message.

    Where it has to call one and all have given a result, those are the first few of all.
    """
    answered = answered_tools(current_turn(request.messages))
    waiting: list[ToolSpec] = [tool for tool in request.tools if tool.name not in answered]
    if not waiting and request.tool_choice == "required":
        waiting = list(request.tools)
    return [(tool.name, tool.description, arguments_schema(tool.input_schema_json)) for tool in waiting[:_MOST_TOOLS]]


def _answer_tokens(request: ModelRequest) -> int:
    settings = request.settings
    wanted = settings.max_output_tokens if settings.HasField("max_output_tokens") else ANSWER_TOKENS
    return max(1, min(wanted, ANSWER_TOKENS))


def _chosen(response: step_pb2.LlmResponse, offers: Sequence[_Offer], question: str) -> tuple[str, str]:
    """The tool and its arguments; where the JSON was cut, the first tool, asked what the turn asks."""
    text = "".join(part.text for part in response.message.parts)
    try:
        chosen = json.loads(text)
        name, arguments = chosen["tool"], chosen["arguments"]
    except (ValueError, KeyError, TypeError):
        name, arguments = None, None
    if name not in [offered for offered, _, _ in offers] or not isinstance(arguments, dict):
        name, arguments = offers[0][0], example(offers[0][2], question)
    return str(name), json.dumps(arguments, ensure_ascii=False)
