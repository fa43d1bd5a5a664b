"""The order of the interceptors, outermost first; what each does is its own."""

from collections.abc import Sequence

from grpc import aio
from opentelemetry.sdk.trace import TracerProvider

from bough_server.interceptors.auth import Authentication
from bough_server.interceptors.context import CallContext
from bough_server.interceptors.errors import Errors
from bough_server.interceptors.streams import StreamOwner, StreamWriter
from bough_server.interceptors.tracing import call_tracing
from bough_server.interceptors.validation import Validation


def interceptors(provider: TracerProvider) -> Sequence[aio.ServerInterceptor]:
    """The chain of the server. Errors stands inside tracing, or spans would say that failed calls went well."""
    return (
        StreamWriter(),
        call_tracing(provider),
        StreamOwner(),
        CallContext(),
        Errors(),
        Authentication(),
        Validation(),
    )
