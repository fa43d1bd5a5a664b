"""Size limits of texts inside events, and truncation to them: the middle of a longer text is cut out and marked."""

from collections.abc import Sequence
from typing import Final

from bough.v1 import message_pb2, step_pb2

MAX_TEXT_BYTES: Final = 512 * 1024
"""The most bytes of one text in an event."""

MAX_STEP_BYTES: Final = 896 * 1024
"""The most bytes of all results in a step's end: with the model's answer they stay below what an event may be."""

MAX_RESULT_BYTES: Final = 1024 * 1024
"""The most bytes of one tool's result in its own end."""

MAX_STEP_RESULT_BYTES: Final = 64 * 1024
"""The most bytes of a tool's result in a step's end, and of what a model is shown of it."""

_MARK = "\n[...]\n"


def size_of(text: str) -> int:
    """How many bytes a text has in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def fits(message: message_pb2.Message) -> bool:
    """Whether an event may hold a message: no text of it is over 512 KiB, and it is at most 1 MiB in all."""
    return message.ByteSize() <= MAX_RESULT_BYTES and all(
        size_of(part.text or part.data_json) <= MAX_TEXT_BYTES for part in message.parts
    )


def without_raw(response: step_pb2.LlmResponse) -> step_pb2.LlmResponse:
    """A copy of a model's answer without what its provider said in its own form: that is kept at the call's end."""
    plain = step_pb2.LlmResponse()
    plain.CopyFrom(response)
    plain.ClearField("raw_json")
    plain.ClearField("raw_events_json")
    return plain


def cut_text(text: str, limit: int) -> str:
    """The head and the tail of a text whose UTF-8 form is longer than `limit` bytes, cut between characters."""
    data = text.encode()
    if len(data) <= limit:
        return text
    half = max(0, (limit - len(_MARK)) // 2)
    head = data[:half].decode(errors="ignore")
    tail = data[len(data) - half :].decode(errors="ignore") if half else ""
    return head + _MARK + tail


def fit_texts(texts: Sequence[str], room: int) -> list[str]:
    """The texts in at most `room` bytes together: the longest are cut to one length, the others stay whole."""
    left = max(0, room)
    fitting = [""] * len(texts)
    by_size = sorted(range(len(texts)), key=lambda index: size_of(texts[index]))
    for rank, index in enumerate(by_size):
        share = left // (len(texts) - rank)
        text = texts[index]
        if size_of(text) > share:
            text = cut_text(text, share)
            if size_of(text) > share:
                text = ""  # not even the mark of a cut fits
        fitting[index] = text
        left -= size_of(text)
    return fitting


def cut_result(result: message_pb2.ToolResult, limit: int = MAX_STEP_RESULT_BYTES) -> message_pb2.ToolResult:
    """The result itself where it is small, else a copy whose texts are cut and that says so."""
    size = result.ByteSize()
    if size <= limit:
        return result
    cut = message_pb2.ToolResult()
    cut.CopyFrom(result)
    share = limit // max(1, len(cut.parts))
    for part in cut.parts:
        _cut_part(part, share)
    if len(cut.call.arguments_json.encode()) > share:
        cut.call.arguments_json = cut_text(cut.call.arguments_json, share)
    cut.truncated = True
    cut.original_bytes = result.original_bytes or size
    return cut


def cut_results(results: Sequence[message_pb2.ToolResult]) -> list[message_pb2.ToolResult]:
    """The results of a step, each cut where it is large, and more where they are many."""
    if sum(min(result.ByteSize(), MAX_STEP_RESULT_BYTES) for result in results) <= MAX_STEP_BYTES:
        return [cut_result(result) for result in results]
    return [cut_result(result, MAX_STEP_BYTES // len(results) // 2) for result in results]


def _cut_part(part: message_pb2.Part, limit: int) -> None:
    if size_of(part.metadata_json) > limit:
        part.ClearField("metadata_json")  # a piece of an object is no JSON
    content = part.WhichOneof("content")
    if content in ("text", "data_json"):
        text = part.text if content == "text" else part.data_json
        size = len(text.encode())
        if size > limit:
            # Cut JSON is no longer JSON, so it is given as text.
            part.text = cut_text(text, limit)
            part.truncated, part.original_bytes = True, part.original_bytes or size
    elif content == "blob" and len(part.blob.data) > limit:
        part.original_bytes = part.original_bytes or len(part.blob.data)
        part.blob.data, part.truncated = b"", True
