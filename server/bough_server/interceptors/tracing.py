"""OpenTelemetry's spans of calls, by its own interceptor; spans inside a run are telemetry.py's."""

from grpc import aio
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider

from bough_server.interceptors.handler import is_ours


def call_tracing(provider: TracerProvider) -> aio.ServerInterceptor:
    """An interceptor that continues the caller's trace and makes one span a call; none for health and reflection."""
    interceptor: aio.ServerInterceptor = aio_server_interceptor(  # type: ignore[no-untyped-call] # it has no types
        tracer_provider=provider, filter_=is_ours
    )
    return interceptor
