"""Failed calls as exceptions: the right class, with the details that the server sent."""

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc import aio

from bough import errors
from tests.clients.stream_server import rich_status


def failed(code: grpc.StatusCode, message: str, *details: object) -> aio.AioRpcError:
    status = rich_status(code, message, *details)
    metadata = aio.Metadata(("bough-last-sequence", "7"), ("grpc-status-details-bin", status))
    return aio.AioRpcError(code, trailing_metadata=metadata, details=message)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExists),
        (grpc.StatusCode.OUT_OF_RANGE, errors.OutOfRange),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.CANCELLED, errors.CallCancelled),
        (grpc.StatusCode.ABORTED, errors.CallFailed),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.CallFailed),
        (grpc.StatusCode.INTERNAL, errors.CallFailed),
    ],
)
def test_each_code_has_its_class(code: grpc.StatusCode, kind: type[errors.CallFailed]) -> None:
    error = errors.from_rpc_error(aio.AioRpcError(code, details="Why."))
    assert (type(error), error.code, error.message, error.reason) == (kind, code, "Why.", "")


def test_a_deadline_that_passed_in_the_client_has_the_reason_that_the_server_gives_it() -> None:
    error = errors.from_rpc_error(aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, details="Deadline Exceeded"))
    assert (type(error), error.reason) == (errors.DeadlineExceeded, "DEADLINE_EXCEEDED")
    assert error.message == "The call's deadline passed before the server answered."


def test_a_call_that_a_stopping_server_never_took_up_was_not_cancelled_by_anybody() -> None:
    error = errors.from_rpc_error(aio.AioRpcError(grpc.StatusCode.CANCELLED, details="CANCELLED"))
    assert (type(error), error.code) == (errors.Unavailable, grpc.StatusCode.UNAVAILABLE)
    assert error.message == "The server stopped before it accepted the call; repeat it."


def test_an_agent_that_others_link_to_names_them() -> None:
    info = error_details_pb2.ErrorInfo(reason="AGENT_LINKED", domain="bough.dev", metadata={"name": "poet"})
    linked = error_details_pb2.PreconditionFailure(
        violations=[
            error_details_pb2.PreconditionFailure.Violation(type="AGENT_LINKED", subject=name)
            for name in ("coach", "editor")
        ]
    )
    error = errors.from_rpc_error(failed(grpc.StatusCode.FAILED_PRECONDITION, "It is linked.", info, linked))
    assert isinstance(error, errors.AgentLinked)
    assert error.linked_by == ("coach", "editor")


def test_a_busy_session_names_the_run_that_holds_it() -> None:
    info = error_details_pb2.ErrorInfo(reason="SESSION_BUSY", domain="bough.dev", metadata={"run_id": "r1"})
    error = errors.from_rpc_error(failed(grpc.StatusCode.ABORTED, "Busy.", info))
    assert isinstance(error, errors.SessionBusy)
    assert (error.run_id, error.reason) == ("r1", "SESSION_BUSY")


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("ALREADY_ANSWERED", errors.AlreadyAnswered),
        ("RUN_ENDED", errors.RunEnded),
        ("FORK_REFUSED", errors.ForkRefused),
        ("AGENT_FIXED", errors.AgentFixed),
        ("AGENT_LINKED", errors.AgentLinked),
        ("AGENT_UNUSABLE", errors.AgentUnusable),
        ("SOMETHING_LATER", errors.CallFailed),
    ],
)
def test_what_a_run_cannot_do_any_more_has_a_class_for_each_reason(reason: str, kind: type[errors.CallFailed]) -> None:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="bough.dev")
    error = errors.from_rpc_error(failed(grpc.StatusCode.FAILED_PRECONDITION, "No.", info))
    assert (type(error), error.reason, error.message) == (kind, reason, "No.")


def test_an_invalid_request_names_every_field() -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="agent", description="must not be empty", reason="INVALID_REQUEST")
    bad.field_violations.add(field="input", description="is required", reason="UNKNOWN_AGENT")
    info = error_details_pb2.ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev")
    error = errors.from_rpc_error(failed(grpc.StatusCode.INVALID_ARGUMENT, "Two mistakes.", info, bad))
    assert isinstance(error, errors.InvalidRequest)
    assert error.violations == (
        errors.FieldViolation(field="agent", description="must not be empty", reason="INVALID_REQUEST"),
        errors.FieldViolation(field="input", description="is required", reason="UNKNOWN_AGENT"),
    )


def test_a_server_says_when_to_come_back() -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    error = errors.from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "Stopping.", retry))
    assert error.status.retry_delay == 1.5


def test_details_of_another_kind_are_passed_over() -> None:
    resource = error_details_pb2.ResourceInfo(resource_type="run", resource_name="x")
    error = errors.from_rpc_error(failed(grpc.StatusCode.NOT_FOUND, "There is no run 'x'.", resource))
    assert error.status == errors.Status(code=grpc.StatusCode.NOT_FOUND, message="There is no run 'x'.")


def test_a_status_without_a_message_still_says_something() -> None:
    assert errors.from_rpc_error(aio.AioRpcError(grpc.StatusCode.UNKNOWN)).message == "The call failed with UNKNOWN."
