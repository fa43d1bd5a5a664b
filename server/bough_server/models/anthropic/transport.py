"""Connections to Anthropic's Messages API; the only importer of anthropic.

Requests are sent with the `anthropic` client and its aiohttp transport, loaded on first use.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from bough_server.models.endpoint import Endpoint, ProviderRefusal, Timeouts, freeze_imports, is_loopback
from bough_server.models.failures import Failures
from bough_server.models.forms import encode_body

if TYPE_CHECKING:
    import anthropic
    import httpx2


ANTHROPIC_BASE_URL: Final = "https://api.anthropic.com"
_HEADERS: Final = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class AnthropicConnection:
    """The `anthropic` client of one address."""

    def __init__(self, *, base_url: str, key: str = "") -> None:
        """An empty `key` sends no Authorization."""
        self._base_url = base_url
        self._key = key
        self._client: anthropic.AsyncAnthropic | None = None

    def load(self) -> tuple[type[Exception], ...]:
        """Load the package and return what it raises if a connection fails."""
        with freeze_imports("anthropic"):
            import aiohttp
            import anthropic
            import httpx2
        return (
            anthropic.AnthropicError,
            httpx2.HTTPError,
            httpx2.InvalidURL,
            httpx2.StreamError,
            aiohttp.ClientError,
            OSError,
        )

    def open(self) -> None:
        """Create the client."""
        import anthropic

        self._client = anthropic.AsyncAnthropic(
            # Without a key the client would look for credentials in the environment and in files. "none" is never sent.
            api_key=self._key or "none",
            base_url=self._base_url,
            # Retries are recorded by the runtime and timeouts are those of the endpoint.
            max_retries=0,
            timeout=None,
            # Model calls have spans already, and its own may hold what users wrote.
            open_telemetry=False,
            http_client=anthropic.DefaultAioHttpClient(
                timeout=None,
                # A proxy named in the environment cannot reach this machine's loopback.
                trust_env=not is_loopback(self._base_url),
                # A redirect would send the key, which is no Authorization, to any host that an answer names.
                follow_redirects=False,
            ),
        )

    async def send(self, path: str, body: Mapping[str, object]) -> "httpx2.Response":
        """Send a request whose body is JSON."""
        import anthropic
        import httpx2

        assert self._client is not None
        headers: dict[str, str | anthropic.Omit] = dict(_HEADERS)
        if not self._key:
            headers["Authorization"] = anthropic.Omit()
        try:
            # The client's `create` would rebuild the whole request, and build a typed object for every event.
            response: object = await self._client.post(
                path,
                cast_to=httpx2.Response,
                content=encode_body(body),
                options={"headers": headers},
                stream=True,
                stream_cls=anthropic.AsyncStream[object],
            )
        except anthropic.APIStatusError as error:
            said = error.body if error.body is not None else error.response.text
            raise ProviderRefusal(error.status_code, said, error.response.headers) from None
        return cast(httpx2.Response, response)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def anthropic_endpoint(*, name: str, base_url: str, key: str = "", timeouts: Timeouts) -> Endpoint:
    """Return the endpoint of a configured model."""
    connection = AnthropicConnection(base_url=base_url, key=key)
    return Endpoint(connection, failures=Failures(name=name, secret=key, url=base_url), timeouts=timeouts)
