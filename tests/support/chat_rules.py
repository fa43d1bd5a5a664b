"""Chat completions of providers that refuse what OpenAI takes: each fake keeps its provider's rules, then answers.

Each calls `lookup` once or twice a turn, and says `ANSWER` when it has the results.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.support.model_scenarios import DONE, Reply, Request, chunk, ending, offered, refusing, results

ANSWER: Final = "An oak is a tree."
DEEPSEEK_RULE: Final = "The `reasoning_content` in the thinking mode must be passed back to the API."
DEEPSEEK_CHOICE: Final = "Thinking mode does not support this tool_choice"
GEMINI_RULE: Final = "Function call is missing a thought_signature in functionCall parts."

_ids = itertools.count(1)
_QUERIES: Final = ("oak", "bough")
_ANSWERED: Final = (chunk({"role": "assistant", "content": ANSWER}), *ending("stop"))
_MISTRAL_FIELDS: Final = frozenset(
    {
        "model",
        "messages",
        "temperature",
        "top_p",
        "max_tokens",
        "stream",
        "stop",
        "random_seed",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "safe_prompt",
    }
)
_MISTRAL_MESSAGES: Final = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "prefix"},
    "tool": {"role", "content", "tool_call_id", "name"},
}


def tool_call(query: str, **further: object) -> dict[str, object]:
    """A call of `lookup` as it comes in one piece."""
    function = {"name": "lookup", "arguments": json.dumps({"query": query})}
    return {"index": 0, "id": f"call_{next(_ids)}", "type": "function", "function": function, **further}


def _next_query(request: Request) -> str | None:
    """What to look up next; None where everything was, or no tool is offered."""
    made = results(request)
    return _QUERIES[made] if made < len(_QUERIES) and "lookup" in offered(request) else None


def _calling(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message for message in messages if message["role"] == "assistant" and message.get("tool_calls")]


def deepseek(request: Request) -> Reply:
    """A thinking model: messages that call tools must have reasoning_content, which may be empty, and none is forced.

    Its second call has no reasoning.
    """
    if request.get("tool_choice") not in (None, "auto", "none"):
        return refusing(400, DEEPSEEK_CHOICE, code="invalid_request_error")
    if request.get("response_format", {}).get("type") == "json_schema":
        return refusing(400, "This response_format type is unavailable now", code="invalid_request_error")
    if any(message.get("reasoning_content") is None for message in _calling(request["messages"])):
        return refusing(400, DEEPSEEK_RULE, code="invalid_request_error")
    query = _next_query(request)
    thoughts = [chunk({"reasoning_content": piece}) for piece in ("I look ", f"for {query}.")]
    if query is None:
        return Reply(pieces=(*thoughts, *_ANSWERED))
    pieces = (*(thoughts if query == "oak" else ()), chunk({"tool_calls": [tool_call(query)]}))
    return Reply(pieces=(*pieces, *ending("tool_calls")))


def gemini(request: Request) -> Reply:
    """The first call of each message must have the signature that it came with."""
    for message in _calling(request["messages"]):
        first = message["tool_calls"][0]
        query = json.loads(first["function"]["arguments"])["query"]
        if first.get("extra_content") != _signed(query)["extra_content"]:
            return refusing(400, GEMINI_RULE)
    query = _next_query(request)
    if query is None:
        return Reply(pieces=_ANSWERED)
    return Reply(pieces=(chunk({"tool_calls": [tool_call(query, **_signed(query))]}), *ending("tool_calls")))


def _signed(query: str) -> dict[str, object]:
    return {"extra_content": {"google": {"thought_signature": f"signed/{query}=="}}}


def mistral(request: Request) -> Reply:
    """Unknown fields are refused with 422, at the top and in messages; it thinks in a list of contents."""
    unknown = [(name,) for name in request.keys() - _MISTRAL_FIELDS]
    for index, message in enumerate(request["messages"]):
        role = message["role"]
        unknown += [("messages", index, role, name) for name in message.keys() - _MISTRAL_MESSAGES[role]]
    if unknown:
        detail = [
            {"type": "extra_forbidden", "loc": ["body", *place], "msg": "Extra inputs are not permitted"}
            for place in unknown
        ]
        body = {"object": "error", "message": {"detail": detail}, "type": "invalid_request_error", "code": None}
        return Reply(status=422, content_type="application/json", pieces=(json.dumps(body).encode(),))
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    query = _next_query(request)
    last: Mapping[str, object] = {"content": [{"type": "text", "text": ANSWER}]}
    if query is not None:
        last = {"content": "", "tool_calls": [tool_call(query)]}
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
    finish = "stop" if query is None else "tool_calls"
    pieces = (chunk({"content": [thought]}), chunk(last), chunk({"content": ""}, finish=finish, usage=usage), DONE)
    return Reply(pieces=pieces)
