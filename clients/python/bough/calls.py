"""Unary calls and paged lists, with an event loop and without one: timeouts, and gRPC errors as CallFailed."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeAlias, TypedDict, TypeVar

import grpc
from grpc import aio

from bough.arguments import wrong_type
from bough.channel import Metadata
from bough.errors import build_deadline_error, from_rpc_error
from bough.rejoining import Contact


class ClientDefault(Enum):
    """Type of `USE_CLIENT_DEFAULT`."""

    TIMEOUT = "timeout"

    def __repr__(self) -> str:
        return "USE_CLIENT_DEFAULT"


USE_CLIENT_DEFAULT: Final = ClientDefault.TIMEOUT
"""Default of a timeout: the client's."""

Timeout: TypeAlias = float | ClientDefault | None
"""Seconds that a call may take, None for no limit."""


class _PagedRequest(Protocol):
    page_token: str


class _PagedResponse(Protocol):
    next_page_token: str


Request = TypeVar("Request")
Response = TypeVar("Response")
Item = TypeVar("Item")
PagedRequest = TypeVar("PagedRequest", bound=_PagedRequest)
PagedResponse = TypeVar("PagedResponse", bound=_PagedResponse)

FILE_TIMEOUT = 600.0
"""Default: seconds that a file may take to arrive."""

PAGE_SIZE = 50
"""Default: items that a list fetches at a time."""


class CallOptions(TypedDict):
    """Options of one call, as stubs take them."""

    timeout: float | None
    wait_for_ready: bool | None
    metadata: Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallSettings:
    """Settings of every call: whether to wait for a server that is not reachable yet, and what makes its metadata.

    `timeout` is that of unary calls, in seconds. `contact` says whether any call of the client has reached its server.
    """

    timeout: float | None
    wait_for_ready: bool | None
    metadata: Callable[[], Metadata] = tuple
    contact: Contact = field(default_factory=Contact)

    def options(self, timeout: Timeout) -> CallOptions:
        """Return the options of a call that may take `timeout` seconds. Raises DeadlineExceeded if none is left."""
        seconds = seconds_of(timeout, self.timeout)
        # grpc.aio rounds deadlines up: a call without any time left could still succeed.
        if seconds is not None and seconds <= 0:
            raise build_deadline_error("The time for the call was over before it was made.")
        return {"timeout": seconds, "wait_for_ready": self.wait_for_ready, "metadata": self.metadata()}


def seconds_of(timeout: Timeout, default: float | None) -> float | None:
    """Return a timeout in seconds, None for no limit; `default` is the client's."""
    if isinstance(timeout, ClientDefault):
        return default
    if timeout is not None and not isinstance(timeout, int | float):
        raise wrong_type("timeout", "a number of seconds or None", timeout)
    return timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(_CallSettings):
    """Unary calls and lists, with an event loop."""

    async def call(
        self,
        method: aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Response:
        """Make a call and return its response; raises CallFailed."""
        try:
            response = await method(request, **self.options(timeout))
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        self.contact.is_made = True
        return response

    async def send(
        self,
        method: aio.StreamUnaryMultiCallable[Request, Response],
        messages: AsyncGenerator[Request, None],
        timeout: float | None,
    ) -> Response:
        """Make a call that sends these messages and return its response; raises CallFailed."""
        call = method(messages, **self.options(timeout))
        try:
            return await call
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            await messages.aclose()

    async def stream(
        self, method: aio.UnaryStreamMultiCallable[Request, Response], request: Request, timeout: float | None
    ) -> AsyncIterator[Response]:
        """Yield the responses of a call, which may take `timeout` seconds in all; raises CallFailed."""
        try:
            async for response in method(request, **self.options(timeout)):
                self.contact.is_made = True
                yield response
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def pages(
        self,
        method: aio.UnaryUnaryMultiCallable[PagedRequest, PagedResponse],
        request: PagedRequest,
        items: Callable[[PagedResponse], Iterable[Item]],
        *,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> AsyncIterator[Item]:
        """Yield the items of a list and fetch pages as they are needed; raises CallFailed.

        `timeout` is that of each page.
        """
        while True:
            response = await self.call(method, request, timeout)
            for item in items(response):
                yield item
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCalls(_CallSettings):
    """`Calls` for programs without an event loop."""

    def call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Response:
        """Make a call and return its response; raises CallFailed."""
        try:
            response = method(request, **self.options(timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        self.contact.is_made = True
        return response

    def send(
        self,
        method: "grpc.StreamUnaryMultiCallable[Request, Response]",
        messages: Iterator[Request],
        timeout: float | None,
    ) -> Response:
        """Make a call that sends these messages and return its response; raises CallFailed."""
        try:
            return method(messages, **self.options(timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def stream(
        self, method: "grpc.UnaryStreamMultiCallable[Request, Response]", request: Request, timeout: float | None
    ) -> Iterator[Response]:
        """Yield the responses of a call, which may take `timeout` seconds in all; raises CallFailed."""
        try:
            for response in method(request, **self.options(timeout)):
                self.contact.is_made = True
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def pages(
        self,
        method: "grpc.UnaryUnaryMultiCallable[PagedRequest, PagedResponse]",
        request: PagedRequest,
        items: Callable[[PagedResponse], Iterable[Item]],
        *,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Iterator[Item]:
        """Yield the items of a list and fetch pages as they are needed; raises CallFailed.

        `timeout` is that of each page.
        """
        while True:
            response = self.call(method, request, timeout)
            yield from items(response)
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token
