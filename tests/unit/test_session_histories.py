"""Histories of sessions that are kept between runs: what is read again, what is not, and what is dropped."""

from collections.abc import Sequence

import pytest

from bough.v1 import message_pb2
from bough_server.history.session import SessionHistories, SessionView
from bough_server.history.visible import Reader
from bough_server.identity import Principal
from bough_server.store.ports.sessions import StoredCall, StoredMessage
from bough_server.store.sql.sessions import SqlSessions

ME = Principal(tenant_id="local", user_id="local")
OTHER = Principal(tenant_id="other", user_id="local")


class FakeSessions:
    """The one read of sessions that histories need, from lists; it keeps from where it was asked to read."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], list[StoredMessage]] = {}
        self.asked: list[int] = []

    def add(self, run_id: str, *texts: str, session_id: str = "s", principal: Principal = ME) -> None:
        """A run's messages at the end of a session."""
        session = self.stored.setdefault((principal.tenant_id, session_id), [])
        for text in texts:
            position = session[-1].message.position + 1 if session else 1
            message = message_pb2.Message(position=position, invocation_id=run_id, parts=[message_pb2.Part(text=text)])
            session.append(StoredMessage(message=message, run_id=run_id, agent="lead", chain="c"))

    async def history(
        self, principal: Principal, session_id: str, *, through: int, since: int = 0
    ) -> Sequence[StoredMessage]:
        """The messages between two positions."""
        self.asked.append(since)
        session = self.stored.get((principal.tenant_id, session_id), [])
        return [one for one in session if since <= one.message.position <= through]


class Reading:
    """Histories over fake sessions."""

    def __init__(self, **bounds: int) -> None:
        self.sessions = FakeSessions()
        self.histories = SessionHistories(**bounds)

    async def texts(self, through: int, *, session_id: str = "s", principal: Principal = ME) -> list[str]:
        """The texts of a session up to a position."""
        sessions: SqlSessions = self.sessions  # type: ignore[assignment]  # only its history is read
        found = await self.histories.read(sessions, principal, session_id, through=through)
        return [part.text for one in found.stored for part in one.message.parts]


@pytest.fixture
def reading() -> Reading:
    return Reading()


async def test_a_run_reads_only_what_the_run_before_it_did_not_see(reading: Reading) -> None:
    reading.sessions.add("r1", "a", "b")
    assert await reading.texts(2) == ["a", "b"]
    reading.sessions.add("r2", "c", "d")
    assert await reading.texts(4) == ["a", "b", "c", "d"]
    assert await reading.texts(4) == ["a", "b", "c", "d"]
    assert reading.sessions.asked == [0, 2, 4]


async def test_an_earlier_cut_is_read_apart_and_changes_nothing_that_is_kept(reading: Reading) -> None:
    reading.sessions.add("r1", "a", "b", "c")
    assert await reading.texts(3) == ["a", "b", "c"]
    assert await reading.texts(1) == ["a"]
    assert await reading.texts(3) == ["a", "b", "c"]
    assert reading.sessions.asked == [0, 0, 3]


async def test_a_session_that_was_deleted_and_made_again_is_read_anew(reading: Reading) -> None:
    reading.sessions.add("r1", "a", "b")
    assert await reading.texts(2) == ["a", "b"]
    reading.sessions.stored.clear()
    reading.sessions.add("r2", "a", "b", "c")
    assert await reading.texts(3) == ["a", "b", "c"]
    reading.sessions.stored.clear()
    assert await reading.texts(3) == []
    assert reading.sessions.asked == [0, 2, 0, 3, 0]


async def test_calls_after_the_last_message_are_part_of_what_must_be_found_again(reading: Reading) -> None:
    reading.sessions.add("r1", "a")
    session = reading.sessions.stored["local", "s"]
    message = message_pb2.Message(position=1, invocation_id="r1", parts=[message_pb2.Part(text="call")])
    session.append(StoredCall(message=message, run_id="r1", agent="lead", chain="c", sequence=4))
    assert await reading.texts(1) == ["a", "call"]
    session.pop()
    reading.sessions.add("r2", "b")
    assert await reading.texts(2) == ["a", "b"]
    assert reading.sessions.asked == [0, 1, 0]


async def test_tenants_have_sessions_of_the_same_name_apart(reading: Reading) -> None:
    reading.sessions.add("r1", "mine")
    reading.sessions.add("r2", "theirs", principal=OTHER)
    assert await reading.texts(1) == ["mine"]
    assert await reading.texts(1, principal=OTHER) == ["theirs"]
    assert await reading.texts(1) == ["mine"]


async def test_beyond_the_bound_of_bytes_the_session_used_longest_ago_is_dropped() -> None:
    reading = Reading(max_bytes=25_000)
    for session_id in ("s1", "s2", "s3"):
        reading.sessions.add("r1", "x" * 10_000, session_id=session_id)
        await reading.texts(1, session_id=session_id)
    reading.sessions.asked.clear()
    for session_id in ("s3", "s2", "s1"):
        await reading.texts(1, session_id=session_id)
    assert reading.sessions.asked == [1, 1, 0]


async def test_a_session_larger_than_the_bound_is_not_kept() -> None:
    reading = Reading(max_bytes=5_000)
    reading.sessions.add("r1", "x" * 10_000)
    assert len(await reading.texts(1)) == len(await reading.texts(1)) == 1
    assert reading.sessions.asked == [0, 0]


async def test_views_of_a_session_count_against_the_bound_and_the_oldest_is_dropped(reading: Reading) -> None:
    reading.sessions.add("r1", "x" * 1_000)
    sessions: SqlSessions = reading.sessions  # type: ignore[assignment]  # only its history is read
    history = await reading.histories.read(sessions, ME, "s", through=1)
    session, bare = message_pb2.HISTORY_SCOPE_SESSION, history.size
    sizes: list[int] = []
    for number in range(12):
        reader = Reader(agent=f"reader{number}", chains=frozenset("c"), scope=session)
        assert len(history.view(number, lambda reader=reader: SessionView(reader)).shown) == 1  # type: ignore[misc]
        sizes.append(history.size - bare)
    assert sizes[0] > 1_000  # each of them has the message in other words
    assert sizes == [sizes[0] * min(number, 8) for number in range(1, 13)]
