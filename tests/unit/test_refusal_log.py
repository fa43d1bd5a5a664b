"""The log of refused calls: bounded for each method and code, and nothing uncounted."""

import structlog

from bough_server.errors import InvalidRequest, NotFound
from bough_server.interceptors.errors import LOGGED_REFUSALS, RefusalLog
from tests.support.held_clock import HeldClock

RUN, TREE = "/bough.v1.AgentService/Run", "/bough.v1.EvalService/GetTree"


def test_a_client_in_a_loop_gets_few_lines_a_second_and_then_one_that_counts_the_others() -> None:
    clock = HeldClock()
    refusals = RefusalLog(clock)
    missing, invalid = NotFound("run", "r"), InvalidRequest([])
    with structlog.testing.capture_logs() as logged, structlog.contextvars.bound_contextvars(x_request_id="last"):
        for _ in range(1_244):
            refusals.log(missing, RUN)
            clock.advance(0.0005)
        refusals.log(missing, TREE)
        refusals.log(invalid, RUN)
        first = list(logged)
        clock.advance(1.0)
        refusals.log(invalid, TREE)
        clock.advance(1.0)
        refusals.log(missing, RUN)
    found = {"event": "call refused", "code": "NOT_FOUND", "reason": "NOT_FOUND", "log_level": "info"}
    wrong = found | {"code": "INVALID_ARGUMENT", "reason": "INVALID_REQUEST", "fields": ""}
    more = {"event": "more calls refused", "method": RUN, "code": "NOT_FOUND", "count": 1_234, "log_level": "info"}
    assert (LOGGED_REFUSALS, first) == (10, [*[found] * 11, wrong])
    assert logged[len(first) :] == [more, wrong, found]
