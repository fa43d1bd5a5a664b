"""Assembles a streamed answer of the Gemini API: chunks in, deltas out, the whole response at the end."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, Literal

from bough.v1 import usage_pb2
from bough_server.models.annotations import Content, ContentPosition
from bough_server.models.answer import Answer, ReportedError, StreamedPart
from bough_server.models.model import AttemptMeter, Delta, ToolCallDelta
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
_ANSWER: Final[Content] = (0, 0)
"""Key of the answer's text in citations."""
_HARMLESS: Final = frozenset({"", "NEGLIGIBLE", "HARM_PROBABILITY_UNSPECIFIED"})


class StreamedContent(Answer):
    """One streamed answer of the Gemini API. Only the first candidate is read."""

    words = _WORDS

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "", keeps_raw: bool = False) -> None:
        super().__init__(meter, name=name, keeps_raw=keeps_raw)
        self._runs: list[StreamedPart] = []
        """Neighboring parts of one kind are one, and each call is one."""
        self._raw_parts: list[_Object] = []
        self._usage_json: _Object = {}

    def _read(self, data: bytes) -> list[Delta]:
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

    def _parts(self) -> Iterable[tuple[int, StreamedPart]]:
        return enumerate(self._runs)

    def _positions(self, key: int | str, part_index: int) -> Mapping[Content, ContentPosition]:
        """Return the position of the only text: with several it is not known which one a citation is for."""
        if self._runs[int(key)].kind != "text":
            return {}
        # The second one decides: listing all of them for each would take quadratic time.
        texts = islice((number for number, run in self._parts() if run.kind == "text" and run.pieces), 2)
        return {_ANSWER: ContentPosition(part_index=part_index)} if list(texts) == [key] else {}

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
        self._raw_parts.append(part)
        if is_object(called := part.get("functionCall")):
            return [self._apply_call(called, part)]
        kind: Literal["text", "thought"] = "thought" if part.get("thought") is True else "text"
        text, signature = piece_of(part.get("text")), string(part.get("thoughtSignature"))
        deltas = self._run(kind).add(text) if text else []
        if signature:
            # The signature of a text is kept behind it, because a text has no place for one.
            thought = (self._run("thought") if kind == "thought" else self._add(StreamedPart("thought"))).thought
            thought.signature, thought.model = signature, self._name
        return deltas

    def _apply_call(self, called: _Object, part: _Object) -> ToolCallDelta:
        run = self._add(self._begin_call(string(called.get("name")), string(called.get("id"))))
        arguments = run.pieces.add(compact_json(called.get("args") or {}))
        if self._name:  # set without a signature too: a call without its writer's name counts as another model's
            further = {name: value for name, value in part.items() if name not in _CALL_FIELDS}
            run.call.provider_json, run.call.model = compact_json(further), self._name
        return ToolCallDelta(run.position, arguments, run.call.provider_call_id, run.call.name)

    def _run(self, kind: Literal["text", "thought"]) -> StreamedPart:
        """Return the run that a part continues; a signature ends one."""
        if self._runs and self._runs[-1].kind == kind and not self._runs[-1].thought.signature:
            return self._runs[-1]
        return self._add(StreamedPart(kind))

    def _add(self, run: StreamedPart) -> StreamedPart:
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
            self._annotations.cite(citation, _ANSWER)

    def _whole(self, model: str) -> _Object:
        candidate: _Object = {
            "content": {"role": "model", "parts": self._raw_parts},
            "finishReason": self._finish_reason or None,
        }
        whole: _Object = {"responseId": self._id, "modelVersion": model, "candidates": [candidate]}
        return {**whole, "usageMetadata": self._usage_json} if self._usage_json else whole


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
