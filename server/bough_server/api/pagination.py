"""Pagination: sizes and tokens of list requests, and pages of lists that are in memory.

Order and tokens of stored lists are the store's.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from google.protobuf.message import Message

from bough.v1 import error_pb2, run_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.store.ports.runs import Page, RunFilter

DEFAULT_SIZE: Final = 50
MAX_SIZE: Final = 1_000

PAGE_BYTES: Final = 1024 * 1024
"""The most bytes of a page, unless its only item is larger: clients accept messages of 4 MiB by default."""

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def page_of(page_size: int, page_token: str) -> Page:
    """Return the page that a request asks for: 50 items if it sets no size, 1,000 at most (AIP-158)."""
    return Page(size=min(page_size or DEFAULT_SIZE, MAX_SIZE), token=page_token)


def run_filter(asked: run_pb2.RunFilter) -> RunFilter:
    """Return the store's filter for a request's filter."""
    begin, end = asked.create_time_from, asked.create_time_before
    return RunFilter(
        session_id=asked.session_id,
        agent=asked.agent,
        states=tuple(asked.states),
        labels=dict(asked.labels),
        create_time_from_ns=begin.ToNanoseconds() if asked.HasField("create_time_from") else None,
        create_time_before_ns=end.ToNanoseconds() if asked.HasField("create_time_before") else None,
        evaluation_id=asked.evaluation_id,
        case_id=asked.case_id,
        evaluation_role=asked.evaluation_role,
        include_evaluation_runs=asked.include_evaluation_runs,
    )


def page_by_name(
    items: Iterable[T], page: Page, *, listing: str, name: Callable[[T], str], size: Callable[[T], int]
) -> tuple[list[T], str]:
    """Return a page of items sorted by name, and the token of the next page; `size` returns an item's bytes.

    Raises InvalidRequest for a token of another listing.
    """
    after = _name_in(page.token, listing) if page.token else ""
    rest = sorted((item for item in items if name(item) > after), key=name)
    shown = _within(PAGE_BYTES, rest[: page.size], size)
    return shown, _token(listing, name(shown[-1])) if len(rest) > len(shown) else ""


def position_of(page: Page, *, listing: str) -> int:
    """Return the number of a page's first item in a list that is not sorted by name.

    Raises InvalidRequest for a token of another listing.
    """
    if not page.token:
        return 0
    name = _name_in(page.token, listing)
    return int(name) if name.isdecimal() and len(name) < 10 else 0


def token_of(position: int, *, listing: str) -> str:
    """Return the token of the page that begins with this number; see position_of."""
    return _token(listing, str(position))


async def read_within(
    read: Callable[[Page], Awaitable[tuple[Sequence[M], str]]], page: Page
) -> tuple[Sequence[M], str]:
    """Return a store's page and the next one's token. A page over PAGE_BYTES is read again with the items that fit."""
    items, token = await read(page)
    fitting = _within(PAGE_BYTES, items, lambda item: item.ByteSize())
    return (items, token) if len(fitting) == len(items) else await read(replace(page, size=len(fitting)))


def _within(most: int, items: Sequence[T], size: Callable[[T], int]) -> list[T]:
    """Return the first items that have at most `most` bytes together, but at least one if there are any."""
    shown: list[T] = []
    held = 0
    for item in items:
        held += size(item)
        if shown and held > most:
            break
        shown.append(item)
    return shown


def _token(listing: str, name: str) -> str:
    return base64.urlsafe_b64encode(f"{listing}:{name}".encode()).decode()


def _name_in(token: str, listing: str) -> str:
    try:
        kind, separator, name = base64.b64decode(token, altchars=b"-_", validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        kind, separator, name = "", "", ""
    if kind != listing or not separator:
        description, reason = (
            "is not a token of this listing; list again without a token",
            error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN,
        )
        raise InvalidRequest(
            [FieldViolation(field="page_token", description=description, reason=reason)], reason=reason
        )
    return name
