"""Authentication: the caller of each call, proved before its request is parsed, and the roles that the call needs."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health
from structlog import contextvars

from bough_server.auth.access import ROLES, check_roles
from bough_server.auth.authentication import Authenticator
from bough_server.auth.certificates import Peer
from bough_server.auth.proof import Proof, build_expired_error
from bough_server.clock import Clock, loop_time
from bough_server.errors import CallError, Unauthenticated
from bough_server.identity import LOCAL, Caller
from bough_server.interceptors.errors import RefusalLog, abort
from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    is_ours,
    rebuild_handler,
    streaming_behavior,
    unary_behavior,
)

MAX_WATCHES: Final = 1_000
"""The most streams of health on a port whose other services need a caller."""

_HEALTH: Final = f"/{health.SERVICE_NAME}/"

_caller: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Return the caller of the call that this task serves."""
    return _caller.get()


def _is_unserved(details: grpc.HandlerCallDetails) -> bool:
    """Return whether a method of the schema does not say who may call it."""
    return is_ours(details) and details.method not in ROLES


class LocalCaller(aio.ServerInterceptor):
    """Makes every call that of one caller, for a server that asks no one for a proof."""

    def __init__(self, caller: Caller = LOCAL) -> None:
        self._caller = caller

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        if _is_unserved(handler_call_details):
            return None
        # grpc.aio runs interceptors and handler of a call in one task, so the handler sees this value.
        _caller.set(self._caller)
        return await continuation(handler_call_details)


class Authentication(aio.ServerInterceptor):
    """Ends calls that nothing proves, or whose caller lacks a role. Health answers anyone."""

    def __init__(self, authenticator: Authenticator, clock: Clock) -> None:
        self._authenticator = authenticator
        self._refusals = RefusalLog(clock)
        self._watches = 0

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        if _is_unserved(handler_call_details):
            return None
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        if method.startswith(_HEALTH):
            return self._bound_watches(handler) if handler.response_streaming else handler
        if not is_ours(handler_call_details):
            return self._guard_foreign(handler, method)
        # The behavior of a method of the schema reads its request itself, so nothing has been parsed before.
        if handler.response_streaming:
            return rebuild_handler(handler, self._guard_stream(handler, method))
        return rebuild_handler(handler, self._guard_unary(handler, method))

    def _bound_watches(self, handler: Handler) -> Handler:
        """Bound the streams of health, which no limit of a caller counts."""
        inner: Any = streaming_behavior(handler)  # a coroutine function, which writes its responses itself

        async def watch(request: Any, context: Context) -> None:
            if self._watches >= MAX_WATCHES:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many streams of health: use Check.")
            self._watches += 1
            try:
                await inner(request, context)
            finally:
                self._watches -= 1

        return rebuild_handler(handler, watch)

    def _guard_unary(self, handler: Handler, method: str) -> Any:
        inner = unary_behavior(handler)

        async def answer(request: Any, context: Context) -> Any:
            await self._admit(context, method)
            return await inner(request, context)

        return answer

    def _guard_stream(self, handler: Handler, method: str) -> Any:
        inner = streaming_behavior(handler)

        async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            proof = await self._admit(context, method)
            _open_stream.get().end_with(proof)
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message

        return stream

    def _guard_foreign(self, handler: Handler, method: str) -> Handler:
        """Guard reflection, whose errors no other interceptor translates or logs; any caller may read the schema."""
        inner = streaming_behavior(handler)

        async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            try:
                await self._authenticator.prove(*_read_call(context))
            except CallError as error:
                self._refusals.log(error, method)
                await abort(error, context)
            async for message in inner(request, context):
                yield message

        return rebuild_handler(handler, stream)

    async def _admit(self, context: Context, method: str) -> Proof:
        proof = await self._authenticator.prove(*_read_call(context))
        caller = proof.caller
        principal = caller.principal
        contextvars.bind_contextvars(tenant=principal.tenant_id, user=principal.user_id, via=caller.via)
        check_roles(caller, method)
        _caller.set(caller)
        return proof


def _read_call(context: Context) -> tuple[list[tuple[str, str | bytes]], Peer]:
    """Return the metadata of a call and what is known of its client."""
    connection: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    metadata = [(key, value) for key, value in context.invocation_metadata() or ()]
    peer = Peer(has_certificate="x509_pem_cert" in connection, uris=tuple(connection.get("peer_uri", ())))
    return metadata, peer


class _OpenStream:
    """A response stream, which ends when the proof of its caller expires or ceases to hold."""

    def __init__(self, timeout: asyncio.Timeout, clock: Clock) -> None:
        self._timeout, self._clock = timeout, clock
        self._proof: Proof | None = None
        self.error: Unauthenticated = build_expired_error()
        """The error that the stream ends with."""

    def end_with(self, proof: Proof) -> None:
        """End the stream when a proof expires."""
        self._proof = proof
        if (expire_time_ns := proof.caller.expire_time_ns) is not None:
            seconds = (expire_time_ns - self._clock.now_ns()) / 1e9
            self._timeout.reschedule(loop_time() + max(0.0, seconds))

    def check(self) -> None:
        """End the stream if its proof does not hold any more."""
        if self._proof is not None and not self._proof.holds() and not self._timeout.expired():
            self.error = Unauthenticated("The API key of the stream is not valid any more.", why="its key has changed")
            self._timeout.reschedule(loop_time())


_open_stream: ContextVar[_OpenStream] = ContextVar("open_stream")


class StreamExpiry(aio.ServerInterceptor):
    """Ends streams whose proof has expired, or has been revoked, with UNAUTHENTICATED; outside of all that writes.

    What a stream follows goes on, as after any other loss of its connection.
    """

    def __init__(self, authenticator: Authenticator, clock: Clock) -> None:
        self._clock = clock
        self._open: set[_OpenStream] = set()
        authenticator.on_revocation = self._check_all

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming or not is_ours(handler_call_details):
            return handler
        # StreamWriter, inside, has made a coroutine of the generator.
        inner: Any = streaming_behavior(handler)

        async def write_all(request: Any, context: Context) -> None:
            timeout = asyncio.timeout(None)
            stream = _OpenStream(timeout, self._clock)
            _open_stream.set(stream)
            self._open.add(stream)
            try:
                async with timeout:
                    await inner(request, context)
            except TimeoutError:
                if not timeout.expired():
                    raise
                try:
                    await abort(stream.error, context)
                except aio.InternalError as error:
                    # The status waited behind a message that its client has not read before it disconnected.
                    raise asyncio.CancelledError from error
            finally:
                self._open.discard(stream)

        return rebuild_handler(handler, write_all)

    def _check_all(self) -> None:
        for stream in self._open:
            stream.check()
