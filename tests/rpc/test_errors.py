"""Errors of calls, as the caller receives them."""

from base64 import b64encode
from collections.abc import AsyncGenerator, Callable
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, PreconditionFailure, ResourceInfo, RetryInfo
from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import error_pb2, follow_pb2
from bough.v1.agent_service_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from bough_server import errors
from tests.rpc.interceptor_server import behaving, outcome, status_details

_REQUEST = pb.GetRunRequest(run_id="r")


async def _failed_call(error: Exception) -> aio.AioRpcError:
    async def get_run(request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        raise error

    async with behaving(add_AgentServiceServicer_to_server, GetRun=get_run) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await AgentServiceStub(channel).GetRun(_REQUEST)
        return caught.value


def linking(name: str) -> PreconditionFailure.Violation:
    return PreconditionFailure.Violation(type="AGENT_LINKED", subject=name, description="links to the agent")


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (
            errors.NotFound("run", "r"),
            grpc.StatusCode.NOT_FOUND,
            (ErrorInfo(reason="NOT_FOUND", domain="bough.dev"), ResourceInfo(resource_type="run", resource_name="r")),
        ),
        (
            errors.UnknownAgent("absnt", ["present", "absent"]),
            grpc.StatusCode.NOT_FOUND,
            (
                ErrorInfo(reason="UNKNOWN_AGENT", domain="bough.dev", metadata={"name": "absnt", "nearest": "absent"}),
                ResourceInfo(resource_type="agent", resource_name="absnt"),
            ),
        ),
        (
            errors.InvalidRequest(
                [
                    errors.FieldViolation(field="input.parts", description="is too large"),
                    errors.FieldViolation(
                        field="definition.llm.tools[0]",
                        description="is gone",
                        reason=error_pb2.ERROR_REASON_UNKNOWN_TOOL,
                    ),
                ]
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            (
                ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev"),
                BadRequest(
                    field_violations=[
                        BadRequest.FieldViolation(
                            field="input.parts", description="is too large", reason="INVALID_REQUEST"
                        ),
                        BadRequest.FieldViolation(
                            field="definition.llm.tools[0]", description="is gone", reason="UNKNOWN_TOOL"
                        ),
                    ]
                ),
            ),
        ),
        (
            errors.RequestIdReused("The request id was used before.", details={"run_id": "r"}),
            grpc.StatusCode.ALREADY_EXISTS,
            (ErrorInfo(reason="REQUEST_ID_REUSED", domain="bough.dev", metadata={"run_id": "r"}),),
        ),
        (
            errors.SessionBusy("The session has a run.", details={"run_id": "r"}),
            grpc.StatusCode.ABORTED,
            (ErrorInfo(reason="SESSION_BUSY", domain="bough.dev", metadata={"run_id": "r"}),),
        ),
        (
            errors.SessionExists("There already is a session 's'.", details={"session_id": "s"}),
            grpc.StatusCode.ALREADY_EXISTS,
            (ErrorInfo(reason="SESSION_EXISTS", domain="bough.dev", metadata={"session_id": "s"}),),
        ),
        (
            errors.AgentLinked("poet", ["agent", "coach"]),
            grpc.StatusCode.FAILED_PRECONDITION,
            (
                ErrorInfo(reason="AGENT_LINKED", domain="bough.dev", metadata={"name": "poet"}),
                PreconditionFailure(violations=[linking("agent"), linking("coach")]),
            ),
        ),
        (
            errors.SequenceOutOfRange("The log ends at 3.", details={"last_sequence": "3"}),
            grpc.StatusCode.OUT_OF_RANGE,
            (ErrorInfo(reason="SEQUENCE_OUT_OF_RANGE", domain="bough.dev", metadata={"last_sequence": "3"}),),
        ),
        (
            errors.ServerStopping("The server stops."),
            grpc.StatusCode.UNAVAILABLE,
            (ErrorInfo(reason="SERVER_STOPPED", domain="bough.dev"), RetryInfo(retry_delay=Duration(seconds=1))),
        ),
        (
            errors.RunParked("The code is missing."),
            grpc.StatusCode.UNAVAILABLE,
            (ErrorInfo(reason="RUN_PARKED", domain="bough.dev"), RetryInfo(retry_delay=Duration(seconds=5))),
        ),
        (
            errors.StorageFailed("The storage failed."),
            grpc.StatusCode.UNAVAILABLE,
            (ErrorInfo(reason="STORAGE_FAILED", domain="bough.dev"), RetryInfo(retry_delay=Duration(seconds=1))),
        ),
    ],
)
async def test_a_call_error_arrives_with_its_code_its_sentence_and_its_details(
    error: errors.CallError, code: grpc.StatusCode, details: tuple[Any, ...]
) -> None:
    failed = await _failed_call(error)
    assert (failed.code(), failed.details(), status_details(failed)) == (code, error.message, details)


async def test_a_defect_arrives_as_one_generic_sentence_and_is_logged_whole(capsys: pytest.CaptureFixture[str]) -> None:
    failed = await _failed_call(ZeroDivisionError("the secret of the driver"))
    assert (failed.code(), failed.details(), status_details(failed)) == (
        grpc.StatusCode.INTERNAL,
        "The server failed unexpectedly. Its log has the details.",
        (ErrorInfo(reason="INTERNAL", domain="bough.dev"),),
    )
    written = capsys.readouterr()
    assert "the secret of the driver" in written.out + written.err


async def test_many_violations_are_cut_to_what_metadata_can_carry_and_counted() -> None:
    violations = [
        errors.FieldViolation(field=f"definitions[{i}].name", description="is wrong in some way") for i in range(1_000)
    ]
    failed = await _failed_call(errors.InvalidRequest(violations))
    info, bad_request = status_details(failed)
    shown = [violation.field for violation in bad_request.field_violations]
    assert info == ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev", metadata={"violations": "1000"})
    assert 10 < len(shown) < 1_000
    assert shown == [f"definitions[{i}].name" for i in range(len(shown))]


async def test_many_agents_that_link_are_cut_to_what_metadata_can_carry_and_counted() -> None:
    names = [f"agent{number:04}" for number in range(1_000)]
    failed = await _failed_call(errors.AgentLinked("poet", names))
    info, precondition = status_details(failed)
    shown = [violation.subject for violation in precondition.violations]
    metadata = {"name": "poet", "violations": "1000"}
    assert info == ErrorInfo(reason="AGENT_LINKED", domain="bough.dev", metadata=metadata)
    assert 20 < len(shown) < 100
    assert shown == names[: len(shown)]
    said = f"The agent 'poet' is linked by {', '.join(names[:20])} and 980 more: remove the links first."
    assert failed.details() == said
    assert on_the_wire(failed) < 7 * 1024


def on_the_wire(failed: aio.AioRpcError) -> int:
    """Return the size of a status as HTTP/2 counts header lists: names, values (base64 if binary) and 32 each."""
    trailers = {"grpc-message": quote(failed.details() or ""), **dict(failed.trailing_metadata())}
    coded = {key: b64encode(value) if isinstance(value, bytes) else value for key, value in trailers.items()}
    return sum(len(key) + len(value) + 32 for key, value in coded.items())


@pytest.mark.parametrize("character", ["x", "%", "\n", "ü", "森", "🌳"])
@pytest.mark.parametrize(
    "error",
    [
        lambda said: errors.InvalidRequest([errors.FieldViolation(field=said, description=said)] * 300),
        lambda said: errors.InvalidRequest([errors.FieldViolation(field="", description=said * 100)]),
        lambda said: errors.NotFound(said, said),
        lambda said: errors.SessionBusy(said, details={f"{number}{said}": said for number in range(50)}),
        lambda said: errors.ServerStopping(said),
    ],
)
async def test_an_error_of_any_length_arrives_with_its_code_and_fits_into_metadata(
    error: Callable[[str], errors.CallError], character: str
) -> None:
    made = error(character * 5_000)
    failed = await _failed_call(made)
    assert failed.code().value[0] == made.code
    assert on_the_wire(failed) < 7 * 1024
    assert status_details(failed)[0].reason == error_pb2.ErrorReason.Name(made.reason).removeprefix("ERROR_REASON_")
    assert (failed.details() or "").endswith(("…", "more"))


async def test_a_sentence_of_many_violations_says_how_many_more_there_are() -> None:
    violations = [errors.FieldViolation(field=f"labels[{i}]", description="is too long") for i in range(1_000)]
    said = (await _failed_call(errors.InvalidRequest(violations))).details() or ""
    *told, rest = said.split("; ")
    assert told == [f"labels[{i}]: is too long" for i in range(len(told))]
    assert rest == f"and {1_000 - len(told)} more"
    assert 30 < len(told) < 50


async def test_one_violation_too_long_to_tell_is_cut_and_the_others_are_counted() -> None:
    violations = [errors.FieldViolation(field=name, description=name * 2_000) for name in "abc"]
    said = (await _failed_call(errors.InvalidRequest(violations))).details() or ""
    assert said == f"a: {'a' * (said.count('a') - 2)}…; and 2 more"
    assert 900 < len(said) <= 1_000


async def test_a_stream_that_fails_after_messages_keeps_them_and_its_trailing_metadata() -> None:
    async def watch(request: pb.WatchRunRequest, context: Any) -> AsyncGenerator[pb.WatchRunResponse, None]:
        yield pb.WatchRunResponse(batch=follow_pb2.EventBatch(through_sequence=1))
        context.set_trailing_metadata((("bough-last-sequence", "1"),))
        raise errors.ServerStopping("The server stops.")

    async with behaving(add_AgentServiceServicer_to_server, WatchRun=watch) as channel:
        received, error = await outcome(AgentServiceStub(channel).WatchRun(pb.WatchRunRequest(run_id="r")))
    assert received == [pb.WatchRunResponse(batch=follow_pb2.EventBatch(through_sequence=1))]
    assert error is not None
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert dict(error.trailing_metadata())["bough-last-sequence"] == "1"


async def test_an_unknown_method_is_unimplemented() -> None:
    async with behaving(add_AgentServiceServicer_to_server) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary("/bough.v1.AgentService/Fly")(b"")  # type: ignore[arg-type] # no serializer
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
