"""What the model server answers, by the name of a scenario: whole replies as prepared bytes; no socket is touched here.

A scenario reads the request alone: the tools it offers and the results since the last plain user message. A name that
ends in `-once` fails the first request and serves `plain` afterwards.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle, islice
from typing import Any, Final

WORDS: Final = 50
_REWRITTEN: Final = "For context:"
_MODEL: Final = "scenario-1"
_calls = itertools.count(1)


class Ending(Enum):
    """What becomes of the connection after the last piece."""

    CLOSE = "the answer is whole"
    DROP = "the connection is torn down"
    HANG = "nothing more comes until the client leaves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer: the pieces are sent one by one, with the interval between them."""

    pieces: Iterable[bytes] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: Ending = Ending.CLOSE
    starts: bool = True
    """Whether the status line is sent at all."""


Request = Mapping[str, Any]
Scenario = Callable[[Request], Reply]


def event(value: object) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def chunk(delta: Mapping[str, object], *, finish: str | None = None, usage: object = None) -> bytes:
    """One chunk of a chat completion."""
    value: dict[str, object] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": _MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    if usage is not None:
        value["usage"] = usage
    return event(value)


USAGE: Final = {
    "prompt_tokens": 20,
    "completion_tokens": WORDS,
    "total_tokens": 20 + WORDS,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
DONE: Final = b"data: [DONE]\n\n"
_USAGE_CHUNK: Final = event(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": _MODEL,
        "choices": [],
        "usage": USAGE,
    }
)
_ROLE: Final = chunk({"role": "assistant", "content": ""})
_WORD_CHUNKS: Final = tuple(chunk({"content": f"word{number} "}) for number in range(WORDS))
TEXT: Final = "".join(f"word{number} " for number in range(WORDS))


def ending(finish: str) -> tuple[bytes, ...]:
    """The last events of a whole answer."""
    return (chunk({}, finish=finish), _USAGE_CHUNK, DONE)


_ANSWER: Final = Reply(pieces=(_ROLE, *_WORD_CHUNKS, *ending("stop")))


def offered(request: Request) -> list[str]:
    """The names of the tools in a request."""
    return [tool["function"]["name"] for tool in request.get("tools", ())]


def results(request: Request) -> int:
    """How many tool results there are since the last plain user message."""
    count = 0
    for message in reversed(request["messages"]):
        content = message.get("content")
        if message["role"] == "user" and not (isinstance(content, str) and content.startswith(_REWRITTEN)):
            break
        count += message["role"] == "tool"
    return count


def calling(calls: Sequence[tuple[str, str]]) -> Reply:
    """An answer of tool calls: names and argument texts, each argument text in two pieces."""
    pieces: list[bytes] = [_ROLE]
    for index, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        head = {"index": index, "id": f"call_{next(_calls)}", "type": "function"}
        pieces.append(chunk({"tool_calls": [{**head, "function": {"name": name, "arguments": arguments[:half]}}]}))
        pieces.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]}))
    return Reply(pieces=(*pieces, *ending("tool_calls")))


def plain(request: Request) -> Reply:
    """Fifty words, whatever is asked."""
    return _ANSWER


def desk(request: Request) -> Reply:
    """A lead that calls all its agents at once, specialists that look something up once, and fifty words from each."""
    if fault := unanswered(request["messages"]):
        return refusing(400, fault)
    parameters = _first_parameters(request)
    if not results(request):
        agents = [name for name in parameters if name.startswith("call_")]
        if agents:
            return calling([(name, _text({parameters[name]: "What do you know?"})) for name in agents])
        if "lookup" in parameters:
            return calling([("lookup", '{"query":"boughs"}')])
    return _ANSWER


def stamped(request: Request) -> Reply:
    """Ten pieces of text; the first and the last begin with the time at which they are sent, by the monotonic clock."""
    return Reply(pieces=_stamped_pieces(8))


def streamed(request: Request) -> Reply:
    """The same with 150 pieces."""
    return Reply(pieces=_stamped_pieces(148))


def _stamped_pieces(between: int) -> Iterator[bytes]:
    yield _ROLE
    yield chunk({"content": f"{time.monotonic_ns()} "})
    yield from islice(cycle(_WORD_CHUNKS), between)
    yield chunk({"content": f"{time.monotonic_ns()} "})
    yield from ending("stop")


def unanswered(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return OpenAI's complaint about a call without a result or a result without a call; empty if there is none."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message.get("tool_call_id") not in waiting:
                return "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
            waiting.remove(message["tool_call_id"])
        elif waiting:
            break
        else:
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
    if waiting:
        return f"These tool_call_ids did not have response messages: {', '.join(waiting)}."
    return ""


def _first_parameters(request: Request) -> dict[str, str]:
    """The first parameter of each tool that is offered, by the tool's name; `message` for a tool that names none."""
    functions = [tool["function"] for tool in request.get("tools") or ()]
    return {one["name"]: next(iter(one["parameters"].get("properties", ())), "message") for one in functions}


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _broken_arguments(request: Request) -> Reply:
    names = offered(request)
    return calling([(names[0], '{"query": "unfin')]) if names and not results(request) else _ANSWER


def refusing(status: int, message: str, *, code: str = "", **headers: str) -> Reply:
    """A refusal as OpenAI words it; in the names of headers an underscore stands for a dash."""
    body = {"error": {"message": message, "type": "error", "code": code or None}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status=status, content_type="application/json", pieces=(json.dumps(body).encode(),), headers=named)


_FIRST_WORDS: Final = (_ROLE, *_WORD_CHUNKS[:3])
_REASONING: Final = tuple(chunk({"reasoning_content": text}) for text in ("Let me ", "think."))
_FAULTS: Final[Mapping[str, Reply]] = {
    "rate-limited": refusing(429, "Slow down.", Retry_After="1"),
    "out-of-quota": refusing(429, "You exceeded your quota.", code="insufficient_quota"),
    "server-error": refusing(500, "The server had an error."),
    "unauthorized": refusing(401, "Incorrect API key provided: sk-wrong-key-123456."),
    "garbage": Reply(pieces=(b"data: <html>not a chunk</html>\n\n",)),
    "page": Reply(pieces=(b"<html>Log in</html>",), content_type="text/html"),
    "cut": Reply(pieces=_FIRST_WORDS),
    "cut-after-usage": Reply(pieces=(*_FIRST_WORDS, chunk({"content": "x"}, usage=USAGE))),
    "error-event": Reply(pieces=(*_FIRST_WORDS, event({"error": {"message": "The model crashed.", "code": 500}}))),
    "empty": Reply(pieces=(_ROLE, *ending("stop"))),
    "slow-start": Reply(ending=Ending.HANG, starts=False),
    "stall-after-usage": Reply(pieces=(*_FIRST_WORDS, chunk({"content": "x"}, usage=USAGE)), ending=Ending.HANG),
    "stall": Reply(pieces=_FIRST_WORDS, ending=Ending.HANG),
    "drop": Reply(pieces=_FIRST_WORDS, ending=Ending.DROP),
    "drop-before-answer": Reply(ending=Ending.DROP, starts=False),
    "reasoning": Reply(pieces=(_ROLE, *_REASONING, *_WORD_CHUNKS[:2], *ending("stop"))),
    "refusal": Reply(pieces=(_ROLE, chunk({"refusal": "I will "}), chunk({"refusal": "not."}), *ending("stop"))),
    "no-usage": Reply(pieces=(*_FIRST_WORDS, chunk({}, finish="stop"), DONE)),
}


def scenario(name: str) -> Scenario:
    """A scenario by its name. Raises KeyError where there is none."""
    if name.endswith("-once"):
        first: Iterator[Reply] = iter((_FAULTS[name.removesuffix("-once")],))
        return lambda request: next(first, _ANSWER)
    if name in _FAULTS:
        reply = _FAULTS[name]
        return lambda request: reply
    return _SCENARIOS[name]


_SCENARIOS: Final[Mapping[str, Scenario]] = {
    "plain": plain,
    "desk": desk,
    "stamped": stamped,
    "streamed": streamed,
    "broken-arguments": _broken_arguments,
}


def names() -> list[str]:
    """Every scenario there is."""
    return [*_SCENARIOS, *_FAULTS, *(f"{name}-once" for name in _FAULTS)]
