"""Assembles a streamed answer of the Gemini API: chunks in, deltas out, the whole response at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import message_pb2, step_pb2, usage_pb2
from bough_server.models.annotations import AnnotationCollector, Content, ContentPosition
from bough_server.models.answer import ReportedError
from bough_server.models.model import AttemptMeter, Delta, ReasoningDelta, TextDelta, ToolCallDelta, finish_reason_of
from bough_server.models.provider_json import (
    BadChunk,
    TextPieces,
    compact_json,
    count,
    is_object,
    json_object,
    objects,
    piece_of,
    string,
)

_Object = dict[str, object]

_WORDS: Final[Mapping[str, str]] = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter",
    "MODEL_ARMOR": "content_filter",
}
"""Finish reasons in the words that other providers use for them."""
_MALFORMED: Final = frozenset({"MALFORMED_FUNCTION_CALL", "MALFORMED_RESPONSE"})
_CALL_FIELDS: Final = frozenset({"functionCall", "text", "thought"})
_HARMLESS: Final = frozenset({"", "NEGLIGIBLE", "HARM_PROBABILITY_UNSPECIFIED"})


@dataclass(slots=True)
class _Run:
    """Neighboring parts of one kind, or one call."""

    kind: str
    pieces: TextPieces = field(default_factory=TextPieces)
    signature: str = ""
    call: message_pb2.ToolCall | None = None

    def part(self, model: str) -> message_pb2.Part | None:
        """Return the run as a message part; None if it is empty."""
        if self.call is not None:
            return message_pb2.Part(tool_call=self.call)
        text = str(self.pieces)
        if self.kind == "text":
            return message_pb2.Part(text=text) if text else None
        thought = message_pb2.Reasoning(text=text, signature=self.signature)
        if self.signature:
            thought.model = model
        return message_pb2.Part(reasoning=thought) if thought.ByteSize() else None


class StreamedContent:
    """One streamed answer. `name` is the model's name in the configuration. Only the first candidate is read."""

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "") -> None:
        self._meter = meter or AttemptMeter()
        self._name = name
        self._id = ""
        self._model = ""
        self._runs: list[_Run] = []
        self._parts: list[_Object] = []
        self._calls = 0
        self._finish_reason = ""
        self._usage_json: _Object = {}
        self._annotations = AnnotationCollector()

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """Usage as the provider reported it so far; None if it reported none."""
        return self._meter.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider has announced the end of the stream; it never does."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete; a stream that ends before was cut off."""
        return bool(self._finish_reason)

    def apply(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""
        chunk = json_object(data)
        if chunk.get("error"):
            raise ReportedError(chunk["error"])
        self._id = string(chunk.get("responseId")) or self._id
        self._model = string(chunk.get("modelVersion")) or self._model
        if is_object(usage := chunk.get("usageMetadata")):
            self._usage_json |= usage
            self._meter.usage = usage_of(self._usage_json)
        if is_object(feedback := chunk.get("promptFeedback")):
            self._apply_feedback(feedback)
        candidates = objects(chunk.get("candidates"))
        return self._apply_candidate(candidates[0]) if candidates else []

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer, with its parts in their order. `model` is used if the provider names none."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        message.parts.extend(part for run in self._runs if (part := run.part(self._name)) is not None)
        texts = [index for index, part in enumerate(message.parts) if part.text]
        positions: dict[Content, ContentPosition] = (
            {(0, 0): ContentPosition(part_index=texts[0])} if len(texts) == 1 else {}
        )
        word = _WORDS.get(self._finish_reason, self._finish_reason)
        return step_pb2.LlmResponse(
            response_id=self._id,
            provider=provider,
            model=self._model or model,
            message=message,
            finish_reason=finish_reason_of(word, has_calls=self._calls > 0),
            provider_finish_reason=self._finish_reason,
            usage=self.usage,
            raw_json=self._raw(model),
            annotations=self._annotations.build(positions),
        )

    def _apply_feedback(self, feedback: _Object) -> None:
        """Apply what the provider says about the prompt; a blocked one has no candidates."""
        self._rate(feedback.get("safetyRatings"), of_prompt=True)
        if reason := string(feedback.get("blockReason")):
            self._finish_reason = reason if reason in _WORDS else "PROHIBITED_CONTENT"
            blocked: _Object = {reason.lower(): {"filtered": True}}
            self._annotations.add_filter_results(blocked, of_prompt=True)

    def _apply_candidate(self, candidate: _Object) -> list[Delta]:
        content = candidate.get("content")
        parts = objects(content.get("parts")) if is_object(content) else []
        deltas = [delta for part in parts for delta in self._apply_part(part)]
        self._rate(candidate.get("safetyRatings"))
        self._cite(candidate)
        if reason := string(candidate.get("finishReason")):
            self._finish_reason = reason
            if reason in _MALFORMED:
                raise BadChunk(f"it ended with {reason}")
            if _WORDS.get(reason) == "content_filter":
                self._annotations.add_content_filter()
        return deltas

    def _apply_part(self, part: _Object) -> list[Delta]:
        self._parts.append(part)
        if is_object(called := part.get("functionCall")):
            return [self._apply_call(called, part)]
        kind = "thought" if part.get("thought") is True else "text"
        deltas: list[Delta] = []
        if text := piece_of(part.get("text")):
            run = self._run(kind)
            if piece := run.pieces.add(text):
                deltas.append(TextDelta(piece) if kind == "text" else ReasoningDelta(piece))
        if signature := string(part.get("thoughtSignature")):
            # The signature of a text is kept behind it, because a text has no place for one.
            run = self._run("thought") if kind == "thought" else self._add(_Run("signature"))
            run.signature = signature
        return deltas

    def _apply_call(self, called: _Object, part: _Object) -> ToolCallDelta:
        arguments = compact_json(called.get("args") or {})
        call = message_pb2.ToolCall(
            name=string(called.get("name")), arguments_json=arguments, provider_call_id=string(called.get("id"))
        )
        if self._name:  # set without a signature too: a call without its writer's name counts as another model's
            further = {name: value for name, value in part.items() if name not in _CALL_FIELDS}
            call.provider_json, call.model = compact_json(further), self._name
        self._add(_Run("call", call=call))
        self._calls += 1
        return ToolCallDelta(self._calls - 1, arguments, call.provider_call_id, call.name)

    def _run(self, kind: str) -> _Run:
        """Return the run that a part continues; a signature ends one."""
        if self._runs and self._runs[-1].kind == kind and not self._runs[-1].signature:
            return self._runs[-1]
        return self._add(_Run(kind))

    def _add(self, run: _Run) -> _Run:
        self._runs.append(run)
        return run

    def _rate(self, ratings: object, *, of_prompt: bool = False) -> None:
        for rating in objects(ratings):
            severity = "safe" if string(rating.get("probability")) in _HARMLESS else string(rating.get("probability"))
            verdict: _Object = {"filtered": rating.get("blocked") is True, "severity": severity}
            self._annotations.add_filter_results({string(rating.get("category")): verdict}, of_prompt=of_prompt)

    def _cite(self, candidate: _Object) -> None:
        sources: list[_Object] = []
        if is_object(cited := candidate.get("citationMetadata")):
            sources += objects(cited.get("citations")) or objects(cited.get("citationSources"))
        if is_object(grounded := candidate.get("groundingMetadata")):
            self._annotations.add("groundingMetadata", grounded)
            sources += [web for each in objects(grounded.get("groundingChunks")) if is_object(web := each.get("web"))]
        for source in sources:  # their indexes count bytes, so the place in the text is left out
            citation = {"type": "url_citation", "url": source.get("uri"), "title": source.get("title")}
            self._annotations.cite(citation, (0, 0))

    def _raw(self, model: str) -> str:
        candidate: _Object = {
            "content": {"role": "model", "parts": self._parts},
            "finishReason": self._finish_reason or None,
        }
        whole: _Object = {"responseId": self._id, "modelVersion": self._model or model, "candidates": [candidate]}
        return compact_json({**whole, "usageMetadata": self._usage_json} if self._usage_json else whole)


def usage_of(usage: Mapping[str, object]) -> usage_pb2.Usage:
    """Convert a provider's usage, whose candidates' tokens leave out those of thoughts."""
    prompt, of_tools = count(usage.get("promptTokenCount")), count(usage.get("toolUsePromptTokenCount"))
    said, thought = count(usage.get("candidatesTokenCount")), count(usage.get("thoughtsTokenCount"))
    return usage_pb2.Usage(
        input_tokens=None if prompt is None else prompt + (of_tools or 0),
        output_tokens=None if said is None and thought is None else (said or 0) + (thought or 0),
        total_tokens=count(usage.get("totalTokenCount")),
        cached_input_tokens=count(usage.get("cachedContentTokenCount")),
        reasoning_tokens=thought,
    )
