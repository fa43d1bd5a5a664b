"""Assembles streamed answers of Chat Completions: chunks in, deltas out, the whole response at the end."""

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from bough.v1 import message_pb2, usage_pb2
from bough_server.models.answer import DONE, Answer, ReportedError, StreamedPart
from bough_server.models.model import AttemptMeter, Delta, TextDelta, ToolCallDelta
from bough_server.models.provider_json import (
    BadChunk,
    compact_json,
    count,
    is_object,
    json_object,
    objects,
    piece_of,
    string,
)

_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
_DETAIL_TEXTS: Final = frozenset({"text", "summary", "data"})
"""Fields of `reasoning_details` that come in pieces."""
_READ: Final = frozenset({"id", "object", "created", "model", "choices", "usage", "obfuscation"})
"""Fields of every chunk; `obfuscation` is padding that hides the chunk's length."""
_NOTED: Final = frozenset({"prompt_filter_results", "citations", "error"})
"""Other fields that are read; all further ones are recorded as extra annotations."""
_TEXT: Final = "text"
"""Key of the answer's text, of which there is at most one."""

_CALL_FIELDS: Final = frozenset({"index", "id", "type", "function"})
"""Fields of every tool call; what a server adds to them is sent back to it."""


class _PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str | None = None
    role: str | None = None
    refusal: None = None
    tool_calls: None = None


class _PlainChoice(msgspec.Struct, forbid_unknown_fields=True):
    delta: _PlainDelta
    index: Literal[0] = 0
    finish_reason: None = None
    logprobs: None = None


class _PlainChunk(msgspec.Struct, forbid_unknown_fields=True):
    """A chunk that holds a piece of text and nothing else that is read, as nearly all are.

    It is decoded in a sixth of the time that the general way takes. Any other field or type makes the decoder refuse
    it, and the chunk is read in the general way, which loses nothing.
    """

    choices: tuple[_PlainChoice]
    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    usage: None = None
    obfuscation: str = ""
    service_tier: str | None = None
    system_fingerprint: str | None = None


_plain_chunks: Final = msgspec.json.Decoder(_PlainChunk)


class Completion(Answer):
    """One streamed answer of Chat Completions. Only the first choice is read."""

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "", keeps_raw: bool = False) -> None:
        super().__init__(meter, name=name, keeps_raw=keeps_raw)
        self._created = 0
        self._text = StreamedPart("text")
        self._reasoning = StreamedPart("thought")
        self._reasoning_field = ""
        self._reasoning_details: list[dict[str, object]] = []
        self._refusal: list[str] = []
        self._call_parts: list[StreamedPart] = []
        self._latest: dict[int, int] = {}
        self._usage_json: dict[str, object] | None = None

    def _read(self, data: bytes) -> list[Delta]:
        if data == DONE:
            self._is_done = True
            return []
        try:
            return self._apply_plain(_plain_chunks.decode(data))
        except ValueError:
            return self._apply_general(json_object(data))

    def _apply_plain(self, chunk: _PlainChunk) -> list[Delta]:
        if not self._id:
            self._id, self._model = chunk.id, chunk.model or self._model
            self._created = chunk.created or self._created
        self._annotations.add("service_tier", chunk.service_tier)
        self._annotations.add("system_fingerprint", chunk.system_fingerprint)
        return self._text.add(chunk.choices[0].delta.content or "")

    def _apply_general(self, chunk: dict[str, object]) -> list[Delta]:
        if chunk.get("error"):
            raise ReportedError(chunk["error"])
        if not self._id:
            self._read_head(chunk)
        if chunk.keys() - _READ:
            self._note(chunk)
        usage = chunk.get("usage")
        if is_object(usage):
            self._usage_json = usage
            self._meter.usage = usage_of(usage)
        choices = chunk.get("choices")
        if not choices:
            return []
        if not isinstance(choices, list) or not is_object(choices[0]):
            raise BadChunk("without a list of choices")
        return self._apply_choice(choices[0])

    def _parts(self) -> Iterable[tuple[int | str, StreamedPart]]:
        """Return the reasoning, then the text, then the calls."""
        if self._name and (self._reasoning.pieces or self._reasoning_details):
            thought = self._reasoning.thought
            thought.provider_field, thought.model = self._reasoning_field, self._name
            if self._reasoning_details:
                thought.provider_json = compact_json({"reasoning_details": self._reasoning_details})
        return [("reasoning", self._reasoning), (_TEXT, self._text), *enumerate(self._call_parts)]

    def _read_head(self, chunk: dict[str, object]) -> None:
        self._id = string(chunk.get("id"))
        self._model = string(chunk.get("model")) or self._model
        created = chunk.get("created")
        if isinstance(created, int):
            self._created = created

    def _note(self, chunk: dict[str, object]) -> None:
        self._annotations.add_prompt_filter_results(chunk.get("prompt_filter_results"))
        self._annotations.cite_addresses(chunk.get("citations"))
        for name in sorted(chunk.keys() - _READ - _NOTED):
            self._annotations.add(name, chunk[name])

    def _apply_choice(self, choice: dict[str, object]) -> list[Delta]:
        if choice.get("index"):
            return []
        if finish := choice.get("finish_reason"):
            self._finish_reason = string(finish)
            if finish == "content_filter":
                self._annotations.add_content_filter()
        if filters := choice.get("content_filter_results"):
            self._annotations.add_filter_results(filters)
        delta = choice.get("delta")
        return self._apply_delta(delta) if is_object(delta) else []

    def _apply_delta(self, delta: dict[str, object]) -> list[Delta]:
        deltas = self._apply_reasoning(delta)
        for thought, text in content_pieces(delta.get("content")):
            deltas += [*self._reasoning.add(thought), *self._text.add(text)]
        if refusal := self._text.add(piece_of(delta.get("refusal"))):
            self._refusal += [each.text for each in refusal if isinstance(each, TextDelta)]
            self._is_refused = True
            self._annotations.add_refusal()
            deltas += refusal
        for cited in objects(delta.get("annotations")):
            self._annotations.cite(cited, (_TEXT, 0))
        deltas.extend(self._apply_call(call) for call in objects(delta.get("tool_calls")))
        return deltas

    def _apply_reasoning(self, delta: dict[str, object]) -> list[Delta]:
        for detail in objects(delta.get("reasoning_details")):
            _join_detail(self._reasoning_details, detail)
        for name in _REASONING_FIELDS:
            if thought := piece_of(delta.get(name)):
                self._reasoning_field = name
                return self._reasoning.add(thought)
        return []

    def _apply_call(self, piece: dict[str, object]) -> ToolCallDelta:
        """Apply a piece of a tool call."""
        value = piece.get("function")
        function = value if is_object(value) else {}
        name, arguments = string(function.get("name")), piece_of(function.get("arguments"))
        call_id, index = string(piece.get("id")), piece.get("index")
        key = index if isinstance(index, int) else 0
        position = self._latest.get(key)
        # Some servers send no index, or the same one for all calls: a new id then begins a new call.
        is_new = position is None or bool(
            call_id and name and self._call_parts[position].call.provider_call_id != call_id
        )
        if is_new:
            self._latest[key] = self._calls
            self._call_parts.append(self._begin_call(name, call_id))
        part = self._call_parts[self._latest[key]]
        self._keep_further(part.call, piece)
        shown = part.pieces.add(arguments)
        if is_new:
            return ToolCallDelta(part.position, shown, call_id, name)
        late_name = name if not part.call.name else ""
        part.call.name = part.call.name or name
        return ToolCallDelta(part.position, shown, name=late_name)

    def _keep_further(self, call: message_pb2.ToolCall, piece: dict[str, object]) -> None:
        """Keep fields that the API does not have, such as `extra_content` with a signature, for this model alone."""
        further = {name: value for name, value in piece.items() if name not in _CALL_FIELDS and value is not None}
        if further and self._name:
            kept = json_object(call.provider_json.encode()) if call.provider_json else {}
            call.provider_json, call.model = compact_json(kept | further), self._name

    def _whole(self, model: str) -> dict[str, object]:
        text = str(self._text.pieces)
        message: dict[str, object] = {"role": "assistant", "content": text if text and not self._refusal else None}
        if self._refusal:
            message["refusal"] = "".join(self._refusal)
        if self._reasoning.pieces:
            message["reasoning_content"] = str(self._reasoning.pieces)
        if self._call_parts:
            message["tool_calls"] = [_raw_call(part) for part in self._call_parts]
        whole: dict[str, object] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": self._finish_reason or None}],
        }
        if self._usage_json is not None:
            whole["usage"] = self._usage_json
        return whole


def _raw_call(part: StreamedPart) -> dict[str, object]:
    """Return a call in the API's format."""
    function = {"name": part.call.name, "arguments": str(part.pieces)}
    return {"id": part.call.provider_call_id, "type": "function", "function": function}


def usage_of(usage: dict[str, object]) -> usage_pb2.Usage:
    """Convert a provider's usage; counts that are absent or of another type stay unset."""
    prompt, completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return usage_pb2.Usage(
        input_tokens=count(usage.get("prompt_tokens")),
        output_tokens=count(usage.get("completion_tokens")),
        total_tokens=count(usage.get("total_tokens")),
        cached_input_tokens=count(prompt.get("cached_tokens")) if is_object(prompt) else None,
        reasoning_tokens=count(completion.get("reasoning_tokens")) if is_object(completion) else None,
    )


def content_pieces(content: object) -> list[tuple[str, str]]:
    """Return the reasoning and the text of a delta's content: a string, or Mistral's list of `thinking` and `text`."""
    if not isinstance(content, list):
        return [("", piece_of(content))]
    return [
        ("".join(piece_of(each.get("text")) for each in objects(piece.get("thinking"))), piece_of(piece.get("text")))
        for piece in objects(content)
    ]


def _join_detail(details: list[dict[str, object]], piece: dict[str, object]) -> None:
    """Join a streamed piece of OpenRouter's `reasoning_details` to the one of its type and index before it."""
    before = details[-1] if details else {}
    if "index" not in piece or any(before.get(name) != piece.get(name) for name in ("type", "index")):
        details.append(dict(piece))
        return
    for name, value in piece.items():
        joined = string(before.get(name)) + string(value) if name in _DETAIL_TEXTS else value
        if value is not None:
            before[name] = joined
