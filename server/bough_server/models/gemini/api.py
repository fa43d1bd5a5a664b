"""The Gemini API: the format of its requests, and how to read its answers."""

from dataclasses import dataclass

from bough_server.models.answer import Answer
from bough_server.models.gemini.content import StreamedContent
from bough_server.models.gemini.request import gemini_body
from bough_server.models.model import AttemptMeter, ModelRequest
from bough_server.models.structured_output import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiApi:
    """The Gemini API of one model."""

    path: str
    """The provider's name of the model, which is in the address."""
    structured_output: bool = True
    """Whether the model accepts a JSON schema for its answer; if not, the instruction asks for it."""

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return gemini_body(request, name=name, structured_output=self.structured_output)

    def answer(self, meter: AttemptMeter, *, name: str) -> Answer:
        """Return a new answer, to which events can be applied; `meter` receives its usage."""
        return StreamedContent(meter, name=name)
