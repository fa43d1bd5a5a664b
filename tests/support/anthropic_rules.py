"""Anthropic's Messages API as a fake that keeps the API's rules, and answers like one of its models.

It calls `lookup` twice a turn, where that is offered, and says `ANSWER` when it has the results. It thinks if it is
asked to; its second thought is redacted.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tests.support.model_scenarios import Reply, Request

ANSWER: Final = "An oak is a tree."
USAGE: Final = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 30,
    "cache_read_input_tokens": 60,
    "output_tokens": 1,
}
_FIELDS: Final = frozenset(
    {
        "model",
        "messages",
        "max_tokens",
        "stream",
        "system",
        "tools",
        "tool_choice",
        "temperature",
        "top_p",
        "top_k",
        "thinking",
        "output_config",
        "metadata",
        "stop_sequences",
        "service_tier",
    }
)
_ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
_QUERIES: Final = ("oak", "bough")
_ids = itertools.count(1)
_Block = Mapping[str, Any]


def refusal(status: int, kind: str, message: str) -> Reply:
    """A refusal in the API's format."""
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    return Reply(status=status, content_type="application/json", pieces=(json.dumps(body).encode(),))


def event(kind: str, **fields: object) -> bytes:
    """One server-sent event, with its name."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def begin(usage: Mapping[str, int] = USAGE) -> bytes:
    """The first event of an answer."""
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-1", "content": []}
    return event("message_start", message={**message, "stop_reason": None, "usage": usage})


def block(index: int, start: Mapping[str, object], *deltas: Mapping[str, object]) -> list[bytes]:
    """A content block from its start to its stop."""
    return [
        event("content_block_start", index=index, content_block=start),
        *(event("content_block_delta", index=index, delta=delta) for delta in deltas),
        event("content_block_stop", index=index),
    ]


def text_block(index: int, *pieces: str) -> list[bytes]:
    """A text in pieces."""
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": piece} for piece in pieces))


def end(reason: str, **usage: int) -> list[bytes]:
    """The last events of an answer."""
    counts = usage or {"output_tokens": 25, "output_tokens_details": {"thinking_tokens": 7}}
    return [event("message_delta", delta={"stop_reason": reason}, usage=counts), event("message_stop")]


def signed(thought: str) -> str:
    """The signature of a thought."""
    return f"signature of {thought}"


def rules(request: Request) -> Reply:
    """Refuses what the API refuses; else thinks, calls or answers."""
    for problem in _problems(request):
        return refusal(400, "invalid_request_error", problem)
    return _answer(request)


def _problems(request: Request) -> Iterator[str]:
    yield from (f"{name}: Extra inputs are not permitted" for name in sorted(request.keys() - _FIELDS))
    if not isinstance(request.get("max_tokens"), int) or request["max_tokens"] < 1:
        yield "max_tokens: Field required"
    roles = [message["role"] for message in request["messages"]]
    if not roles or roles[0] != "user" or any(a == b for a, b in itertools.pairwise(roles)):
        yield 'messages: roles must alternate between "user" and "assistant", and begin with "user"'
    if roles[-1:] != ["user"]:
        yield "This model does not support assistant message prefill."
    blocks = [each for message in request["messages"] for each in message["content"]]
    if any(each["type"] == "text" and not each["text"].strip() for each in blocks):
        yield "messages: text content blocks must contain non-whitespace text"
    if sum("cache_control" in each for each in (*blocks, *request.get("system", ()), *request.get("tools", ()))) > 4:
        yield "A maximum of 4 blocks with cache_control may be provided."
    if any(tool.get("input_schema", {}).get("type") != "object" for tool in request.get("tools", ())):
        yield "tools.0.custom.input_schema.type: Field required"
    if any(each["type"] == "tool_use" for each in blocks) and not request.get("tools"):
        yield "Requests which have `tool_use` or `tool_result` blocks in conversation history must define tools."
    yield from _call_problems(request["messages"])
    yield from _thinking_problems(request)


def _call_problems(messages: Sequence[_Block]) -> Iterator[str]:
    called: list[str] = []
    for number, message in enumerate(messages):
        results = [each["tool_use_id"] for each in message["content"] if each["type"] == "tool_result"]
        leading = [each["tool_use_id"] for each in message["content"][: len(results)] if each["type"] == "tool_result"]
        if sorted(leading) != sorted(called):
            yield (
                f"messages.{number}: `tool_use` ids were found without `tool_result` blocks immediately after: "
                f"{', '.join(called)}. Each `tool_use` block must have a corresponding `tool_result` block in the next."
            )
        called = [each["id"] for each in message["content"] if each["type"] == "tool_use"]
        if any(not _ID.fullmatch(each) for each in called):
            yield f"messages.{number}.content.0.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"


def _thinking_problems(request: Request) -> Iterator[str]:
    thinking = request.get("thinking", {"type": "disabled"})
    for thought in (each for message in request["messages"] for each in message["content"]):
        if thought["type"] == "thinking" and thought["signature"] != signed(thought["thinking"]):
            yield "messages.1.content.0: Invalid `signature` in `thinking` block"
        if thought["type"] == "redacted_thinking" and not thought["data"].startswith("redacted/"):
            yield "messages.1.content.0: Invalid `data` in `redacted_thinking` block"
    if thinking["type"] == "disabled":
        return
    if request.get("tool_choice", {}).get("type") in ("any", "tool"):
        yield "Thinking may not be enabled when tool_choice forces tool use."
    if thinking.get("budget_tokens", 1024) < 1024 or thinking.get("budget_tokens", 0) >= request["max_tokens"]:
        yield "`max_tokens` must be greater than `thinking.budget_tokens`."
    for message in _current_turn(request["messages"]):
        first = message["content"][0]["type"]
        calls = any(each["type"] == "tool_use" for each in message["content"])
        if thinking["type"] == "enabled" and calls and first not in ("thinking", "redacted_thinking"):
            yield (
                f"messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `{first}`. When "
                "`thinking` is enabled, a final `assistant` message must start with a thinking block."
            )


def _current_turn(messages: Sequence[_Block]) -> list[_Block]:
    """The messages since the user's last words."""
    turn: list[_Block] = []
    for message in reversed(messages):
        if message["role"] == "user" and message["content"][0]["type"] != "tool_result":
            break
        turn.append(message)
    return turn


def _answer(request: Request) -> Reply:
    turn = _current_turn(request["messages"])
    made = sum(each["type"] == "tool_result" for message in turn for each in message["content"])
    thinks = request.get("thinking", {}).get("type") in ("enabled", "adaptive")
    has_tool = any(tool["name"] == "lookup" for tool in request.get("tools", ()))
    query = _QUERIES[made] if has_tool and made < len(_QUERIES) else None
    events = [begin(), event("ping")]
    thought = f"I think of {query}."
    if thinks and made == 1:
        events += block(0, {"type": "redacted_thinking", "data": f"redacted/{query}"})
    elif thinks:
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in (thought[:7], thought[7:])]
        start = {"type": "thinking", "thinking": "", "signature": ""}
        events += block(0, start, *deltas, {"type": "signature_delta", "signature": signed(thought)})
    if query is None:
        return Reply(pieces=(*events, *text_block(1, "An oak ", "is a tree."), *end("end_turn")))
    arguments = json.dumps({"query": query})
    pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", arguments[:5], arguments[5:])]
    call = {"type": "tool_use", "id": f"toolu_{next(_ids)}", "name": "lookup", "input": {}}
    return Reply(pieces=(*events, *text_block(1, "Let me look."), *block(2, call, *pieces), *end("tool_use")))
