"""google.rpc.Status of an error, with the details that tell a program what to do; it aborts nothing."""

from typing import Final

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from bough.v1 import error_pb2
from bough_server.errors import CallError, InvalidRequest, NotFound

DETAILS_KEY: Final = "grpc-status-details-bin"
"""The trailing metadata that carries a serialized Status (what grpc-status reads)."""

DOMAIN: Final = "bough"

_MESSAGE_CHARS: Final = 1_000
_VIOLATIONS_BYTES: Final = 3_000
"""Metadata of more than 8 KiB is refused by peers, and binary metadata grows by a third."""


def status_of(error: CallError) -> status_pb2.Status:
    """The status: ErrorInfo always, and of BadRequest, ResourceInfo and RetryInfo what the error knows."""
    info = error_details_pb2.ErrorInfo(
        reason=error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_"),
        domain=DOMAIN,
        metadata=error.details,
    )
    details: list[Message] = [info]
    if isinstance(error, InvalidRequest):
        details.append(_bad_request(error, info))
    if isinstance(error, NotFound):
        details.append(error_details_pb2.ResourceInfo(resource_type=error.kind, resource_name=error.name))
    if error.retry_delay is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_delay * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(
        code=error.code, message=_cut(error.message, _MESSAGE_CHARS), details=[_packed(detail) for detail in details]
    )


def _bad_request(error: InvalidRequest, info: error_details_pb2.ErrorInfo) -> error_details_pb2.BadRequest:
    """Every field that fits; where some do not, ErrorInfo says how many there are."""
    request = error_details_pb2.BadRequest()
    for violation in error.violations:
        request.field_violations.add(
            field=_cut(violation.field, 200), description=_cut(violation.description, 500), reason=violation.rule
        )
        if request.ByteSize() > _VIOLATIONS_BYTES:
            del request.field_violations[-1]
            info.metadata["violations"] = str(len(error.violations))
            break
    return request


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _packed(detail: Message) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed
