"""Models behind OpenAI's APIs, Chat Completions or Responses, at any address.

A call is one attempt; retries and fallbacks are up to the runtime.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol

from bough.v1 import step_pb2
from bough_server.models.answer import Answer, RawAnswer
from bough_server.models.endpoint import Timeouts
from bough_server.models.failures import Failures
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import AttemptMeter, Delta, ModelRequest, Price, RetryPolicy
from bough_server.models.openai.chat import Completion
from bough_server.models.openai.chat_request import OPENAI, ChatDialect, chat_body
from bough_server.models.openai.responses import Response
from bough_server.models.openai.responses_request import responses_body
from bough_server.models.openai.transport import OPENAI_BASE_URL, openai_endpoint
from bough_server.models.structured_output import BadSettings, Body


class Api(Protocol):
    """One of the APIs: its path, the format of its requests, and how to read its answers."""

    @property
    def path(self) -> str:
        """Path below the base URL."""
        ...

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        ...

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """Return a new answer, to which events can be applied; `meter` receives its usage."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatApi:
    """The Chat Completions API."""

    path: ClassVar[str] = "/chat/completions"
    dialect: ChatDialect = OPENAI

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return chat_body(request, model=model, name=name, dialect=self.dialect)

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """Return a new answer, to which events can be applied; `meter` receives its usage."""
        return Completion(meter, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesApi:
    """The Responses API, without storage at the provider."""

    path: ClassVar[str] = "/responses"
    structured_output: bool = True
    """Whether the provider accepts a JSON schema for its answer; if not, the instruction asks for it."""
    encrypted_reasoning: bool = False
    """Whether to request encrypted reasoning; a provider that sends it unasked has it kept as well."""

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return responses_body(
            request,
            model=model,
            name=name,
            encrypted_reasoning=self.encrypted_reasoning,
            structured_output=self.structured_output,
        )

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """Return a new answer, to which events can be applied; `meter` receives its usage."""
        return Response(meter, name=name)


class OpenAIModel:
    """A model of one provider, at one address."""

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
        limiter: ModelLimiter | None = None,
        config_digest: str = "",
    ) -> None:
        """Default `api`: Chat Completions. With `keep_raw` responses include the provider's raw events.

        `missing_key`, if set, says what to do about a key that is required and missing; each call then fails with it.
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
        self._endpoint = openai_endpoint(name=name, base_url=base_url, key=key, timeouts=timeouts or Timeouts())
        self._limiter = limiter or ModelLimiter(name=name)

    async def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncGenerator[Delta | step_pb2.LlmResponse, None]:
        """Make one attempt, as the Model protocol specifies."""
        if self._missing_key:
            raise self._failures.unavailable(f"has no key: {self._missing_key}")
        try:
            body = self._api.body(request, model=self.model, name=self.name)
        except BadSettings as error:
            raise self._failures.unusable(f"cannot be called: {error}") from error
        meter = meter or AttemptMeter()
        async with self._limiter.turn(request, meter):
            answer = self._api.answer(meter, name=self.name)
            if self._keep_raw:
                answer = RawAnswer(answer)
            items = self._endpoint.stream(self._api.path, body, answer, provider=self.provider, model=self.model)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()
