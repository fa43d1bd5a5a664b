"""Anthropic's Messages API: its path, the format of its requests, and how to read its answers."""

from dataclasses import dataclass
from typing import ClassVar

from bough_server.models.answer import Answer
from bough_server.models.anthropic.message import StreamedMessage
from bough_server.models.anthropic.request import messages_body
from bough_server.models.model import AttemptMeter, ModelRequest
from bough_server.models.structured_output import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesApi:
    """The Messages API."""

    path: ClassVar[str] = "/v1/messages"
    structured_output: bool = True
    """Whether the model accepts a JSON schema for its answer; if not, the instruction asks for it."""
    caches: bool = True
    """Whether requests are marked so that the provider caches what the next one repeats."""

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return messages_body(
            request, model=model, name=name, caches=self.caches, structured_output=self.structured_output
        )

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """Return a new answer, to which events can be applied; `meter` receives its usage."""
        return StreamedMessage(meter, name=name)
