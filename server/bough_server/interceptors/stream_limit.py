"""Bound the streams that a server has at once: each keeps buffers until its caller has read them."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from grpc import aio

from bough_server.errors import StreamsExhausted
from bough_server.identity import Principal
from bough_server.interceptors.auth import current_caller
from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    is_ours,
    rebuild_handler,
    streaming_behavior,
)


class StreamLimit(aio.ServerInterceptor):
    """Refuses response streams beyond those that the server, or one caller, may have; inside authentication."""

    def __init__(self, *, max_streams: int, max_streams_of_caller: int) -> None:
        self._max, self._max_of_caller = max_streams, max_streams_of_caller
        self._open: Counter[Principal] = Counter()
        self._total = 0

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming or not is_ours(handler_call_details):
            return handler
        inner = streaming_behavior(handler)

        async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            caller = current_caller().principal
            self._check(caller)
            self._open[caller] += 1
            self._total += 1
            # Not at the end of the generator: the status waits behind a message that its client does not read, and
            # gRPC keeps both until then.
            context.add_done_callback(lambda _: self._release(caller))  # type: ignore[arg-type] # no Protocol there
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message

        return rebuild_handler(handler, stream)

    def _release(self, caller: Principal) -> None:
        self._total -= 1
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]

    def _check(self, caller: Principal) -> None:
        if self._open[caller] >= self._max_of_caller:
            raise StreamsExhausted(
                f"The caller has {self._max_of_caller:,} streams, as many as it may (server.max_streams_of_caller). "
                "End one of them, or try again."
            )
        if self._total >= self._max:
            raise StreamsExhausted(
                f"The server has {self._max:,} streams, as many as it may (server.max_streams). "
                "Try again, or at another server."
            )
