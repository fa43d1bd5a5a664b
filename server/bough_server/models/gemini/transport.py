"""Connections to the Gemini API; the only importer of google.genai.

The `google-genai` client, loaded on first use, addresses and signs requests and reads refusals. It builds a typed
object for every chunk of an answer, and drops fields that it does not know; so its HTTP client is one that hands over
answers before they are read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from bough_server.models.endpoint import Endpoint, ProviderRefusal, Timeouts, freeze_imports, is_loopback
from bough_server.models.failures import Failures

if TYPE_CHECKING:
    import httpx2
    from google import genai


GEMINI_BASE_URL: Final = "https://generativelanguage.googleapis.com"
_API_VERSION: Final = "v1beta"
_KEY_HEADER: Final = "x-goog-api-key"
_REPLACED: Final = "The contents of the body replace this."


class _Answered(Exception):
    """The head of an answer has arrived; raised through the client, which would read the answer itself."""

    def __init__(self, response: "httpx2.Response") -> None:
        super().__init__("The head of an answer has arrived.")
        self.response = response


class GeminiConnection:
    """The `google-genai` client of one address."""

    def __init__(self, *, base_url: str, key: str = "") -> None:
        """An empty `key` sends none."""
        self._base_url = base_url
        self._key = key
        self._http: httpx2.AsyncClient | None = None
        self._client: genai.Client | None = None

    def load(self) -> tuple[type[Exception], ...]:
        """Load the package and return what it raises if a connection fails."""
        with freeze_imports("google.genai"):
            import google.genai  # noqa: F401 - loaded here, used by open()
            import httpx2
        return (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError)

    def open(self) -> None:
        """Create the client."""
        from google import genai

        self._http = _http_client(keeps_key=bool(self._key), trust_env=not is_loopback(self._base_url))
        self._client = genai.Client(
            vertexai=False,
            # Without a key the client would read one from the environment. "none" is never sent.
            api_key=self._key or "none",
            # It neither retries nor limits the time: the runtime and the endpoint do.
            http_options=genai.types.HttpOptions(
                base_url=self._base_url, api_version=_API_VERSION, httpx_async_client=self._http
            ),
        )

    async def send(self, path: str, body: Mapping[str, object]) -> "httpx2.Response":
        """Send a request; `path` is the model's name."""
        from google.genai import errors, types

        assert self._client is not None
        config = types.GenerateContentConfig(
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            automatic_continuation=False,
            http_options=types.HttpOptions(extra_body=dict(body)),
        )
        stream = await self._client.aio.models.generate_content_stream(model=path, contents=_REPLACED, config=config)
        try:
            async for _ in stream:
                break
        except _Answered as answered:
            return answered.response
        except errors.APIError as error:
            headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
            raise ProviderRefusal(error.code, error.details, headers) from None
        raise ValueError("google-genai sent the request by another client than the one that it was given.")

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        http, self._http = self._http, None
        if client is not None:
            client.close()
        if http is not None:
            await http.aclose()


def _http_client(*, keeps_key: bool, trust_env: bool) -> "httpx2.AsyncClient":
    """Return an HTTP client that raises _Answered with the answer to a request that was accepted."""
    import httpx2

    class AnswerClient(httpx2.AsyncClient):
        async def send(self, request: httpx2.Request, **options: object) -> httpx2.Response:
            if not keeps_key:
                request.headers.pop(_KEY_HEADER, None)
            response = await super().send(request, stream=True)
            if response.status_code == 200:
                raise _Answered(response)
            try:
                await response.aread()
            finally:
                await response.aclose()
            return response

    # A redirect would send the key, which is no Authorization, to any host that an answer names.
    return AnswerClient(timeout=None, trust_env=trust_env, follow_redirects=False)


def gemini_endpoint(*, name: str, base_url: str, key: str = "", timeouts: Timeouts) -> Endpoint:
    """Return the endpoint of a configured model."""
    connection = GeminiConnection(base_url=base_url, key=key)
    return Endpoint(connection, failures=Failures(name=name, secret=key, url=base_url), timeouts=timeouts)
