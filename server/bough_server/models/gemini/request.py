"""The Gemini API: where its requests go, and their bodies.

Its rules: as many function responses as calls, in the content after them; calls of Gemini 3 with the signature that
they came with; the first and the last content the user's; no empty part.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final
from urllib.parse import quote

from bough.v1 import message_pb2, model_pb2
from bough_server.models.answer import Answer
from bough_server.models.gemini.content import StreamedContent
from bough_server.models.http import Address
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.models.structured_output import (
    Body,
    arguments_object,
    blob_to_text,
    further_settings,
    instruction_with_schema,
    part_to_text,
    provider_data,
    result_text,
)

FOREIGN_SIGNATURE: Final = "skip_thought_signature_validator"
"""What the API takes for the signature of a call that another model made."""

_OURS: Final = frozenset(
    {"model", "contents", "systemInstruction", "system_instruction", "tools", "cachedContent", "cached_content"}
)
"""Parameters that `extra_json` may not set."""
_COLLECTIONS: Final = ("models/", "tunedModels/")
"""What the full names of models begin with."""
_INLINE: Final = ("image/", "audio/", "video/", "application/pdf")
_LEFT_OUT: Final = "[Earlier messages are left out.]"
_GO_ON: Final = "Continue."
_EMPTY: Final = "[empty]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiApi:
    """The Gemini API of one model."""

    base_url: ClassVar[str] = "https://generativelanguage.googleapis.com"
    answer: ClassVar[type[Answer]] = StreamedContent
    model: str
    """The provider's name of the model, which is in the path."""
    structured_output: bool = True
    """Whether the model accepts a JSON schema for its answer; if not, the instruction asks for it."""

    @property
    def path(self) -> str:
        """Path below the base URL."""
        name = self.model if self.model.startswith(_COLLECTIONS) else f"models/{self.model}"
        return f"/v1beta/{quote(name)}:streamGenerateContent?alt=sse"

    def address(self, base_url: str, key: str) -> Address:
        """Return where requests go, with the key if there is one."""
        return Address(base_url=base_url, headers={"x-goog-api-key": key} if key else {})

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return gemini_body(request, name=name, structured_output=self.structured_output)


def gemini_body(request: ModelRequest, *, name: str, structured_output: bool = True) -> Body:
    """Build the body of a streamed answer, without the model, which is in the path. Raises BadSettings.

    `name` is the model's name in the configuration: only signatures of that model are sent back.
    """
    schema, instruction = request.output_schema_json, request.instruction
    has_format = bool(schema) and structured_output and not request.tools
    if schema and not has_format:  # models before Gemini 3 refuse a format beside tools
        instruction = instruction_with_schema(instruction, schema)
    body: Body = {"contents": contents(request.messages, name=name)}
    if instruction:
        body["systemInstruction"] = {"parts": [{"text": instruction}]}
    if request.tools:
        body["tools"] = [{"functionDeclarations": [_tool(tool) for tool in request.tools]}]
    further = further_settings(request.settings.extra_json, ours=_OURS) if request.settings.extra_json else {}
    generation = _generation(request.settings, further.pop("generationConfig", None))
    if has_format:
        generation |= {"responseMimeType": "application/json", "responseJsonSchema": json.loads(schema)}
    body |= further
    if generation:
        body["generationConfig"] = generation
    if request.tool_choice == "required":  # overrides extra_json: the caller cannot use a text answer
        body["toolConfig"] = {"functionCallingConfig": {"mode": "ANY"}}
    return body


def _generation(settings: model_pb2.ModelSettings, further: object) -> Body:
    generation: Body = {}
    if settings.HasField("temperature"):
        generation["temperature"] = settings.temperature
    if settings.HasField("top_p"):
        generation["topP"] = settings.top_p
    if settings.HasField("max_output_tokens"):
        generation["maxOutputTokens"] = settings.max_output_tokens
    return {**generation, **further} if isinstance(further, dict) else generation


def contents(messages: Sequence[message_pb2.Message], *, name: str = "") -> list[Body]:
    """Return the messages in the API's format; neighbors of one role and kind are joined."""
    bodies: list[Body] = []
    last = ""
    for kind, parts in _order_parts(messages, name):
        if kind == last:
            bodies[-1] = {"role": bodies[-1]["role"], "parts": [*_parts_of(bodies[-1]), *parts]}
        else:
            bodies.append({"role": "model" if kind == "model" else "user", "parts": parts})
        last = kind
    if not bodies or bodies[0]["role"] != "user":
        bodies.insert(0, {"role": "user", "parts": [{"text": _LEFT_OUT}]})
    if bodies[-1]["role"] != "user":
        bodies.append({"role": "user", "parts": [{"text": _GO_ON}]})
    return bodies


def _parts_of(body: Body) -> list[Body]:
    parts = body["parts"]
    return parts if isinstance(parts, list) else []


def _order_parts(messages: Sequence[message_pb2.Message], name: str) -> Iterator[tuple[str, list[Body]]]:
    """Yield parts by kind; the files of results come after all results, which the API wants in one message."""
    files: list[Body] = []
    for message in messages:
        for kind, parts in _parts_by_kind(message, name):
            if kind == "files":
                files += parts
                continue
            if files and kind != "results":
                yield "user", files
                files = []
            yield kind, parts
    if files:
        yield "user", files


def _parts_by_kind(message: message_pb2.Message, name: str) -> Iterator[tuple[str, list[Body]]]:
    """Yield parts of the kinds model, results, files of results, and user."""
    if message.role == message_pb2.ROLE_ASSISTANT:
        if parts := list(_model(message.parts, name)):
            yield "model", parts
        return
    results = [part.tool_result for part in message.parts if part.HasField("tool_result")]
    if not results:
        yield "user", _user(message.parts) or [{"text": _EMPTY}]
        return
    yield "results", [_result(result) for result in results]
    for result in results:
        if files := [part for part in result.parts if part.HasField("blob") and _is_sent(part.blob)]:
            yield "files", [{"text": f"[files of {result.call.name}]"}, *_user(files)]


def _model(parts: Sequence[message_pb2.Part], name: str) -> Iterator[Body]:
    has_call = False
    for part in parts:
        if part.HasField("tool_call"):
            yield _call(part.tool_call, name, is_first=not has_call)
            has_call = True
        elif part.HasField("reasoning"):
            thought = part.reasoning
            if thought.signature and thought.model == name:
                is_thought = {"thought": True} if thought.text else {}
                yield {"text": thought.text, **is_thought, "thoughtSignature": thought.signature}
        elif text := part_to_text(part):
            yield {"text": text}


def _call(call: message_pb2.ToolCall, name: str, *, is_first: bool) -> Body:
    arguments = arguments_object(call.arguments_json)
    body: Body = {"functionCall": {"id": call.call_id, "name": call.name, "args": arguments}}
    if call.model == name:
        return {**provider_data(call.provider_json), **body}
    # Of parallel calls only the first one has a signature.
    return {**body, "thoughtSignature": FOREIGN_SIGNATURE} if is_first else body


def _result(result: message_pb2.ToolResult) -> Body:
    outcome = {"error" if result.HasField("error") else "output": result_text(result, apart=_is_sent)}
    return {"functionResponse": {"id": result.call.call_id, "name": result.call.name, "response": outcome}}


def _user(parts: Sequence[message_pb2.Part]) -> list[Body]:
    return [body for part in parts if (body := _user_part(part)) != {"text": ""}]


def _user_part(part: message_pb2.Part) -> Body:
    return _blob(part.blob) if part.HasField("blob") else {"text": part_to_text(part)}


def _is_sent(blob: message_pb2.Blob) -> bool:
    """Return whether the API has a place for a file; else it is said in words."""
    return blob.media_type.startswith(_INLINE)


def _blob(blob: message_pb2.Blob) -> Body:
    if not _is_sent(blob):
        return {"text": blob_to_text(blob)}
    if blob.uri:
        return {"fileData": {"mimeType": blob.media_type, "fileUri": blob.uri}}
    return {"inlineData": {"mimeType": blob.media_type, "data": base64.b64encode(blob.data).decode()}}


@lru_cache(maxsize=1024)
def _tool(spec: ToolSpec) -> Body:
    # Cached, so shared by all requests with this tool: never modified.
    body: Body = {"name": spec.name, "description": spec.description}
    return {**body, "parametersJsonSchema": json.loads(spec.input_schema_json)} if spec.input_schema_json else body
