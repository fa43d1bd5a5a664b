"""Failures of the database in the server's log: each once a minute of the server's clock."""

from structlog.testing import capture_logs

from bough_server.store.sql.failure_log import REPEAT_SECONDS, FailureLog
from tests.support.held_clock import HeldClock


def test_a_failure_that_comes_again_is_logged_once_a_minute_until_the_database_works() -> None:
    clock = HeldClock()
    failures = FailureLog(clock)

    def fail() -> int:
        with capture_logs() as logged:
            failures.warn("commit failed", OSError("the disk is full"))
        return len(logged)

    assert [fail(), fail()] == [1, 0]
    clock.advance(REPEAT_SECONDS)
    assert [fail(), fail()] == [1, 0]
    failures.clear()
    assert fail() == 1
