"""SessionService: sessions, their messages and their state."""

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Final

from grpc import aio

from bough.v1 import session_pb2, session_service_pb2_grpc
from bough.v1 import session_service_pb2 as pb
from bough_server.api.access import find_changeable
from bough_server.api.pagination import page_of, read_within
from bough_server.clock import Clock
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.identity import Caller, Principal, Scope
from bough_server.ids import new_uuid7
from bough_server.log.session_state import KEY, MAX_DEPTH, is_key, is_value
from bough_server.runs.dependencies import SessionLocks
from bough_server.store.ports.sessions import Blobs, Sessions

PIECE_BYTES: Final = 1024 * 1024
"""The most bytes of a file in one response."""


class SessionService(session_service_pb2_grpc.SessionServiceServicer):
    """Creates, changes and lists sessions."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        blobs: Blobs,
        changing: SessionLocks,
        caller: Callable[[], Caller],
        clock: Clock,
    ) -> None:
        self._sessions, self._blobs, self._changing = sessions, blobs, changing
        self._caller, self._clock = caller, clock

    async def CreateSession(
        self,
        request: pb.CreateSessionRequest,
        context: aio.ServicerContext[pb.CreateSessionRequest, pb.CreateSessionResponse],
    ) -> pb.CreateSessionResponse:
        """Create an empty session for the caller."""
        now_ns = self._clock.now_ns()
        session = await self._sessions.create(
            self._caller().principal,
            session_id=request.session_id or new_uuid7(now_ns),
            labels=dict(request.labels),
            now_ns=now_ns,
            request_id=request.request_id,
            request_digest=_digest(request) if request.request_id else "",
        )
        return pb.CreateSessionResponse(session=session)

    async def GetSession(
        self, request: pb.GetSessionRequest, context: aio.ServicerContext[pb.GetSessionRequest, pb.GetSessionResponse]
    ) -> pb.GetSessionResponse:
        """Return a session."""
        return pb.GetSessionResponse(session=await self._sessions.get(self._caller().visible, request.session_id))

    async def ListSessions(
        self,
        request: pb.ListSessionsRequest,
        context: aio.ServicerContext[pb.ListSessionsRequest, pb.ListSessionsResponse],
    ) -> pb.ListSessionsResponse:
        """List sessions, newest first."""
        scope, labels = self._caller().visible, dict(request.filter.labels)
        include = request.filter.include_evaluation_sessions
        sessions, token = await read_within(
            lambda page: self._sessions.list(scope, labels=labels, include_evaluations=include, page=page),
            page_of(request.page_size, request.page_token),
        )
        return pb.ListSessionsResponse(sessions=sessions, next_page_token=token)

    async def UpdateSession(
        self,
        request: pb.UpdateSessionRequest,
        context: aio.ServicerContext[pb.UpdateSessionRequest, pb.UpdateSessionResponse],
    ) -> pb.UpdateSessionResponse:
        """Replace the labels of a session."""
        scope = await self._find_changeable(self._caller(), request.session_id)
        session = await self._sessions.set_labels(scope, request.session_id, dict(request.labels))
        return pb.UpdateSessionResponse(session=session)

    async def DeleteSession(
        self,
        request: pb.DeleteSessionRequest,
        context: aio.ServicerContext[pb.DeleteSessionRequest, pb.DeleteSessionResponse],
    ) -> pb.DeleteSessionResponse:
        """Delete a session with its runs, their logs and its messages."""
        scope = await self._find_changeable(self._caller(), request.session_id)
        await self._sessions.delete(scope, request.session_id)
        return pb.DeleteSessionResponse()

    async def ListMessages(
        self,
        request: pb.ListMessagesRequest,
        context: aio.ServicerContext[pb.ListMessagesRequest, pb.ListMessagesResponse],
    ) -> pb.ListMessagesResponse:
        """List the messages of a session, newest first."""
        page = page_of(request.page_size, request.page_token)
        messages, token = await self._sessions.list_messages(self._caller().visible, request.session_id, page)
        return pb.ListMessagesResponse(messages=messages, next_page_token=token)

    async def GetSessionState(
        self,
        request: pb.GetSessionStateRequest,
        context: aio.ServicerContext[pb.GetSessionStateRequest, pb.GetSessionStateResponse],
    ) -> pb.GetSessionStateResponse:
        """Return the state of a session."""
        cut = await self._sessions.read_position(self._caller().visible, request.session_id)
        return pb.GetSessionStateResponse(state_json=cut.state_json or "{}")

    async def UpdateSessionState(
        self,
        request: pb.UpdateSessionStateRequest,
        context: aio.ServicerContext[pb.UpdateSessionStateRequest, pb.UpdateSessionStateResponse],
    ) -> pb.UpdateSessionStateResponse:
        """Apply all of the changes to a session's state, or none."""
        if wrong := list(_mistakes(request.state_changes)):
            raise InvalidRequest(wrong)
        scope = await self._find_changeable(self._caller(), request.session_id)
        # Looked up first: what another user sees of a session, and holds up, is nothing.
        session = await self._sessions.get(scope, request.session_id)
        owner = Principal(tenant_id=scope.tenant_id, user_id=session.user_id)
        # With the lock that starting a run takes, so that the change does not slip between a run's read and its start.
        async with self._changing.hold(owner, request.session_id):
            state_json = await self._sessions.update_state(scope, request.session_id, request.state_changes)
        return pb.UpdateSessionStateResponse(state_json=state_json or "{}")

    async def ReadBlob(
        self, request: pb.ReadBlobRequest, context: aio.ServicerContext[pb.ReadBlobRequest, pb.ReadBlobResponse]
    ) -> AsyncGenerator[pb.ReadBlobResponse, None]:
        """Stream a file of a session."""
        scope, sent, size = self._caller().visible, 0, 1
        while sent < size:
            read = self._blobs.read(scope, request.session_id, request.sha256, offset=sent, count=PIECE_BYTES)
            piece = await read
            size = piece.size
            response = pb.ReadBlobResponse(data=piece.data)
            if not sent:
                response.size_bytes, response.media_type = size, piece.media_type
            yield response
            sent += len(piece.data)

    async def _find_changeable(self, caller: Caller, session_id: str) -> Scope:
        async def find_user(scope: Scope) -> str:
            return (await self._sessions.get(scope, session_id)).user_id

        return await find_changeable(caller, find_user)


def _digest(request: pb.CreateSessionRequest) -> str:
    """Return the SHA-256 hex digest of a request; equal content has equal digests."""
    content = pb.CreateSessionRequest()
    content.CopyFrom(request)
    content.DiscardUnknownFields()
    return hashlib.sha256(content.SerializeToString(deterministic=True)).hexdigest()


def _mistakes(changes: Sequence[session_pb2.SessionStateChange]) -> Iterator[FieldViolation]:
    for index, change in enumerate(changes):
        if not is_key(change.key):
            description = f"A key must match {KEY}."
            yield FieldViolation(field=f"state_changes[{index}].key", description=description)
        if change.HasField("value_json") and not is_value(change.value_json):
            description = (
                f"A value must be JSON text, nested at most {MAX_DEPTH} deep, with numbers that a double can hold."
            )
            description += " Omit it to delete the value."
            yield FieldViolation(field=f"state_changes[{index}].value_json", description=description)
