"""Size limits of texts in events, and truncation to them: the middle of a longer text is replaced by a mark."""

from collections.abc import Sequence
from typing import Final

from bough.v1 import message_pb2, step_pb2
from bough_server.messages import copy_of

MAX_TEXT_BYTES: Final = 512 * 1024
"""The most bytes of one text in an event."""

MAX_STEP_BYTES: Final = 896 * 1024
"""The most bytes of all results in a step's end event: with the model's answer they stay below an event's bound."""

MAX_RESULT_BYTES: Final = 1024 * 1024
"""The most bytes of one tool's result in its own end event."""

MAX_STEP_RESULT_BYTES: Final = 64 * 1024
"""The most bytes of one tool's result in a step's end event, and as shown to a model."""

_MARK = "\n[...]\n"


def size_of(text: str) -> int:
    """Return the UTF-8 size of a text in bytes."""
    # isascii() is a flag of the string: most texts need not be encoded to be measured.
    return len(text) if text.isascii() else len(text.encode())


def fits(message: message_pb2.Message) -> bool:
    """Return whether an event may hold a message: each text is at most 512 KiB, and the message at most 1 MiB."""
    return message.ByteSize() <= MAX_RESULT_BYTES and all(
        size_of(part.text or part.data_json) <= MAX_TEXT_BYTES for part in message.parts
    )


def without_raw(response: step_pb2.LlmResponse) -> step_pb2.LlmResponse:
    """Return a copy of a model's response without the provider's raw data, which only the call's end event holds."""
    plain = copy_of(response)
    plain.ClearField("raw_json")
    plain.ClearField("raw_events_json")
    return plain


def truncate_text(text: str, limit: int) -> str:
    """Return a text's head and tail, cut between characters, if its UTF-8 form is longer than `limit` bytes."""
    data = text.encode()
    if len(data) <= limit:
        return text
    half = max(0, (limit - len(_MARK)) // 2)
    head = data[:half].decode(errors="ignore")
    tail = data[len(data) - half :].decode(errors="ignore") if half else ""
    return head + _MARK + tail


def fit_texts(texts: Sequence[str], room: int) -> list[str]:
    """Truncate the longest texts to one length so that all take at most `room` bytes; the others stay whole."""
    left = max(0, room)
    fitting = [""] * len(texts)
    by_size = sorted(range(len(texts)), key=lambda index: size_of(texts[index]))
    for rank, index in enumerate(by_size):
        share = left // (len(texts) - rank)
        text = texts[index]
        if size_of(text) > share:
            text = truncate_text(text, share)
            if size_of(text) > share:
                text = ""  # not even the mark fits
        fitting[index] = text
        left -= size_of(text)
    return fitting


def truncate_result(result: message_pb2.ToolResult, limit: int = MAX_STEP_RESULT_BYTES) -> message_pb2.ToolResult:
    """Return the result itself if it is small, else a truncated copy that is marked as such."""
    size = result.ByteSize()
    if size <= limit:
        return result
    cut = copy_of(result)
    share = limit // max(1, len(cut.parts))
    for part in cut.parts:
        _truncate_part(part, share)
    if len(cut.call.arguments_json.encode()) > share:
        cut.call.arguments_json = truncate_text(cut.call.arguments_json, share)
    cut.truncated = True
    cut.original_bytes = result.original_bytes or size
    return cut


def truncate_results(results: Sequence[message_pb2.ToolResult]) -> list[message_pb2.ToolResult]:
    """Return the results of a step, each truncated if it is large, and further if there are many."""
    if sum(min(result.ByteSize(), MAX_STEP_RESULT_BYTES) for result in results) <= MAX_STEP_BYTES:
        return [truncate_result(result) for result in results]
    return [truncate_result(result, MAX_STEP_BYTES // len(results) // 2) for result in results]


def _truncate_part(part: message_pb2.Part, limit: int) -> None:
    if size_of(part.metadata_json) > limit:
        part.ClearField("metadata_json")  # truncated JSON would not parse
    content = part.WhichOneof("content")
    if content in ("text", "data_json"):
        text = part.text if content == "text" else part.data_json
        size = len(text.encode())
        if size > limit:
            # Truncated JSON is not JSON, so it becomes text.
            part.text = truncate_text(text, limit)
            part.truncated, part.original_bytes = True, part.original_bytes or size
    elif content == "blob" and len(part.blob.data) > limit:
        part.original_bytes = part.original_bytes or len(part.blob.data)
        part.blob.data, part.truncated = b"", True
