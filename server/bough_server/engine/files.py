"""The files of the session in which a run is executed: their bytes for models and for operators' code.

Events and histories name files by their SHA-256. The bytes are read when a model is called, and are in no digest.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.identity import Principal
from bough_server.log.blobs import MAX_FILES_BYTES, StoredBlob, blobs_in, data_size, take_data
from bough_server.messages import copy_of
from bough_server.store.ports.sessions import Blobs

_CACHE_BYTES: Final = 32 * 1024 * 1024


class FileCache:
    """The bytes of the files that were read last, of all runs of a process."""

    def __init__(self, most: int = _CACHE_BYTES) -> None:
        self._most = most
        self._size = 0
        self._files: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()

    def get(self, key: tuple[str, str, str]) -> bytes | None:
        """Return the bytes of a file, by tenant, session and hash; None if they are not here."""
        data = self._files.get(key)
        if data is not None:
            self._files.move_to_end(key)
        return data

    def put(self, key: tuple[str, str, str], data: bytes) -> None:
        """Add the bytes of a file, and drop those that were used longest ago."""
        if key in self._files or len(data) > self._most:
            return
        self._files[key] = data
        self._size += len(data)
        while self._size > self._most:
            _, dropped = self._files.popitem(last=False)
            self._size -= len(dropped)


class SessionFiles:
    """The files of one session. `most` are the bytes that all files of one message may have."""

    def __init__(
        self, blobs: Blobs, cache: FileCache, principal: Principal, session_id: str, *, most: int = MAX_FILES_BYTES
    ) -> None:
        self._blobs, self._cache, self._principal, self._session_id = blobs, cache, principal, session_id
        self.most = most

    async def read(self, blob: message_pb2.Blob) -> bytes:
        """Return the bytes of a file. Raises RunError BAD_ARGUMENTS if the session does not have them."""
        if not blob.sha256:
            if not blob.data:
                raise RunError(
                    f"The server does not have the bytes of the file at {blob.uri!r}.",
                    reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
                )
            return blob.data
        key = (self._principal.tenant_id, self._session_id, blob.sha256)
        data = self._cache.get(key)
        if data is None:
            data = (await self._blobs.read(self._principal, self._session_id, blob.sha256)).data
            self._cache.put(key, data)
        return data

    async def load_data(self, messages: Sequence[message_pb2.Message]) -> Sequence[message_pb2.Message]:
        """Return messages for a model, with the bytes of their files.

        They get twice the bytes of one message at most, the newest files first; a text takes the place of the others.
        """
        if not any(blob.sha256 for message in messages for blob in blobs_in(message.parts)):
            return messages
        room = 2 * self.most
        filled: list[message_pb2.Message] = []
        for message in reversed(messages):
            if not any(blob.sha256 for blob in blobs_in(message.parts)):
                filled.append(message)
                continue
            whole = copy_of(message)
            for part in _parts_with_hash(whole.parts):
                data = await self.read(part.blob) if part.blob.size_bytes <= room else b""
                if data and len(data) <= room:
                    part.blob.data = data
                    room -= len(data)
                else:
                    part.text = render_placeholder(part.blob)
            filled.append(whole)
        return filled[::-1]


def _parts_with_hash(parts: Iterable[message_pb2.Part]) -> Iterator[message_pb2.Part]:
    for part in parts:
        if part.blob.sha256:
            yield part
        elif part.HasField("tool_result"):
            yield from _parts_with_hash(part.tool_result.parts)


def render_placeholder(blob: message_pb2.Blob) -> str:
    """Return the text that a model gets in the place of a file."""
    name = f" {blob.filename!r}" if blob.filename else ""
    return f"[{blob.media_type or 'file'}{name} of {blob.size_bytes} bytes, not shown]"


def without_data(message: message_pb2.Message, *, most: int) -> tuple[message_pb2.Message, Sequence[StoredBlob]]:
    """Return a message of operators' code that names its files by their SHA-256, and the files to be stored.

    A message without bytes is returned as it is, else a copy: its code may use it again. Raises RunError
    OUTPUT_TOO_LARGE if its files have more than `most` bytes.
    """
    size = data_size(message.parts)
    if not size:
        return message, ()
    check_files(size, most)
    plain = copy_of(message)
    return plain, take_data(plain.parts)


def check_files(size: int, most: int) -> None:
    """Raise RunError OUTPUT_TOO_LARGE if the files of one message have too many bytes."""
    if size > most:
        raise RunError(
            f"The files have {size:,} bytes, and those of one message may have {most:,} (server.max_files_bytes). "
            "Return the uri of a file instead of its data.",
            reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        )
