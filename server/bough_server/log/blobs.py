"""Files of messages: their bytes leave the message for the store, and its blob names them by their SHA-256."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import Message

from bough.v1 import agent_service_pb2, eval_set_pb2, event_pb2, fork_pb2, input_pb2, message_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.messages import copy_of
from bough_server.threads import run_in_thread

MAX_FILES_BYTES: Final = 16 * 1024 * 1024
"""The default for the most bytes of all files of one message."""

UNKNOWN: Final = "The session has no file with this hash. Send its bytes as `data`."
"""The problem with a file that a request names by its hash only."""

_SMALL: Final = 64 * 1024
"""Files of so many bytes are hashed at once: a thread would cost more."""

Requested = TypeVar(
    "Requested",
    agent_service_pb2.RunRequest,
    agent_service_pb2.ResumeRunRequest,
    agent_service_pb2.ForkRunRequest,
    eval_set_pb2.ToolMocks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlob:
    """A file, to be stored with the first event that refers to it."""

    sha256: str
    media_type: str
    data: bytes | None
    """Its bytes; None if its session has them already, or for a fork that of its origin."""
    field: str = ""
    """The path in the request that named it, for an error."""


def file_part(data: bytes, media_type: str, *, filename: str = "") -> message_pb2.Part:
    """Return a file as a part of a message, such as a tool's result or an agent's answer.

    The media type decides how a model gets it: `image/png`, `application/pdf`, `text/csv`.
    """
    blob = message_pb2.Blob(data=data, media_type=media_type, filename=filename, size_bytes=len(data))
    return message_pb2.Part(blob=blob)


def blobs_in(parts: Iterable[message_pb2.Part]) -> Iterator[message_pb2.Blob]:
    """Yield the files among parts, those of tool results included."""
    for part in parts:
        if part.HasField("blob"):
            yield part.blob
        elif part.HasField("tool_result"):
            yield from blobs_in(part.tool_result.parts)


def take_data(parts: Iterable[message_pb2.Part]) -> list[StoredBlob]:
    """Put the SHA-256 of each file in the place of its bytes, and return the bytes."""
    return [_take_bytes(blob) for blob in blobs_in(parts) if blob.data]


def _take_bytes(blob: message_pb2.Blob) -> StoredBlob:
    data = blob.data
    blob.sha256 = hashlib.sha256(data).hexdigest()
    blob.size_bytes = len(data)
    return StoredBlob(sha256=blob.sha256, media_type=blob.media_type, data=data)


def data_size(parts: Iterable[message_pb2.Part]) -> int:
    """Return the bytes that files among parts bring with them."""
    return sum(len(blob.data) for blob in blobs_in(parts))


def parts_of_request(
    request: agent_service_pb2.RunRequest
    | agent_service_pb2.ResumeRunRequest
    | agent_service_pb2.AnswerInputRequest
    | agent_service_pb2.ForkRunRequest
    | eval_set_pb2.ToolMocks,
) -> Iterator[tuple[str, Sequence[message_pb2.Part]]]:
    """Yield all lists of parts of a request, or of a case's mocks, that become part of events, with their paths."""
    if isinstance(request, agent_service_pb2.RunRequest):
        yield "input.parts", request.input.parts
    elif isinstance(request, agent_service_pb2.ResumeRunRequest | agent_service_pb2.AnswerInputRequest):
        yield from _parts_of_answers(request.answers)
    elif isinstance(request, eval_set_pb2.ToolMocks):
        yield from _parts_of_mocks(request.tools)
    else:
        yield from _parts_of_changes(request.changes)


def _parts_of_answers(answers: Iterable[input_pb2.InputAnswer]) -> Iterator[tuple[str, Sequence[message_pb2.Part]]]:
    for index, answer in enumerate(answers):
        if answer.HasField("tool_outcome"):
            yield f"answers[{index}].tool_outcome.parts", answer.tool_outcome.parts


def _parts_of_mocks(mocks: Iterable[eval_set_pb2.ToolMock]) -> Iterator[tuple[str, Sequence[message_pb2.Part]]]:
    for index, mock in enumerate(mocks):
        if mock.HasField("outcome"):
            yield f"mocks.tools[{index}].outcome.parts", mock.outcome.parts


def _parts_of_changes(changes: fork_pb2.ForkChanges) -> Iterator[tuple[str, Sequence[message_pb2.Part]]]:
    if changes.HasField("input"):
        yield "changes.input.parts", changes.input.parts
    for index, edited in enumerate(changes.tool_results):
        yield f"changes.tool_results[{index}].outcome.parts", edited.outcome.parts


def extract_files(request: Requested) -> tuple[Requested, list[StoredBlob]]:
    """Take the files out of a request: it names them by their SHA-256. Return it, or a copy, and the files.

    Files that the request names itself are returned without bytes.
    """
    has_bytes = any(data_size(parts) for _, parts in parts_of_request(request))
    files = [file for field, parts in parts_of_request(request) for file in _files(field, parts)]
    # A message keeps the memory of what has been taken out of it; its copy has none.
    return copy_of(request) if has_bytes else request, files


def file_text(blob: message_pb2.Blob) -> str:
    """Describe a file for people, in place of its bytes: `[image/png photo.png, 300 KB]`."""
    named = " ".join(filter(None, (blob.media_type or "file", blob.filename)))
    if blob.uri:
        return f"[{named} at {blob.uri}]"
    size = len(blob.data) or blob.size_bytes
    return f"[{named}, {_size_text(size)}]" if size else f"[{named}]"


def _size_text(size: int) -> str:
    if size < 1_000:
        return "1 byte" if size == 1 else f"{size} bytes"
    return f"{size / 1_000:.0f} KB" if size < 999_500 else f"{size / 1_000_000:.1f} MB"


async def extract_files_within(request: Requested, *, most: int, field: str) -> tuple[Requested, list[StoredBlob]]:
    """Return what extract_files does, in a thread if there is much to hash.

    Raises InvalidRequest, at `field`, if the files have more than `most` bytes.
    """
    size = sum(data_size(parts) for _, parts in parts_of_request(request))
    if size > most:
        description = f"has {size:,} bytes of files; a message may have {most:,} (server.max_files_bytes)."
        raise InvalidRequest([FieldViolation(field=field, description=description)])
    return extract_files(request) if size <= _SMALL else await run_in_thread(extract_files, request)


def _files(field: str, parts: Sequence[message_pb2.Part]) -> Iterator[StoredBlob]:
    for index, part in enumerate(parts):
        if part.blob.data:
            yield _take_bytes(part.blob)
        elif part.blob.sha256:
            path = f"{field}[{index}].blob.sha256"
            yield StoredBlob(sha256=part.blob.sha256, media_type=part.blob.media_type, data=None, field=path)


def drop_file_bytes(event: event_pb2.AgentEvent) -> event_pb2.AgentEvent:
    """Return a copy of an event in which each file is named by its SHA-256, as logs of earlier versions lack it."""
    plain = copy_of(event)
    for blob in blobs_anywhere(plain):
        if blob.data:
            _take_bytes(blob)
    return plain


def blobs_anywhere(message: Message) -> Iterator[message_pb2.Blob]:
    """Yield all files in a message of any type; those in maps are not found, as no map holds any."""
    if isinstance(message, message_pb2.Blob):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for item in value if field.is_repeated else (value,):
            yield from blobs_anywhere(item)
