"""Metrics of an operator, for a whole server."""

import threading
from collections.abc import Mapping

from bough.v1.eval_set_pb2 import EvalCase
from bough.v1.invocation_pb2 import Invocation
from bough_server import metric
from bough_server.messages import text_of

RELEASE = threading.Event()


@metric
def starts_with(invocation: Invocation, case: EvalCase, config: Mapping[str, object]) -> tuple[bool, str]:
    """Whether the answer begins with the configured text."""
    return text_of(invocation.final_response).startswith(str(config["text"])), f"of {case.id}"


@metric
def raising(invocation: Invocation, case: EvalCase) -> float:
    """Raises."""
    raise RuntimeError(f"no score for {case.id}")


@metric
def hanging(invocation: Invocation, case: EvalCase) -> float:
    """Returns when the test says so."""
    RELEASE.wait(60)
    return 1.0
