"""Connections to OpenAI-compatible providers; the only importer of openai.

Requests are sent with the `openai` client and its aiohttp transport, loaded on first use.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from bough_server.models.endpoint import Endpoint, ProviderRefusal, Timeouts, is_loopback, long_lived
from bough_server.models.failures import Failures
from bough_server.models.forms import encoded

if TYPE_CHECKING:
    import httpx2
    import openai


OPENAI_BASE_URL: Final = "https://api.openai.com/v1"
_HEADERS: Final = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class OpenAIConnection:
    """The `openai` client of one address."""

    def __init__(self, *, base_url: str, key: str = "", keeps_connections: bool = True) -> None:
        """An empty `key` sends no Authorization. `keeps_connections` False: for servers that drop idle connections."""
        self._base_url = base_url
        self._key = key
        self._keeps_connections = keeps_connections
        self._client: openai.AsyncOpenAI | None = None

    def load(self) -> tuple[type[Exception], ...]:
        """Load the package and return what it raises if a connection fails."""
        return transport_errors()

    def open(self) -> None:
        """Create the client."""
        import openai

        self._client = openai.AsyncOpenAI(
            # Without a key the client would read one from the environment. "none" is never sent.
            api_key=self._key or "none",
            base_url=self._base_url,
            # Retries are recorded by the runtime and timeouts are those of the endpoint.
            max_retries=0,
            timeout=None,
            # A proxy named in the environment cannot reach this machine's loopback.
            http_client=openai.DefaultAioHttpClient(timeout=None, trust_env=not is_loopback(self._base_url)),
        )

    async def send(self, path: str, body: Mapping[str, object]) -> "httpx2.Response":
        """Send a request whose body is JSON."""
        import httpx2
        import openai

        assert self._client is not None
        headers: dict[str, str | openai.Omit] = dict(_HEADERS)
        if not self._key:
            headers["Authorization"] = openai.Omit()
        if not self._keeps_connections:
            headers["Connection"] = "close"
        try:
            # The client's `create` would rebuild and validate the whole request once more.
            response: object = await self._client.post(
                path,
                cast_to=httpx2.Response,
                content=encoded(body),
                options={"headers": headers},
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
        except openai.APIStatusError as error:
            said = error.body if error.body is not None else error.response.text
            raise ProviderRefusal(error.status_code, said, error.response.headers) from None
        return cast(httpx2.Response, response)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def openai_endpoint(
    *, name: str, base_url: str, key: str = "", timeouts: Timeouts, keeps_connections: bool = True
) -> Endpoint:
    """Return the endpoint of a configured model. `keeps_connections` False: for servers that drop idle connections."""
    connection = OpenAIConnection(base_url=base_url, key=key, keeps_connections=keeps_connections)
    return Endpoint(connection, failures=Failures(name=name, secret=key, url=base_url), timeouts=timeouts)


def transport_errors() -> tuple[type[Exception], ...]:
    """Load the client, its HTTP layer and its transport, and return what they raise if a connection fails."""
    with long_lived("openai"):
        import aiohttp
        import httpx2
        import openai
    return (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, aiohttp.ClientError, OSError)
