"""OpenAI's APIs, Chat Completions and Responses: where requests go, their bodies, and how to read answers.

The only importer of `openai`, which is loaded on first use.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from bough_server.models.answer import Answer
from bough_server.models.http import Address, freeze_imports
from bough_server.models.model import ModelRequest
from bough_server.models.openai.chat import Completion
from bough_server.models.openai.chat_request import OPENAI, ChatDialect, chat_body
from bough_server.models.openai.responses import Response
from bough_server.models.openai.responses_request import responses_body
from bough_server.models.structured_output import Body

_BASE_URL: Final = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatApi:
    """The Chat Completions API."""

    path: ClassVar[str] = "/chat/completions"
    base_url: ClassVar[str] = _BASE_URL
    answer: ClassVar[type[Answer]] = Completion
    dialect: ChatDialect = OPENAI

    def address(self, base_url: str, key: str) -> Address:
        """Return where the `openai` client sends requests."""
        return client_address(base_url, key)

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return chat_body(request, model=model, name=name, dialect=self.dialect)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesApi:
    """The Responses API, without storage at the provider."""

    path: ClassVar[str] = "/responses"
    base_url: ClassVar[str] = _BASE_URL
    answer: ClassVar[type[Answer]] = Response
    structured_output: bool = True
    """Whether the provider accepts a JSON schema for its answer; if not, the instruction asks for it."""
    encrypted_reasoning: bool = False
    """Whether to request encrypted reasoning; a provider that sends it unasked has it kept as well."""

    def address(self, base_url: str, key: str) -> Address:
        """Return where the `openai` client sends requests."""
        return client_address(base_url, key)

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return responses_body(
            request,
            model=model,
            name=name,
            encrypted_reasoning=self.encrypted_reasoning,
            structured_output=self.structured_output,
        )


def client_address(base_url: str, key: str) -> Address:
    """Return where the `openai` client sends requests, and the headers with which it signs them and names itself.

    The key and those of an account (`OPENAI_ORG_ID`, `OPENAI_PROJECT_ID`) never change, so that the client is asked
    once. Raises ValueError for an address that is none.
    """
    with freeze_imports("openai"):
        import httpx2
        import openai
    try:
        client = openai.AsyncOpenAI(
            # Without a key the client would read one from the environment. "none" is never sent.
            api_key=key or "none",
            base_url=base_url,
            # It sends nothing. Its default HTTP client would read certificates and proxies.
            http_client=httpx2.AsyncClient(transport=httpx2.AsyncBaseTransport(), trust_env=False),
        )
        signed = client.auth_headers if key else {}
    except (openai.OpenAIError, httpx2.InvalidURL) as error:
        raise ValueError(str(error)) from error
    named = {**signed, **client.default_headers}
    headers = {name: value for name, value in named.items() if isinstance(value, str)}  # others are left out
    return Address(base_url=str(client.base_url), headers=headers, follows_redirects=True)
