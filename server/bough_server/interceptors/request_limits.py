"""Size limits of requests, checked before any work whose cost grows with the number of items.

Parsing, the schema's rules and the paths of violations cost microseconds per item, and an empty item takes two bytes,
so a request that the transport accepts may have four million items.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from bough_server.errors import FieldViolation
from bough_server.interceptors.file_bytes import REQUESTS, count_file_bytes
from bough_server.log.blobs import blobs_anywhere

MAX_ITEMS: Final = 1_000
"""The most items of one list or map of a request; a field's own rules may allow fewer."""

MAX_ITEMS_IN_ALL: Final = 20_000
"""The most items of a request, nested ones included."""

MAX_BYTES: Final = 1024 * 1024
"""The most bytes of a request that has no other bound. Inputs are bounded further once they are parsed.

The bytes of files in inputs and results do not count: their bound is a separate one.
"""

MAX_ITEMS_SCORED: Final = 200_000
"""The most items of a request with eval sets, results or records, nested ones included."""

_EVALUATION_REQUESTS: Final = frozenset(
    {"EvaluateRequest", "CompareEvaluationsRequest", "ScoreInvocationsRequest", "DiffInvocationsRequest"}
)
"""Requests that bring eval sets, results or records."""

_MAX_BYTES_OF: Final[Mapping[str, int]] = {
    "ResumeRunRequest": 2 * MAX_BYTES,
    "AnswerInputRequest": 2 * MAX_BYTES,
    "AggregateEventsRequest": 8 * MAX_BYTES,
    **dict.fromkeys(_EVALUATION_REQUESTS, 8 * MAX_BYTES),
}

_UNBOUNDED: Final = frozenset({"AggregateEventsRequest"})
"""Requests of a stream whose items its service bounds as a whole."""

_FRAMES_BYTES: Final = 64 * 1024
"""Room for the tags and lengths around files, and for gRPC's own."""

_BULK: Final[Mapping[str, str]] = {
    "RunRequest": "input.parts",
    "ResumeRunRequest": "answers",
    "AnswerInputRequest": "answers",
    "ForkRunRequest": "changes",
    "CreateAgentRequest": "definition",
    "UpdateAgentRequest": "definition",
    "ValidateAgentsRequest": "definitions",
    "EvaluateRequest": "eval_set",
}
"""The field that holds most of a request's bytes."""

_MAX_BYTES_EACH: Final[Mapping[str, int]] = {
    "bough.v1.ResumeRunRequest.answers": 512 * 1024,
    "bough.v1.AnswerInputRequest.answers": 512 * 1024,
    "bough.v1.ForkChanges.tool_results": 512 * 1024,
}
"""The most bytes of a list item that becomes part of an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """A request that was not parsed because of its size."""

    request: str
    size: int
    """The bytes besides those of files."""
    files_size: int = 0
    max_files_bytes: int = 0

    def violation(self) -> FieldViolation:
        """Return the violation for the caller, at the field that holds most of such a request's bytes."""
        if self.files_size > self.max_files_bytes:
            description = (
                f"has {self.files_size:,} bytes of files; a message may have {self.max_files_bytes:,} "
                "(server.max_files_bytes)."
            )
        else:
            most = _max_bytes(self.request) // 1024
            description = f"{self.request} is {self.size:,} bytes and may be {most:,} KiB."
            if self.request == "RunRequest":
                description += " Send large content as a file (a blob)."
        return FieldViolation(field=_BULK.get(self.request, ""), description=description)


def most_bytes(max_files_bytes: int) -> int:
    """Return the most bytes of any request that can be accepted, if the files of a message may have so many."""
    return max(most_bytes_of(request, max_files_bytes) for request in (*REQUESTS, *_MAX_BYTES_OF))


def most_bytes_of(request: str, max_files_bytes: int) -> int:
    """Return the most bytes of a request of this name that can be accepted."""
    return _max_bytes(request) + (max_files_bytes + _FRAMES_BYTES if request in REQUESTS else 0)


def request_of(method: str) -> str:
    """Return the name of a method's request: `/package.Service/Name` has `NameRequest`s."""
    return method.rpartition("/")[2] + "Request"


def limit_request_size(
    method: str, parse: Callable[[bytes], Message], *, max_files_bytes: int
) -> Callable[[bytes], Message | TooLarge]:
    """Wrap the parser of a method so that a request that is too large becomes a TooLarge."""
    request = request_of(method)

    def parse_small(data: bytes) -> Message | TooLarge:
        if len(data) > _max_bytes(request):
            files = count_file_bytes(data, REQUESTS[request]) if request in REQUESTS else 0
            if files > max_files_bytes or len(data) - files > _max_bytes(request):
                size = len(data) - files
                return TooLarge(request=request, size=size, files_size=files, max_files_bytes=max_files_bytes)
        return parse(data)

    return parse_small


def excess(request: Message) -> FieldViolation | None:
    """Return a violation for the first list, or item of one, that exceeds its bound; None if there is none."""
    name = request.DESCRIPTOR.name
    if name in _UNBOUNDED:
        return None
    most, most_in_all = (MAX_ITEMS_SCORED,) * 2 if name in _EVALUATION_REQUESTS else (MAX_ITEMS, MAX_ITEMS_IN_ALL)
    count = 0
    waiting: list[tuple[str, Message]] = [("", request)]
    while waiting:
        place, message = waiting.pop()
        for field, value in message.ListFields():
            path = f"{place}.{field.name}" if place else field.name
            if not field.is_repeated:
                if field.message_type is not None:
                    waiting.append((path, value))
                continue
            count += len(value)
            if len(value) > most:
                return _too_many(path, f"has {len(value):,} items; a list of a request may have {most:,}")
            if count > most_in_all:
                return _too_many("", f"has more than {most_in_all:,} items in all its lists together")
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
            if large := _first_large(items, _MAX_BYTES_EACH.get(field.full_name)):
                return large
            waiting.extend(items)
    return None


def _max_bytes(request: str) -> int:
    return _MAX_BYTES_OF.get(request, MAX_BYTES)


def _too_many(path: str, description: str) -> FieldViolation:
    return FieldViolation(field=path, description=description)


def _first_large(items: list[tuple[str, Message]], most: int | None) -> FieldViolation | None:
    if most is None:
        return None
    for path, item in items:
        if (size := item.ByteSize()) > most and (size := size - _data_size(item)) > most:
            description = f"is {size:,} bytes and may be {most // 1024:,} KiB"
            return FieldViolation(field=path, description=description)
    return None


def _data_size(item: Message) -> int:
    return sum(len(blob.data) for blob in blobs_anywhere(item))
