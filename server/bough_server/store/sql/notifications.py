"""Notifications of what has been committed, to subscribers in this process and to other servers.

They are hints: one may be lost or come twice, and the tables are the truth.
"""

from collections.abc import Callable

from bough_server.store.ports.workers import Topic

Subscriber = Callable[[str], None]
"""Called with the id of a notification."""


class Notifier:
    """Calls subscribers on the event loop. This one serves a database that no other process uses."""

    def __init__(self) -> None:
        self._subscribers: dict[Topic, list[Subscriber]] = {topic: [] for topic in Topic}
        self._to_others: dict[Topic, list[Subscriber]] = {topic: [] for topic in Topic}

    @property
    def is_connected(self) -> bool:
        """False while nothing is heard of other servers."""
        return True

    def subscribe(self, topic: Topic, callback: Subscriber, *, own: bool = True) -> None:
        """Call `callback` with the id of each notification of a topic; those of this process only if `own`."""
        (self._subscribers if own else self._to_others)[topic].append(callback)

    def publish(self, topic: Topic, log_id: str = "") -> None:
        """Notify of a commit of this process."""
        for callback in self._subscribers[topic]:
            callback(log_id)

    def deliver(self, topic: Topic, log_id: str) -> None:
        """Notify this process of what another one may have committed."""
        for callback in (*self._subscribers[topic], *self._to_others[topic]):
            callback(log_id)

    async def close(self) -> None:
        """Send what is published, within a short time, and deliver nothing more."""
