"""Models behind OpenAI's APIs, Chat Completions or Responses, at any address.

It does not try again, and calls nobody else: the runtime does.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol

from bough.v1 import step_pb2
from bough_server.models.failures import Failures
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import AttemptMeter, Delta, ModelRequest, Price, RetryPolicy
from bough_server.models.openai.annotations import Answer, RawAnswer
from bough_server.models.openai.chat import Completion, chat_body
from bough_server.models.openai.responses import Response
from bough_server.models.openai.responses_request import responses_body
from bough_server.models.openai.transport import OPENAI_BASE_URL, Endpoint, Timeouts
from bough_server.models.structured_output import BadSettings, Body


class Api(Protocol):
    """How a request is worded, where it goes, and how its answer is read."""

    @property
    def path(self) -> str:
        """Below the base URL."""
        ...

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """The request. Raises BadSettings."""
        ...

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """An answer that has not begun."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatApi:
    """Chat Completions."""

    path: ClassVar[str] = "/chat/completions"
    structured_output: bool = True
    """Whether the provider can be asked for JSON of a schema; if not, it is asked for it in words."""

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """The request. Raises BadSettings."""
        return chat_body(request, model=model, structured_output=self.structured_output)

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """An answer that has not begun."""
        return Completion(meter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesApi:
    """Responses, of which the provider keeps nothing."""

    path: ClassVar[str] = "/responses"
    structured_output: bool = True
    """Whether the provider can be asked for JSON of a schema; if not, it is asked for it in words."""
    encrypted_reasoning: bool = False
    """Whether encrypted reasoning is asked for; where it comes by itself it is kept too."""

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """The request. Raises BadSettings."""
        return responses_body(
            request,
            model=model,
            name=name,
            encrypted_reasoning=self.encrypted_reasoning,
            structured_output=self.structured_output,
        )

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """An answer that has not begun."""
        return Response(meter, name=name)


class OpenAIModel:
    """A model at one address."""

    def __init__(
        self,
        *,
        name: str,
        model: str,
        api: Api | None = None,
        keep_raw: bool = False,
        base_url: str = OPENAI_BASE_URL,
        key: str = "",
        missing_key: str = "",
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        fallbacks: Sequence[str] = (),
        price: Price | None = None,
        turnstile: ModelLimiter | None = None,
        config_digest: str = "",
    ) -> None:
        """`missing_key` says what to do about a key that is needed and not there; Chat Completions are the default.

        With `keep_raw` answers carry their provider's events.
        """
        self.name = name
        self.provider = "openai"
        self.model = model
        self.retry = retry or RetryPolicy()
        self.fallbacks = tuple(fallbacks)
        self.price = price
        self.config_digest = config_digest
        self._failures = Failures(name=name)
        self._missing_key = missing_key
        self._api = api or ChatApi()
        self._keep_raw = keep_raw
        self._endpoint = Endpoint(name=name, base_url=base_url, key=key, timeouts=timeouts or Timeouts())
        self._turnstile = turnstile or ModelLimiter(name=name)

    async def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncGenerator[Delta | step_pb2.LlmResponse, None]:
        """One attempt, by the rules of the Model protocol."""
        if self._missing_key:
            raise self._failures.unavailable(f"has no key: {self._missing_key}")
        try:
            body = self._api.body(request, model=self.model, name=self.name)
        except BadSettings as error:
            raise self._failures.unusable(f"cannot be asked: {error}") from error
        meter = meter or AttemptMeter()
        async with self._turnstile.turn(request, meter):
            answer = self._api.answer(meter, name=self.name)
            if self._keep_raw:
                answer = RawAnswer(answer)
            items = self._endpoint.stream(self._api.path, body, answer, provider=self.provider, model=self.model)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def close(self) -> None:
        """Ends the connections."""
        await self._endpoint.close()
