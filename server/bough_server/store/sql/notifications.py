"""Notifications of what has been committed, to subscribers in this process.

They are hints: one may be lost or come twice, and the tables are the truth.
"""

from collections.abc import Callable

from bough_server.store.worker_ports import Topic


class Notifier:
    """Calls subscribers on the event loop."""

    def __init__(self) -> None:
        self._subscribers: dict[Topic, list[Callable[[str], None]]] = {topic: [] for topic in Topic}

    def subscribe(self, topic: Topic, callback: Callable[[str], None]) -> None:
        """Call `callback` with the id of each notification of a topic."""
        self._subscribers[topic].append(callback)

    def publish(self, topic: Topic, log_id: str = "") -> None:
        """Notify of a commit of this process."""
        self.deliver(topic, log_id)

    def deliver(self, topic: Topic, log_id: str) -> None:
        """Call the subscribers of a topic."""
        for callback in self._subscribers[topic]:
            callback(log_id)
