"""Sessions of a server: create, read, change and delete them, with their messages and state."""

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from bough import requests
from bough.arguments import build
from bough.calls import FILE_TIMEOUT, PAGE_SIZE, USE_CLIENT_DEFAULT, Calls, Timeout
from bough.v1 import message_pb2, session_pb2, session_service_pb2

if TYPE_CHECKING:
    # For types alone: only the generated stub files have the stubs of asyncio.
    from bough.v1.session_service_pb2_grpc import SessionServiceAsyncStub


class Sessions:
    """Calls of the SessionService."""

    def __init__(self, stub: "SessionServiceAsyncStub", calls: Calls) -> None:
        self._stub, self._calls = stub, calls

    async def create(
        self,
        *,
        session_id: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> session_pb2.Session:
        """Create an empty session with the caller's id, or with one that the server chooses.

        Default: a new request id, so that a retry never creates a second session. Raises AlreadyExists if the
        session id is in use.
        """
        request = requests.create_session_request(session_id=session_id, labels=labels, request_id=request_id)
        return (await self._calls.call(self._stub.CreateSession, request, timeout)).session

    async def get(self, session_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> session_pb2.Session:
        """Return a session. Raises NotFound."""
        request = build(session_service_pb2.GetSessionRequest, session_id=session_id)
        return (await self._calls.call(self._stub.GetSession, request, timeout)).session

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        include_evaluation_sessions: bool = False,
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> AsyncIterator[session_pb2.Session]:
        """List the sessions that have all these labels, newest first; those of evaluations only if included."""
        request = requests.list_sessions_request(
            labels=labels, include_evaluation_sessions=include_evaluation_sessions, page_size=page_size
        )
        return self._calls.pages(self._stub.ListSessions, request, lambda response: response.sessions, timeout=timeout)

    async def update(
        self, session_id: str, *, labels: Mapping[str, str], timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> session_pb2.Session:
        """Replace the labels of a session and return it. Raises NotFound."""
        request = build(session_service_pb2.UpdateSessionRequest, session_id=session_id, labels=labels)
        return (await self._calls.call(self._stub.UpdateSession, request, timeout)).session

    async def delete(self, session_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> None:
        """Delete a session with its runs, their logs and its messages. Raises NotFound or SessionBusy."""
        request = build(session_service_pb2.DeleteSessionRequest, session_id=session_id)
        await self._calls.call(self._stub.DeleteSession, request, timeout)

    def list_messages(
        self, session_id: str, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> AsyncIterator[message_pb2.Message]:
        """List the messages of a session, those of sub-agents included, newest first."""
        request = build(session_service_pb2.ListMessagesRequest, session_id=session_id, page_size=page_size)
        return self._calls.pages(self._stub.ListMessages, request, lambda response: response.messages, timeout=timeout)

    async def get_state(self, session_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> str:
        """Return the session state as one JSON object. Raises NotFound."""
        request = build(session_service_pb2.GetSessionStateRequest, session_id=session_id)
        return (await self._calls.call(self._stub.GetSessionState, request, timeout)).state_json

    async def update_state(
        self,
        session_id: str,
        values: Mapping[str, object] | None = None,
        *,
        state_json: Mapping[str, str | None] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> str:
        """Change values of the session state atomically and return the new state as one JSON object.

        `values` are what JSON can represent, by key; `state_json` are JSON texts by key, which the state keeps as they
        are. None deletes a key in both; JSON's null is the text "null". Raises NotFound, InvalidRequest, SessionBusy
        while a run holds the session, and TypeError or ValueError for a value that JSON cannot represent or a key that
        is in both.
        """
        request = requests.update_state_request(session_id, values, state_json)
        return (await self._calls.call(self._stub.UpdateSessionState, request, timeout)).state_json

    async def read_blob(self, session_id: str, sha256: str, *, timeout: float | None = FILE_TIMEOUT) -> bytes:
        """Return the bytes of a file that a message or an event of the session names by this hash. Raises NotFound."""
        request = build(session_service_pb2.ReadBlobRequest, session_id=session_id, sha256=sha256)
        return b"".join([piece.data async for piece in self._calls.stream(self._stub.ReadBlob, request, timeout)])
