"""Errors of the client and the server, pickled and copied: worker processes return them to their parents."""

import copy
import pickle

import grpc

import bough.errors
import bough_server.errors
from bough.v1 import error_pb2, event_pb2, input_pb2, usage_pb2
from bough_server.quotas import Quota, QuotaExceeded, QuotaLimits
from bough_server.runtime.child_call import Abort

STATUS = bough.errors.Status(
    code=grpc.StatusCode.ABORTED,
    message="The call failed.",
    reason="INVALID_REQUEST",
    details={"run_id": "r1", "revision": "2"},
    violations=(bough.errors.FieldViolation(field="agent", description="is required", reason="INVALID_REQUEST"),),
    subjects=("coach",),
    retry_delay=1.5,
)
AGENT_ERROR = error_pb2.AgentError(message="The model is away.", reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE)
QUESTION = input_pb2.InputRequest(input_id="i1", prompt="Why?")
BAD_FIELD = bough_server.errors.FieldViolation(field="agent", description="is required")

SPECIAL = [
    bough.errors.BoughError("A sentence."),
    bough.errors.RunNotAnswered("r1", AGENT_ERROR),
    bough.errors.RunFailedError("r1", AGENT_ERROR),
    bough.errors.RunCancelledError("r1", AGENT_ERROR),
    bough.errors.RunInterruptedError("r1", [QUESTION]),
    bough_server.errors.InvalidRequest([BAD_FIELD], reason=error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN),
    bough_server.errors.NotFound("agent", "poet", reason=error_pb2.ERROR_REASON_UNKNOWN_AGENT, hint="Create it."),
    bough_server.errors.AgentLinked("poet", ["coach"]),
    QuotaExceeded(Quota(tenant_id="acme", user_id=None, limits=QuotaLimits(concurrent_runs=1)), "concurrent_runs"),
    bough_server.errors.EvaluationNotEnded("e1", field="baseline.evaluation_id", advice="wait for its end"),
    bough_server.errors.RunError("It failed.", reason="BAD_ARGUMENTS", retryable=True, details_json='{"a":1}'),
    Abort("A sub-agent failed.", reason="SUB_AGENT_FAILED", details_json='{"agent":"poet"}'),
    bough_server.errors.ModelError(
        "The model is away.",
        reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT,
        retry=event_pb2.RETRY_REASON_BAD_RESPONSE,
        retry_after=2.5,
        lost_usage=usage_pb2.Usage(input_tokens=7),
        is_of_the_request=True,
    ),
]
"""Errors with all their attributes. The others are made from a status, those of calls, or from a sentence."""


def classes(base: type[Exception]) -> set[type[Exception]]:
    """Return the classes of a tree that belong to the two packages."""
    found = {base}.union(*(classes(kind) for kind in base.__subclasses__()))
    return {kind for kind in found if kind.__module__.partition(".")[0] in ("bough", "bough_server")}


def test_every_error_survives_pickling_and_copying_with_all_that_it_says() -> None:
    trees = classes(bough.errors.BoughError) | classes(bough_server.errors.BoughError)
    of_calls = classes(bough.errors.CallFailed)
    plain = trees - of_calls - {type(error) for error in SPECIAL}
    errors = [*SPECIAL, *(kind(STATUS) for kind in of_calls), *(kind("A sentence.") for kind in plain)]
    assert {type(error) for error in errors} == trees
    assert len(trees) > 40
    for error in errors:
        error.add_note("It was read in a worker.")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is type(error)
            assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_what_a_call_said_is_read_from_the_copy() -> None:
    copied = pickle.loads(pickle.dumps(bough.errors.RevisionMoved(STATUS)))
    assert (copied.run_id, copied.revision, copied.code, copied.reason) == (
        "r1",
        "2",
        grpc.StatusCode.ABORTED,
        "INVALID_REQUEST",
    )
