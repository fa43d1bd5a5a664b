"""The messages that an agent sees of a whole transcript and a session, made at once."""

from collections.abc import Sequence

from bough.v1 import message_pb2
from bough_server.history.rewrite import Rewriter, as_context
from bough_server.history.session import SessionView, TranscriptView
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.history.visible import VisibleMessage, reader_of


def build(
    transcript: Transcript,
    session: Sequence[HistoryEntry],
    *,
    scope: message_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = as_context,
) -> list[message_pb2.Message]:
    """The messages for the model of an invocation, as its agent sees them; every call has its result."""
    return [one.message for one in view(transcript, session, scope=scope, rewrite=rewrite)]


def view(
    transcript: Transcript,
    session: Sequence[HistoryEntry],
    *,
    scope: message_pb2.HistoryScope.ValueType,
    rewrite: Rewriter = as_context,
) -> list[VisibleMessage]:
    """The messages of `build` with their origins."""
    reader = reader_of(transcript, scope=scope, rewrite=rewrite)
    return TranscriptView(transcript, reader).below(SessionView(reader).extend_to(session))
