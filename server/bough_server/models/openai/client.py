"""OpenAI's APIs, Chat Completions and Responses: their paths, the format of their requests, and how to read answers."""

from dataclasses import dataclass
from typing import ClassVar

from bough_server.models.answer import Answer
from bough_server.models.model import AttemptMeter, ModelRequest
from bough_server.models.openai.chat import Completion
from bough_server.models.openai.chat_request import OPENAI, ChatDialect, chat_body
from bough_server.models.openai.responses import Response
from bough_server.models.openai.responses_request import responses_body
from bough_server.models.structured_output import Body


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
