"""What the model server answers to the Responses API, by the name of a scenario; no socket is touched here.

Scenarios have the names that they have for chat completions. A fault that is none of a stream is the same for both.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from tests.support.model_scenarios import DONE, WORDS, Ending, Reply, Request, Scenario, event
from tests.support.model_scenarios import scenario as chat_scenario

USAGE: Final = {
    "input_tokens": 20,
    "input_tokens_details": {"cached_tokens": 5},
    "output_tokens": WORDS,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 20 + WORDS,
}
_calls = itertools.count(1)
Item = dict[str, object]


def whole(output: Sequence[Item] = (), *, status: str = "completed", **facts: object) -> Item:
    """A response as its first and its last event carry it."""
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1700000000,
        "model": "scenario-1",
        "status": status,
        "output": list(output),
        **facts,
    }


def beginning() -> bytes:
    """The first event of an answer."""
    return event({"type": "response.created", "response": whole(status="in_progress")})


def ending(output: Sequence[Item], *, status: str = "completed", **facts: object) -> bytes:
    """The last event of an answer."""
    return event({"type": f"response.{status}", "response": whole(output, status=status, usage=USAGE, **facts)})


def item_events(index: int, item: Item, deltas: Sequence[Mapping[str, object]]) -> list[bytes]:
    """An item of the output from its announcement, without content, to its end."""
    place = {"output_index": index}
    empty = {"content": [], "summary": [], "arguments": "", "encrypted_content": None}
    begun = {**item, **{name: value for name, value in empty.items() if name in item}, "status": "in_progress"}
    return [
        event({"type": "response.output_item.added", **place, "item": begun}),
        *(event({**place, "item_id": item["id"], **delta}) for delta in deltas),
        event({"type": "response.output_item.done", **place, "item": item}),
    ]


def message(*texts: str, kind: str = "output_text", annotations: Sequence[Item] = ()) -> Item:
    """A message of the output; a refusal with `kind` refusal."""
    said = "".join(texts)
    if kind == "refusal":
        content: Item = {"type": "refusal", "refusal": said}
    else:
        content = {"type": "output_text", "text": said, "annotations": list(annotations)}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [content]}


def text_events(index: int, *texts: str, kind: str = "output_text") -> list[bytes]:
    """The events of a message that streams in pieces."""
    deltas = [{"type": f"response.{kind}.delta", "content_index": 0, "delta": text} for text in texts]
    return item_events(index, message(*texts, kind=kind), deltas)


def reasoning(text: str, *, encrypted: str | None = "sealed") -> Item:
    """A reasoning item."""
    summary = [{"type": "summary_text", "text": text}] if text else []
    return {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": encrypted}


def reasoning_events(index: int, *texts: str, encrypted: str | None = "sealed") -> list[bytes]:
    """The events of reasoning whose summary streams in pieces."""
    deltas = [{"type": "response.reasoning_summary_text.delta", "summary_index": 0, "delta": text} for text in texts]
    return item_events(index, reasoning("".join(texts), encrypted=encrypted), deltas)


def call(name: str, arguments: str) -> Item:
    """A function call."""
    number = next(_calls)
    return {
        "type": "function_call",
        "id": f"fc_{number}",
        "call_id": f"call_{number}",
        "name": name,
        "arguments": arguments,
    }


def call_events(index: int, item: Item) -> list[bytes]:
    """The events of a function call whose arguments stream in two pieces."""
    arguments = str(item["arguments"])
    half = len(arguments) // 2
    kind = "response.function_call_arguments.delta"
    return item_events(index, item, [{"type": kind, "delta": piece} for piece in (arguments[:half], arguments[half:])])


_TEXTS: Final = tuple(f"word{number} " for number in range(WORDS))
_FIRST_WORDS: Final = (beginning(), *text_events(0, *_TEXTS[:3])[:-1])
_ANSWER: Final = Reply(pieces=(beginning(), *text_events(0, *_TEXTS), ending([message(*_TEXTS)])))


def calling(calls: Sequence[tuple[str, str]]) -> Reply:
    """An answer of reasoning and function calls."""
    items = [call(name, arguments) for name, arguments in calls]
    thought = reasoning("I look it up.")
    pieces = [beginning(), *reasoning_events(0, "I look ", "it up.")]
    for index, item in enumerate(items, 1):
        pieces.extend(call_events(index, item))
    return Reply(pieces=(*pieces, ending([thought, *items])))


def plain(request: Request) -> Reply:
    """Fifty words, whatever is asked."""
    return _ANSWER


def desk(request: Request) -> Reply:
    """A lead that calls all its agents at once, specialists that look something up once, and fifty words from each."""
    names = [tool["name"] for tool in request.get("tools", ())]
    turn = itertools.takewhile(lambda item: item.get("role") != "user", reversed(request["input"]))
    if not any(item.get("type") == "function_call_output" for item in turn):
        if agents := [name for name in names if name.startswith("call_")]:
            return calling([(name, '{"message":"What do you know?"}') for name in agents])
        if "lookup" in names:
            return calling([("lookup", '{"query":"boughs"}')])
    return _ANSWER


def failing(code: str, text: str) -> Reply:
    """An answer that fails in its stream."""
    said = whole(status="failed", error={"code": code, "message": text}, usage=USAGE)
    return Reply(pieces=(*_FIRST_WORDS, event({"type": "response.failed", "response": said})))


_STREAMS: Final[Mapping[str, Reply]] = {
    "cut": Reply(pieces=_FIRST_WORDS),
    "drop": Reply(pieces=_FIRST_WORDS, ending=Ending.DROP),
    "stall": Reply(pieces=_FIRST_WORDS, ending=Ending.HANG),
    "error-event": Reply(
        pieces=(*_FIRST_WORDS, event({"type": "error", "code": "server_error", "message": "The model crashed."}))
    ),
    "failed": failing("server_error", "The model failed."),
    "refusal": Reply(
        pieces=(
            beginning(),
            *text_events(0, "I will ", "not.", kind="refusal"),
            ending([message("I will not.", kind="refusal")]),
        )
    ),
    "reasoning": Reply(
        pieces=(
            beginning(),
            *reasoning_events(0, "Let me ", "think."),
            *text_events(1, *_TEXTS[:2]),
            ending([reasoning("Let me think."), message(*_TEXTS[:2])]),
            DONE,
        )
    ),
    "incomplete": Reply(
        pieces=(
            *_FIRST_WORDS,
            ending([message(*_TEXTS[:3])], status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        )
    ),
    "empty": Reply(pieces=(beginning(), ending([]))),
    "silent": Reply(pieces=(ending([reasoning("Quiet."), message("All "), call("lookup", "{}")]),)),
}
"""Answers whose form is the API's own; `silent` streams nothing and says everything at its end."""


def scenario(name: str) -> Scenario:
    """A scenario by its name. Raises KeyError where there is none."""
    if name in _STREAMS:
        reply = _STREAMS[name]
        return lambda request: reply
    return {"plain": plain, "desk": desk}.get(name) or chat_scenario(name)


def names() -> list[str]:
    """Every scenario that only this API has."""
    return [name for name in _STREAMS if name in ("failed", "incomplete", "silent")]
