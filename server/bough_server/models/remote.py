"""A model behind a provider's API: request bodies and answers are the API's, bytes are the endpoint's.

A call is one attempt; retries and fallbacks are up to the runtime.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from bough.v1 import step_pb2
from bough_server.models.answer import Answer
from bough_server.models.endpoint import Endpoint, Timeouts
from bough_server.models.failures import Failures
from bough_server.models.http import Address, HttpConnection
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import AttemptMeter, Deltas, ModelRequest, Price, RetryPolicy
from bough_server.models.structured_output import BadSettings, Body


class Api(Protocol):
    """A provider's API: where requests go, their format, and how to read answers."""

    @property
    def base_url(self) -> str:
        """The provider's own address."""
        ...

    @property
    def path(self) -> str:
        """Path below the base URL."""
        ...

    def address(self, base_url: str, key: str) -> Address:
        """Return where requests go, with the key if there is one. May load a package. Raises ValueError."""
        ...

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        ...

    @property
    def answer(self) -> type[Answer]:
        """What assembles an answer."""
        ...


class RemoteModel:
    """A model of one provider, at one address."""

    def __init__(
        self,
        *,
        name: str,
        provider: str,
        model: str,
        api: Api,
        base_url: str = "",
        key: str = "",
        timeouts: Timeouts | None = None,
        keep_raw: bool = False,
        missing_key: str = "",
        retry: RetryPolicy | None = None,
        fallbacks: Sequence[str] = (),
        price: Price | None = None,
        limiter: ModelLimiter | None = None,
        config_digest: str = "",
    ) -> None:
        """Default `base_url`: the provider's own. An empty `key` sends none.

        With `keep_raw` responses include the provider's raw events. `missing_key`, if set, says what to do about a key
        that is required and missing; each call then fails with it.
        """
        self.name = name
        self.provider = provider
        self.model = model
        self.retry = retry or RetryPolicy()
        self.fallbacks = tuple(fallbacks)
        self.price = price
        self.config_digest = config_digest
        self._failures = Failures(name=name)
        self._missing_key = missing_key
        self._api = api
        self._keep_raw = keep_raw
        url = base_url or api.base_url
        self._endpoint = Endpoint(
            HttpConnection(lambda: api.address(url, key)),
            failures=Failures(name=name, secret=key, url=url),
            timeouts=timeouts or Timeouts(),
        )
        self._limiter = limiter or ModelLimiter(name=name)

    async def stream(
        self, request: ModelRequest, *, meter: AttemptMeter | None = None
    ) -> AsyncGenerator[Deltas | step_pb2.LlmResponse, None]:
        """Make one attempt, as the Model protocol specifies."""
        if self._missing_key:
            raise self._failures.unavailable(f"has no key: {self._missing_key}")
        try:
            body = self._api.body(request, model=self.model, name=self.name)
        except BadSettings as error:
            raise self._failures.unusable(f"cannot be called: {error}") from error
        meter = meter or AttemptMeter()
        async with self._limiter.admit(request, meter):
            answer = self._api.answer(meter, name=self.name, keeps_raw=self._keep_raw)
            items = self._endpoint.stream(self._api.path, body, answer, provider=self.provider, model=self.model)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()
