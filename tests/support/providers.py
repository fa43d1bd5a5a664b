"""What the models' four APIs have in common, said once: their rules, how an answer begins and ends, and their faults.

`APIS` are the wire formats, `PROVIDERS` also the presets that keep other rules within one of them.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bough.v1 import model_pb2, step_pb2, usage_pb2
from bough_server import tool
from bough_server.models.config import ModelSection
from bough_server.models.model import Model
from bough_server.models.registry import build_models
from tests.support import anthropic_rules, chat_rules, gemini_rules
from tests.support import model_scenarios as chat
from tests.support import response_scenarios as responses
from tests.support.model_scenarios import TEXT, Reply, Request, Scenario, event, refusing
from tests.support.model_server import ModelServer, serving_model
from tests.support.run_harness import RunHarness, open_harness
from tests.support.teams import llm

KEY: Final = "not-shaped-like-a-key"


@tool
def lookup(query: str) -> str:
    """Look a word up."""
    return f"{query}: a tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a turn with the tool `lookup` is by a provider's rules."""

    answer: str = chat_rules.ANSWER
    requests: int = 3
    results: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A reply, and the model's error for it; `reason` without its prefix, `retry` as well."""

    reply: Reply
    reason: str
    retry: str = "UNSPECIFIED"
    status: int = 0
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A provider, as its tests need to know it."""

    facts: Mapping[str, object]
    rules: Scenario
    turn: Turn = field(default_factory=Turn)
    path: str
    begun: Sequence[bytes]
    """The events of an answer that has said `Well`."""
    used: usage_pb2.Usage | None = None
    """What has been reported once it has said so."""
    finish: Callable[[str], Sequence[bytes]]
    """The events that end this answer for a reason."""
    reasons: Mapping[str, step_pb2.FinishReason.ValueType]
    forced: tuple[str, object]
    """The field of a request that says that a tool must be called, and its value."""
    faults: Sequence[Fault]

    def base_url(self, server: ModelServer) -> str:
        """The address to configure."""
        return server.base_url if self.facts.get("provider", "openai") == "openai" else server.root

    def section(self, server: ModelServer, **fields: object) -> ModelSection:
        """The configuration of a model at a fake, whose key is in `KEY`."""
        facts = {"model": "m", "base_url": self.base_url(server), "api_key_env": "KEY", **self.facts, **fields}
        return ModelSection.model_validate(facts)

    @asynccontextmanager
    async def talking(
        self, folder: Path, scenario: Scenario | None = None, **fields: object
    ) -> AsyncIterator[tuple[Model, ModelServer]]:
        """A fake, by default of the rules, and a model `large` that talks to it."""
        async with serving_model(scenario or self.rules) as server:
            models = build_models({"large": self.section(server, **fields)}, secrets={"KEY": KEY}, folder=folder)
            try:
                yield models.get("large"), server
            finally:
                await models.close()

    @asynccontextmanager
    async def harness(
        self, folder: Path, fields: Mapping[str, object] | None = None, **settings: Any
    ) -> AsyncIterator[tuple[RunHarness, ModelServer]]:
        """A harness whose agent `p` has a tool and this provider's model; `settings` are those of its calls."""
        async with serving_model(self.rules) as server:
            models = build_models({"m": self.section(server, **fields or {})}, secrets={"KEY": KEY}, folder=folder)
            chosen = model_pb2.ModelSettings(**settings)
            team = [llm("p", model="m", tools=["lookup"], settings=chosen)]
            async with open_harness(folder, models=models, definitions=team, tools=[lookup]) as harness:
                yield harness, server
            await models.close()


STOP, LENGTH = step_pb2.FINISH_REASON_STOP, step_pb2.FINISH_REASON_LENGTH
FILTERED, OTHER = step_pb2.FINISH_REASON_CONTENT_FILTER, step_pb2.FINISH_REASON_OTHER
ONE_LOOKUP = Turn(answer=TEXT, requests=2, results=1)
USED = usage_pb2.Usage(input_tokens=20, cached_input_tokens=5, output_tokens=50, reasoning_tokens=3, total_tokens=70)

_CHAT_BEGUN = (chat.chunk({"role": "assistant", "content": ""}), chat.chunk({"content": "Well"}, usage=chat.USAGE))
_OPENAI_FAULTS = (
    Fault(
        reply=refusing(401, f"Incorrect API key provided: {KEY}."),
        reason="AUTHENTICATION",
        status=401,
        said="provided: ***",
    ),
    Fault(reply=refusing(403, "Not yours."), reason="AUTHENTICATION", status=403, said="Not yours."),
    Fault(reply=refusing(404, "No such model."), reason="NOT_FOUND", status=404, said="No such model."),
    Fault(
        reply=refusing(400, "This model's maximum context length is 8 tokens.", code="context_length_exceeded"),
        reason="CONTEXT_TOO_LONG",
        status=400,
        said="maximum context length",
    ),
    Fault(
        reply=refusing(429, "You exceeded your quota.", code="insufficient_quota"),
        reason="QUOTA_EXCEEDED",
        status=429,
        said="your quota",
    ),
    Fault(reply=refusing(429, "Slow."), reason="RATE_LIMITED", retry="RATE_LIMITED", status=429, said="Slow."),
    Fault(reply=refusing(500, "Broken."), reason="UNAVAILABLE", retry="PROVIDER_ERROR", status=500, said="Broken."),
)


def _crash(begun: Sequence[bytes], crash: bytes) -> Fault:
    """An answer that its provider ends with an error."""
    reply = Reply(pieces=(*begun, crash))
    return Fault(reply=reply, reason="UNAVAILABLE", retry="PROVIDER_ERROR", said="The model crashed.")


CHAT = Provider(
    facts={"provider": "openai"},
    rules=chat.desk,
    turn=ONE_LOOKUP,
    path="/v1/chat/completions",
    begun=_CHAT_BEGUN,
    used=USED,
    finish=chat.ending,
    reasons={"stop": STOP, "length": LENGTH, "content_filter": FILTERED, "weird": OTHER},
    forced=("tool_choice", "required"),
    faults=(*_OPENAI_FAULTS, _crash(_CHAT_BEGUN, event({"error": {"message": "The model crashed.", "code": 500}}))),
)

_RESPONSE_BEGUN = (responses.beginning(), *responses.text_events(0, "Well")[:-1])


def _finish_response(reason: str) -> Sequence[bytes]:
    said = [responses.message("Well")]
    if reason == "completed":
        return (responses.ending(said),)
    return (responses.ending(said, status="incomplete", incomplete_details={"reason": reason}),)


RESPONSES = Provider(
    facts={"provider": "openai", "api": "responses"},
    rules=responses.desk,
    turn=ONE_LOOKUP,
    path="/v1/responses",
    begun=_RESPONSE_BEGUN,
    finish=_finish_response,
    reasons={"completed": STOP, "max_output_tokens": LENGTH, "content_filter": FILTERED, "weird": OTHER},
    forced=("tool_choice", "required"),
    faults=(
        *_OPENAI_FAULTS,
        _crash(_RESPONSE_BEGUN, event({"type": "error", "code": "server_error", "message": "The model crashed."})),
    ),
)

_MESSAGE_BEGUN = (anthropic_rules.begin(), *anthropic_rules.text_block(0, "Well"))
_refuse_message = anthropic_rules.refusal
ANTHROPIC = Provider(
    facts={"provider": "anthropic", "model": "claude-1"},
    rules=anthropic_rules.rules,
    path="/v1/messages",
    begun=_MESSAGE_BEGUN,
    used=usage_pb2.Usage(
        input_tokens=100, cached_input_tokens=60, cache_write_tokens=30, output_tokens=1, total_tokens=101
    ),
    finish=anthropic_rules.end,
    reasons={
        "end_turn": STOP,
        "stop_sequence": STOP,
        "max_tokens": LENGTH,
        "model_context_window_exceeded": LENGTH,
        "refusal": step_pb2.FINISH_REASON_REFUSAL,
        "pause_turn": OTHER,
    },
    forced=("tool_choice", {"type": "any"}),
    faults=(
        Fault(
            reply=_refuse_message(401, "authentication_error", f"invalid {KEY}"),
            reason="AUTHENTICATION",
            status=401,
            said="invalid ***",
        ),
        Fault(
            reply=_refuse_message(403, "permission_error", "Not yours."),
            reason="AUTHENTICATION",
            status=403,
            said="Not yours.",
        ),
        Fault(
            reply=_refuse_message(404, "not_found_error", "model: claude-1"),
            reason="NOT_FOUND",
            status=404,
            said="model: claude-1",
        ),
        Fault(
            reply=_refuse_message(402, "billing_error", "No credit."),
            reason="QUOTA_EXCEEDED",
            status=402,
            said="No credit.",
        ),
        Fault(
            reply=_refuse_message(400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"),
            reason="CONTEXT_TOO_LONG",
            status=400,
            said="prompt is too long",
        ),
        Fault(
            reply=_refuse_message(413, "request_too_large", "Too large."),
            reason="CONTEXT_TOO_LONG",
            status=413,
            said="Too large.",
        ),
        Fault(
            reply=_refuse_message(429, "rate_limit_error", "Slow."),
            reason="RATE_LIMITED",
            retry="RATE_LIMITED",
            status=429,
            said="Slow.",
        ),
        Fault(
            reply=_refuse_message(529, "overloaded_error", "Overloaded"),
            reason="UNAVAILABLE",
            retry="PROVIDER_ERROR",
            status=529,
            said="Overloaded",
        ),
        _crash(
            _MESSAGE_BEGUN,
            anthropic_rules.event("error", error={"type": "overloaded_error", "message": "The model crashed."}),
        ),
    ),
)

_CONTENT_BEGUN = (gemini_rules.chunk({"text": "Well"}),)
_refuse_content = gemini_rules.refusal
GEMINI = Provider(
    facts={"provider": "gemini", "model": "gemini-3"},
    rules=gemini_rules.rules,
    turn=Turn(results=3),
    path="/v1beta/models/gemini-3:streamGenerateContent",
    begun=_CONTENT_BEGUN,
    used=usage_pb2.Usage(
        input_tokens=100, cached_input_tokens=60, output_tokens=25, reasoning_tokens=7, total_tokens=125
    ),
    finish=lambda reason: [gemini_rules.chunk(finish=reason)],
    reasons={"STOP": STOP, "MAX_TOKENS": LENGTH, "SAFETY": FILTERED, "RECITATION": FILTERED, "OTHER": OTHER},
    forced=("toolConfig", {"functionCallingConfig": {"mode": "ANY"}}),
    faults=(
        Fault(
            reply=_refuse_content(400, "INVALID_ARGUMENT", f"API key {KEY} not valid.", reason="API_KEY_INVALID"),
            reason="AUTHENTICATION",
            status=400,
            said="API key *** not valid.",
        ),
        Fault(
            reply=_refuse_content(403, "PERMISSION_DENIED", "Not yours."),
            reason="AUTHENTICATION",
            status=403,
            said="Not yours.",
        ),
        Fault(
            reply=_refuse_content(404, "NOT_FOUND", "No such model.", is_list=True),
            reason="NOT_FOUND",
            status=404,
            said="No such model.",
        ),
        Fault(
            reply=_refuse_content(
                400, "INVALID_ARGUMENT", "The input token count (9) exceeds the maximum number of tokens."
            ),
            reason="CONTEXT_TOO_LONG",
            status=400,
            said="token count",
        ),
        Fault(
            reply=_refuse_content(429, "RESOURCE_EXHAUSTED", "Slow."),
            reason="RATE_LIMITED",
            retry="RATE_LIMITED",
            status=429,
            said="Slow.",
        ),
        Fault(
            reply=_refuse_content(503, "UNAVAILABLE", "Overloaded."),
            reason="UNAVAILABLE",
            retry="PROVIDER_ERROR",
            status=503,
            said="Overloaded.",
        ),
        Fault(
            reply=Reply(pieces=(*_CONTENT_BEGUN, gemini_rules.chunk(finish="MALFORMED_FUNCTION_CALL"))),
            reason="BAD_RESPONSE",
            retry="BAD_RESPONSE",
            said="MALFORMED_FUNCTION_CALL",
        ),
        _crash(
            _CONTENT_BEGUN,
            event({"error": {"code": 503, "message": "The model crashed.", "status": "UNAVAILABLE"}}),
        ),
    ),
)

APIS: Final[Mapping[str, Provider]] = {
    "chat": CHAT,
    "responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
}
PROVIDERS: Final[Mapping[str, Provider]] = {
    **APIS,
    "deepseek": replace(CHAT, facts={"preset": "deepseek"}, rules=chat_rules.deepseek, turn=Turn()),
    "gemini-chat": replace(CHAT, facts={"preset": "gemini"}, rules=chat_rules.gemini, turn=Turn()),
    "mistral": replace(CHAT, facts={"preset": "mistral"}, rules=chat_rules.mistral, turn=Turn()),
}


def sent_events(pieces: Sequence[bytes]) -> list[Any]:
    """The JSON of events as they are on the wire."""
    lines = b"".join(pieces).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def only(reply: Reply) -> Scenario:
    """A model that answers each request in one way."""

    def answer(request: Request) -> Reply:
        return reply

    return answer
