"""Notifications between the servers on one PostgreSQL database, by LISTEN and NOTIFY on a separate connection.

The connection is served by the event loop itself, without a task or a thread: a notification that is sent or received
costs some ten microseconds. Commits never wait for it. While it is lost, only the poll finds what others commit.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psycopg
import structlog
from psycopg import pq, sql

from bough_server.clock import loop_time
from bough_server.ids import new_uuid4
from bough_server.store.ports.workers import Topic
from bough_server.store.postgres.database import display_url, listen_arguments
from bough_server.store.sql.notifications import Notifier

SEND_INTERVAL: Final = 0.01
"""The least seconds between two notifications; everything published in between is sent with the next one."""

POLL_SECONDS: Final = 1.0
"""Seconds between two polls for commits of other servers, in case their notifications were lost."""

MAX_PAYLOAD: Final = 7_999
"""The most bytes of a notification, by PostgreSQL's own bound."""

MAX_PENDING: Final = 10_000
"""The most ids of a topic that wait to be sent; if there are more, one notification stands for all of them."""

_ANSWER_SECONDS: Final = 10.0
"""Seconds that a notification may take before its connection counts as broken."""

_CLOSE_SECONDS: Final = 1.0
"""How long closing waits until what is published has been sent."""

_FIRST_BACKOFF: Final = 0.1
_MAX_BACKOFF: Final = 5.0
"""Bounds of the seconds between two tries to connect."""

_CHANNEL: Final = "SELECT 'bough_' || md5(current_schema())"
"""Databases have separate channels, schemas in one database do not."""

_TOPICS: Final = {str(topic): topic for topic in Topic}

_NOTIFY: Final = b"SELECT pg_notify($1, $2)"

_log = structlog.get_logger(__name__)


class _Outbox:
    """What is published and not sent yet: ids by topic, and the empty id alone for too many."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._ids: dict[Topic, dict[str, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, topic: Topic, log_id: str) -> None:
        """Add a notification; one that is there already is sent once."""
        ids = self._ids.setdefault(topic, {})
        if "" in ids:
            return
        if not log_id or len(ids) == MAX_PENDING:
            ids.clear()
            log_id = ""
        ids[log_id] = None

    def take(self) -> bytes:
        """Take the oldest notifications of each topic, as many as fit, and return them as a payload."""
        parts, room = [self._server], MAX_PAYLOAD - len(self._server)
        for topic, ids in list(self._ids.items()):
            taken: list[str] = []
            room -= len(topic) + 2
            while ids and room > len(first := next(iter(ids))):
                del ids[first]
                taken.append(first)
                room -= len(first) + 1
            if taken:
                parts.append(f"{topic}={','.join(taken)}")
            if not ids:
                del self._ids[topic]
        return " ".join(parts).encode()


class _Link:
    """A connection that listens to a channel and sends to it, one notification at a time."""

    def __init__(self, connection: "psycopg.AsyncConnection[tuple[object, ...]]", channel: bytes) -> None:
        self._connection, self._channel = connection, channel
        self._loop = asyncio.get_running_loop()
        self._socket = connection.fileno()  # a lost connection does not tell it
        self._is_reading = False
        self._deadline: asyncio.TimerHandle | None = None
        self._on_payload: Callable[[bytes], None] = lambda _: None
        self._on_sent: Callable[[], None] = lambda: None
        self.failure: asyncio.Future[None] = self._loop.create_future()
        """Its exception says why the connection cannot be used any more."""

    @property
    def is_sending(self) -> bool:
        """True while a notification is under way."""
        return self._deadline is not None

    def open(self, on_payload: Callable[[bytes], None], on_sent: Callable[[], None]) -> None:
        """Pass on each payload from now on, and the end of each notification."""
        self._on_payload, self._on_sent = on_payload, on_sent
        self._loop.add_reader(self._socket, self._read)
        self._is_reading = True
        self._read()  # what the driver has read already

    def close(self) -> None:
        """Stop reading."""
        if self._is_reading:  # once: the number of the socket may be that of another one later
            self._loop.remove_reader(self._socket)
            self._is_reading = False
        if self._deadline is not None:
            self._deadline.cancel()

    def send(self, payload: bytes) -> None:
        """Begin to send a notification; none may be under way."""
        self._deadline = self._loop.call_later(_ANSWER_SECONDS, self._fail, TimeoutError("no answer to a notification"))
        try:
            self._connection.pgconn.send_query_params(_NOTIFY, [self._channel, payload])
            self._connection.pgconn.flush()  # it fits the socket's buffer, else the deadline ends the connection
        except psycopg.Error as error:
            self._fail(error)

    def _read(self) -> None:
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while (received := pgconn.notifies()) is not None:
                self._on_payload(received.extra)
            while self.is_sending and not pgconn.is_busy():
                self._read_result(pgconn.get_result())
        except psycopg.Error as error:
            self._fail(error)

    def _read_result(self, result: pq.abc.PGresult | None) -> None:
        """Take a part of the answer to a notification: its result, then None."""
        if result is not None and result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
        if result is None and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._on_sent()

    def _fail(self, error: Exception) -> None:
        self.close()
        if not self.failure.done():
            self.failure.set_exception(error)


class PostgresNotifier(Notifier):
    """A Notifier whose notifications reach the other servers on the database too.

    Each second, and when its connection is back, it notifies subscribers that any log may have grown and any command
    may have been posted, because notifications sent in between are lost.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._server = new_uuid4()
        self._outbox = _Outbox(self._server)
        self._link: _Link | None = None
        self._sent_at = 0.0
        self._sending: asyncio.TimerHandle | None = None
        self._is_quiet = asyncio.Event()
        self._is_reported = False

    @property
    def is_connected(self) -> bool:
        """See Notifier."""
        return self._link is not None

    def start(self) -> None:
        """Connect in the background, and begin to deliver. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._poll = self._loop.call_later(POLL_SECONDS, self._run_poll)
        self._work = self._loop.create_task(self._keep_connection(), name="notifications")

    def publish(self, topic: Topic, log_id: str = "") -> None:
        """See Notifier. Other servers are notified soon after."""
        super().publish(topic, log_id)
        self._outbox.add(topic, log_id)
        self._send_soon()

    async def close(self) -> None:
        """See Notifier."""
        if self._link is not None and (self._outbox or self._link.is_sending):
            self._is_quiet.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._is_quiet.wait()
        self._poll.cancel()
        if self._sending is not None:
            self._sending.cancel()
        self._work.cancel()
        await asyncio.wait({self._work})

    def _run_poll(self) -> None:
        self._poll = self._loop.call_later(POLL_SECONDS, self._run_poll)
        for topic in (Topic.LOG, Topic.COMMANDS):
            self.deliver(topic, "")

    def _send_soon(self) -> None:
        if self._sending is None and self._link is not None and not self._link.is_sending:
            self._sending = self._loop.call_at(self._sent_at + SEND_INTERVAL, self._send)

    def _send(self) -> None:
        self._sending = None
        if self._link is not None and self._outbox:
            self._sent_at = loop_time()
            self._link.send(self._outbox.take())

    def _on_notification_sent(self) -> None:
        if self._outbox:
            self._send_soon()
        else:
            self._is_quiet.set()

    def _receive(self, payload: bytes) -> None:
        server, *parts = payload.decode(errors="replace").split(" ")
        if server == self._server:
            return
        for part in parts:
            name, _, ids = part.partition("=")
            topic = _TOPICS.get(name)  # a later version may have more
            if topic is not None:
                for log_id in ids.split(","):
                    self.deliver(topic, log_id)

    async def _keep_connection(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            began = loop_time()
            try:
                await self._serve()
            except (psycopg.Error, OSError) as error:
                self._report(error)
            if loop_time() - began > _MAX_BACKOFF:
                backoff = _FIRST_BACKOFF
            await asyncio.sleep(backoff)
            backoff = min(_MAX_BACKOFF, backoff * 2)

    async def _serve(self) -> None:
        """Connect, listen and send until the connection is lost. Raises psycopg.Error and OSError."""
        connection = await psycopg.AsyncConnection.connect(autocommit=True, **listen_arguments(self._url))
        try:
            (channel,) = await (await connection.execute(_CHANNEL)).fetchone() or ("",)
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(str(channel))))
            link = _Link(connection, str(channel).encode())
            try:
                self._begin(link)
                await link.failure
            finally:
                self._link = None
                self._is_quiet.set()
                link.close()
        finally:
            await connection.close()

    def _begin(self, link: _Link) -> None:
        if self._is_reported:
            self._is_reported = False
            _log.info("notifications of other servers are received again", database=display_url(self._url))
        self._link = link
        link.open(self._receive, self._on_notification_sent)
        for topic in (Topic.LOG, Topic.COMMANDS, Topic.UNOWNED):
            self.deliver(topic, "")
        if self._outbox:
            self._send_soon()

    def _report(self, error: Exception) -> None:
        if not self._is_reported:
            self._is_reported = True
            _log.warning(
                "notifications of other servers are not received: their commits are found by a poll each second",
                database=display_url(self._url),
                error=" ".join(str(error).split()),
            )
