"""Ports of the store for sessions, with their messages, their state and their files."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bough.v1 import message_pb2, session_pb2
from bough_server.identity import Principal, Scope
from bough_server.store.ports.runs import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message of a session, with the run and the agent invocation that it belongs to."""

    message: message_pb2.Message
    run_id: str
    agent: str
    """The agent whose invocation it belongs to; of a SUB_AGENT_USER message, the sub-agent that received it."""
    chain: str
    """Hash of the agents' names from the root to that agent; see projection.agent_chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall(StoredMessage):
    """Calls of linked agents that a model made, or the result of one, which are not in the list of messages.

    The list has the messages that the agents exchanged instead. `message` has the position of the one before it.
    """

    sequence: int
    """Sequence of the event of its run that recorded it."""
    inside: tuple[str, ...] = ()
    """Of a result: ids of the called invocation and of all that were below it."""


class SessionPosition(NamedTuple):
    """The point in a session at which a run starts."""

    position: int
    """Position of the last message; 0 if there is none."""
    state_json: str
    """The session state as a JSON object; empty if it has no values."""


class Sessions(Protocol):
    """Sessions, with their messages and their session state."""

    async def create(
        self,
        principal: Principal,
        *,
        session_id: str,
        labels: Mapping[str, str],
        now_ns: int,
        request_id: str = "",
        request_digest: str = "",
    ) -> session_pb2.Session:
        """Create an empty session, or return the one that the same request created before.

        Raises SessionExists if the tenant has a session of this id, RequestIdReused if the user has used the request id
        with another digest, and StorageFailed.
        """
        ...

    async def get(self, scope: Scope, session_id: str) -> session_pb2.Session:
        """Return a session in a scope. Raises NotFound."""
        ...

    async def list(
        self, scope: Scope, *, labels: Mapping[str, str], page: Page, include_evaluations: bool = False
    ) -> tuple[Sequence[session_pb2.Session], str]:
        """Return a page of a scope's sessions with these labels, newest first, and the next page's token."""
        ...

    async def set_labels(self, scope: Scope, session_id: str, labels: Mapping[str, str]) -> session_pb2.Session:
        """Replace the labels of a session in a scope. Raises NotFound."""
        ...

    async def delete(self, scope: Scope, session_id: str) -> None:
        """Delete a session with its runs, logs, messages, and the files that no other session of the tenant refers to.

        Usage entries are kept.

        Raises NotFound, and SessionBusy while a run holds the session.
        """
        ...

    async def read_position(self, scope: Scope, session_id: str) -> SessionPosition:
        """Return the session's last position and its state, in one consistent read. Raises NotFound."""
        ...

    async def update_state(
        self, scope: Scope, session_id: str, changes: Sequence[session_pb2.SessionStateChange]
    ) -> str:
        """Apply all changes to the session state, or none, and return the new state in the form of SessionPosition.

        Names and values must have been checked. Raises NotFound, SessionBusy while a run holds the session, and
        InvalidRequest if the state would be too large.
        """
        ...

    async def history(
        self, principal: Principal, session_id: str, *, through: int, since: int = 0
    ) -> Sequence[StoredMessage]:
        """Return the messages from one position to another, both included, and the calls among them as StoredCall.

        They are in order. The messages are one consistent read.
        """
        ...

    async def messages(self, principal: Principal, session_id: str, *, through: int) -> Sequence[StoredMessage]:
        """Return the messages of a session of the principal's tenant up to a position, in order."""
        ...

    async def list_messages(
        self, scope: Scope, session_id: str, page: Page
    ) -> tuple[Sequence[message_pb2.Message], str]:
        """Return a page of messages, newest first, each with the id of the run that recorded it, and the next token.

        Raises NotFound.
        """
        ...


class BlobPiece(NamedTuple):
    """Bytes of a file from some offset on, the size of the whole file, and its media type."""

    data: bytes
    size: int
    media_type: str


class Blobs(Protocol):
    """The files of sessions. EventLog writes them, in the transactions of the events that refer to them."""

    async def read(
        self, scope: Scope, session_id: str, sha256: str, *, offset: int = 0, count: int | None = None
    ) -> BlobPiece:
        """Return up to `count` bytes of a file of a session in a scope; default: all from `offset` on.

        Raises NotFound, also for a file that only other sessions refer to.
        """
        ...

    async def find_missing(self, principal: Principal, session_id: str, sha256s: Collection[str]) -> Collection[str]:
        """Return those of some hashes under which a session has no file."""
        ...
