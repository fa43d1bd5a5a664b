"""The Gemini API as a fake that keeps the API's rules, and answers like a model of its third generation.

It calls `lookup` twice at once and then once more, where that is offered, and says `ANSWER` when it has the results.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bough_server.models.gemini.request import FOREIGN_SIGNATURE
from tests.support.model_scenarios import Reply, Request, event

ANSWER: Final = "An oak is a tree."
USAGE: Final = {
    "promptTokenCount": 100,
    "cachedContentTokenCount": 60,
    "candidatesTokenCount": 18,
    "thoughtsTokenCount": 7,
    "totalTokenCount": 125,
}
MISSING_SIGNATURE: Final = "Function call is missing a thought_signature in functionCall parts."
_FIELDS: Final = frozenset(
    {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "safetySettings", "cachedContent"}
)
_QUERIES: Final = (("oak", "bough"), ("root",))
_ids = itertools.count(1)
_Part = Mapping[str, Any]


def refusal(code: int, status: str, message: str, *, is_list: bool = False, **detail: object) -> Reply:
    """A refusal in the API's format, in a list as some of its servers send it."""
    error = {"code": code, "message": message, "status": status, **({"details": [detail]} if detail else {})}
    body: object = [{"error": error}] if is_list else {"error": error}
    return Reply(status=code, content_type="application/json", pieces=(json.dumps(body).encode(),))


def chunk(*parts: Mapping[str, object], finish: str = "", **fields: object) -> bytes:
    """One chunk of an answer."""
    candidate: dict[str, object] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    candidate |= {"finishReason": finish} if finish else {}
    whole = {"candidates": [candidate], "modelVersion": "gemini-3", "responseId": "resp-1", "usageMetadata": USAGE}
    return event({**whole, **fields})


def signed(name: str) -> str:
    """A signature, in the alphabet of base64."""
    return f"c2lnbmVk+/{name}=="


def rules(request: Request) -> Reply:
    """Refuses what the API refuses; else thinks, calls or answers."""
    for problem in _problems(request):
        return refusal(400, "INVALID_ARGUMENT", problem)
    return _answer(request)


def _problems(request: Request) -> Iterator[str]:
    for name in sorted(request.keys() - _FIELDS):
        yield f'Invalid JSON payload received. Unknown name "{name}": Cannot find field.'
    contents = request.get("contents", [])
    if not contents or contents[0]["role"] != "user" or contents[-1]["role"] != "user":
        yield "Please ensure that single turn requests begin and end with a user role."
    if any(not content["parts"] for content in contents):
        yield "contents.parts must not be empty."
    if any(part == {"text": ""} for content in contents for part in content["parts"]):
        yield "Unable to submit request because it must have a text parameter."
    generation = request.get("generationConfig", {})
    if request.get("tools") and generation.get("responseMimeType") == "application/json":
        yield "Function calling with a response mime type: 'application/json' is unsupported"
    for before, content in itertools.pairwise([{"role": "", "parts": []}, *contents, {"role": "", "parts": []}]):
        yield from _pair_problems(before, content)
    yield from _signature_problems(contents)


def _pair_problems(before: _Part, content: _Part) -> Iterator[str]:
    calls = [part["functionCall"] for part in before["parts"] if "functionCall" in part]
    results = [part["functionResponse"] for part in content["parts"] if "functionResponse" in part]
    if len(calls) != len(results) or (results and len(results) != len(content["parts"])):
        yield (
            "Please ensure that the number of function response parts is equal to the number of function call parts "
            "of the function call turn."
        )
    if [(each["id"], each["name"]) for each in calls] != [(each["id"], each["name"]) for each in results]:
        yield "Please ensure that function response turn comes immediately after a function call turn."
    if any(not isinstance(each["response"], dict) for each in results):
        yield "Invalid value at 'contents[2].parts[0].function_response.response'"
    if any("functionCall" in part for part in content["parts"]) and before["role"] != "user":
        yield (
            "Please ensure that function call turn comes immediately after a user turn or after a function response "
            "turn."
        )


def _current_turn(contents: Sequence[_Part]) -> list[_Part]:
    """The contents since the user's last words."""
    turn: list[_Part] = []
    for content in reversed(contents):
        if content["role"] == "user" and "functionResponse" not in content["parts"][0]:
            break
        turn.append(content)
    return turn


def _signature_problems(contents: Sequence[_Part]) -> Iterator[str]:
    for content in _current_turn(contents):
        calls = [part for part in content["parts"] if "functionCall" in part]
        if content["role"] == "model" and calls:
            query = calls[0]["functionCall"]["args"].get("query")
            if calls[0].get("thoughtSignature") not in (signed(query), FOREIGN_SIGNATURE):
                yield f"{MISSING_SIGNATURE} Additional data, function call `default_api:lookup`, position 2."


def _answer(request: Request) -> Reply:
    steps = sum(content["role"] == "model" for content in _current_turn(request["contents"]))
    declared = [each["name"] for tool in request.get("tools", ()) for each in tool["functionDeclarations"]]
    thoughts = [chunk({"text": "I think", "thought": True}), chunk({"text": " of trees.", "thought": True})]
    if "lookup" not in declared or steps >= len(_QUERIES):
        last = {"text": "", "thoughtSignature": signed("text")}
        pieces = (*thoughts, chunk({"text": "An oak "}), chunk({"text": "is a tree."}), chunk(last, finish="STOP"))
        return Reply(pieces=pieces)
    parts: list[dict[str, object]] = []
    for query in _QUERIES[steps]:
        call = {"id": f"call-{next(_ids)}", "name": "lookup", "args": {"query": query}}
        # Only the first of parallel calls is signed.
        parts.append({"functionCall": call, **({} if parts else {"thoughtSignature": signed(query)})})
    return Reply(pieces=(*thoughts, chunk(*parts, finish="STOP")))
