"""Unary calls and paged lists, with an event loop and without one: timeouts, and gRPC errors as CallFailed."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, TypeVar

import grpc
from grpc import aio

from bough.channel import Metadata
from bough.errors import from_rpc_error
from bough.rejoining import Contact


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
"""Seconds that a file may take to arrive."""

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

    def options(self, timeout: float | None) -> CallOptions:
        """Return the options of a call that may take `timeout` seconds."""
        return {"timeout": timeout, "wait_for_ready": self.wait_for_ready, "metadata": self.metadata()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(_CallSettings):
    """Unary calls and lists, with an event loop."""

    async def call(self, method: aio.UnaryUnaryMultiCallable[Request, Response], request: Request) -> Response:
        """Make a call and return its response; raises CallFailed."""
        try:
            response = await method(request, **self.options(self.timeout))
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        self.contact.is_made = True
        return response

    async def stream(
        self, method: aio.UnaryStreamMultiCallable[Request, Response], request: Request
    ) -> AsyncIterator[Response]:
        """Yield the responses of a call, which may take FILE_TIMEOUT in all; raises CallFailed."""
        try:
            async for response in method(request, **self.options(FILE_TIMEOUT)):
                self.contact.is_made = True
                yield response
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def pages(
        self,
        method: aio.UnaryUnaryMultiCallable[PagedRequest, PagedResponse],
        request: PagedRequest,
        items: Callable[[PagedResponse], Iterable[Item]],
    ) -> AsyncIterator[Item]:
        """Yield the items of a list and fetch pages as they are needed; raises CallFailed."""
        while True:
            response = await self.call(method, request)
            for item in items(response):
                yield item
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCalls(_CallSettings):
    """`Calls` for programs without an event loop."""

    def call(self, method: "grpc.UnaryUnaryMultiCallable[Request, Response]", request: Request) -> Response:
        """Make a call and return its response; raises CallFailed."""
        try:
            response = method(request, **self.options(self.timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        self.contact.is_made = True
        return response

    def stream(
        self, method: "grpc.UnaryStreamMultiCallable[Request, Response]", request: Request
    ) -> Iterator[Response]:
        """Yield the responses of a call, which may take FILE_TIMEOUT in all; raises CallFailed."""
        try:
            for response in method(request, **self.options(FILE_TIMEOUT)):
                self.contact.is_made = True
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def pages(
        self,
        method: "grpc.UnaryUnaryMultiCallable[PagedRequest, PagedResponse]",
        request: PagedRequest,
        items: Callable[[PagedResponse], Iterable[Item]],
    ) -> Iterator[Item]:
        """Yield the items of a list and fetch pages as they are needed; raises CallFailed."""
        while True:
            response = self.call(method, request)
            yield from items(response)
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token
