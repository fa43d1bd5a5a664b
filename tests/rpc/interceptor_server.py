"""Small servers on loopback behind the real interceptors, for tests that need no runs."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from opentelemetry.sdk.trace import TracerProvider

from bough_server.interceptors.chain import interceptors

Received = TypeVar("Received")
Method = Callable[[Any, Any], Awaitable[Any]] | Callable[[Any, Any], AsyncGenerator[Any, None]]


class Behaviors:
    """Methods of a service as a test defines them; the rest stays unimplemented."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = methods

    def __getattr__(self, name: str) -> Method:
        return self._methods.get(name, _unimplemented)


async def _unimplemented(request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this test")


@asynccontextmanager
async def behaving(
    add: Callable[[Any, Any], None], *, provider: TracerProvider | None = None, **methods: Method
) -> AsyncIterator[aio.Channel]:
    """Serve a service with these methods behind the interceptors; yield a channel to it. Spans need a provider."""
    server = aio.server(interceptors=interceptors(provider))
    add(Behaviors(methods), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(grace=None)


async def outcome(call: AsyncIterable[Received]) -> tuple[list[Received], aio.AioRpcError | None]:
    """Return the responses of a stream, and its error if it failed."""
    received: list[Received] = []
    try:
        async for response in call:
            received.append(response)  # noqa: PERF401 # what came before a failure counts
    except aio.AioRpcError as error:
        return received, error
    return received, None


def status_details(error: aio.AioRpcError) -> tuple[Any, ...]:
    """Return the google.rpc details of a failed call, unpacked."""
    kinds = {
        "ErrorInfo": error_details_pb2.ErrorInfo,
        "PreconditionFailure": error_details_pb2.PreconditionFailure,
        "BadRequest": error_details_pb2.BadRequest,
        "ResourceInfo": error_details_pb2.ResourceInfo,
        "RetryInfo": error_details_pb2.RetryInfo,
        "QuotaFailure": error_details_pb2.QuotaFailure,
    }
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    details = []
    for packed in status.details:
        detail = kinds[packed.type_url.rpartition(".")[2]]()
        assert packed.Unpack(detail)
        details.append(detail)
    return tuple(details)
