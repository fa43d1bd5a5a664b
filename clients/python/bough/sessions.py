"""Conversations: made, read, changed and deleted; running a turn in one is the client's `run`."""

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from bough import requests
from bough.calls import PAGE_SIZE, Calls
from bough.v1 import message_pb2, session_pb2, session_service_pb2

if TYPE_CHECKING:
    # Only stub files have it.
    from bough.v1.session_service_pb2_grpc import SessionServiceAsyncStub


class Sessions:
    """The SessionService of a server."""

    def __init__(self, stub: "SessionServiceAsyncStub", calls: Calls) -> None:
        self._stub, self._calls = stub, calls

    async def create(
        self, *, session_id: str = "", labels: Mapping[str, str] | None = None, request_id: str = ""
    ) -> session_pb2.Session:
        """Create an empty session with an id of the caller's choice, or with one that the server chooses.

        Without a request id it gets one, so that a retry never creates a second session. Raises AlreadyExists if the
        session id is in use.
        """
        request = requests.create_session_request(session_id=session_id, labels=labels, request_id=request_id)
        return (await self._calls.one(self._stub.CreateSession, request)).session

    async def get(self, session_id: str) -> session_pb2.Session:
        """One session. Raises NotFound."""
        request = session_service_pb2.GetSessionRequest(session_id=session_id)
        return (await self._calls.one(self._stub.GetSession, request)).session

    def all(
        self, *, labels: Mapping[str, str] | None = None, page_size: int = PAGE_SIZE
    ) -> AsyncIterator[session_pb2.Session]:
        """Sessions with all these labels, the newest first."""
        request = session_service_pb2.ListSessionsRequest(labels=labels, page_size=page_size)
        return self._calls.pages(self._stub.ListSessions, request, lambda response: response.sessions)

    async def update(self, session_id: str, *, labels: Mapping[str, str]) -> session_pb2.Session:
        """Give a session these labels instead of those that it has. Raises NotFound."""
        request = session_service_pb2.UpdateSessionRequest(session_id=session_id, labels=labels)
        return (await self._calls.one(self._stub.UpdateSession, request)).session

    async def delete(self, session_id: str) -> None:
        """Deletes a session with its runs, their logs and its messages. Raises NotFound, or SessionBusy."""
        request = session_service_pb2.DeleteSessionRequest(session_id=session_id)
        await self._calls.one(self._stub.DeleteSession, request)

    def messages(self, session_id: str, *, page_size: int = PAGE_SIZE) -> AsyncIterator[message_pb2.Message]:
        """A session's messages, main and sub-agents' in one order, the newest first."""
        request = session_service_pb2.ListMessagesRequest(session_id=session_id, page_size=page_size)
        return self._calls.pages(self._stub.ListMessages, request, lambda response: response.messages)

    async def state(self, session_id: str) -> str:
        """The values that a session's runs share, as one JSON object. Raises NotFound."""
        request = session_service_pb2.GetSessionStateRequest(session_id=session_id)
        return (await self._calls.one(self._stub.GetSessionState, request)).state_json

    async def update_state(self, session_id: str, changes: Mapping[str, str | None]) -> str:
        """Changes some of these values, all or none, and gives the state as it is then.

        `changes` are JSON texts by name, None to delete a value. Raises NotFound, InvalidRequest, and SessionBusy
        while a run holds the session.
        """
        request = requests.update_state_request(session_id, changes)
        return (await self._calls.one(self._stub.UpdateSessionState, request)).state_json
