"""How a call is made: its timeout, its errors, its pages; it knows no service."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from grpc import aio

from bough.errors import from_rpc_error


class _PagedRequest(Protocol):
    page_token: str


class _PagedResponse(Protocol):
    next_page_token: str


Request = TypeVar("Request")
Response = TypeVar("Response")
Item = TypeVar("Item")
PagedRequest = TypeVar("PagedRequest", bound=_PagedRequest)
PagedResponse = TypeVar("PagedResponse", bound=_PagedResponse)

PAGE_SIZE = 50
"""How many items a list asks for at a time unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What every call of a client has in common: seconds that it may take, and whether it waits for a server."""

    timeout: float | None
    wait_for_ready: bool | None

    async def one(self, method: aio.UnaryUnaryMultiCallable[Request, Response], request: Request) -> Response:
        """Makes a call and gives its answer; raises CallFailed."""
        try:
            return await method(request, timeout=self.timeout, wait_for_ready=self.wait_for_ready)
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def pages(
        self,
        method: aio.UnaryUnaryMultiCallable[PagedRequest, PagedResponse],
        request: PagedRequest,
        items: Callable[[PagedResponse], Iterable[Item]],
    ) -> AsyncIterator[Item]:
        """The items of a list, page by page as they are asked for; raises CallFailed."""
        while True:
            response = await self.one(method, request)
            for item in items(response):
                yield item
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token
