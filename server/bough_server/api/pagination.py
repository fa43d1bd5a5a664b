"""What list requests ask for, pages of lists that are in memory, and how large a page may be.

In which order a store keeps its lists, and what its tokens are, is its own business.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from google.protobuf.message import Message

from bough.v1 import error_pb2, run_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.store.ports import Page, RunFilter

DEFAULT_SIZE: Final = 50
MAX_SIZE: Final = 1_000

PAGE_BYTES: Final = 1024 * 1024
"""A page ends before it is larger, unless one item is: clients receive 4 MiB where they were told nothing else."""

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def page_of(page_size: int, page_token: str) -> Page:
    """What a request asks for, bounded: 50 where it names no size, 1,000 at most (AIP-158)."""
    return Page(size=min(page_size or DEFAULT_SIZE, MAX_SIZE), token=page_token)


def run_filter(asked: run_pb2.RunFilter) -> RunFilter:
    """Which runs a request asks for."""
    begin, end = asked.create_time_from, asked.create_time_before
    return RunFilter(
        session_id=asked.session_id,
        agent=asked.agent,
        states=tuple(asked.states),
        labels=dict(asked.labels),
        create_time_from_ns=begin.ToNanoseconds() if asked.HasField("create_time_from") else None,
        create_time_before_ns=end.ToNanoseconds() if asked.HasField("create_time_before") else None,
    )


def page_by_name(
    items: Iterable[T], page: Page, *, listing: str, name: Callable[[T], str], size: Callable[[T], int]
) -> tuple[list[T], str]:
    """A page of items, by name, and the next page's token; `size` gives the bytes of one.

    Raises InvalidRequest for another listing's token.
    """
    after = _name_in(page.token, listing) if page.token else ""
    rest = sorted((item for item in items if name(item) > after), key=name)
    shown = _within(PAGE_BYTES, rest[: page.size], size)
    return shown, _token(listing, name(shown[-1])) if len(rest) > len(shown) else ""


async def read_within(
    read: Callable[[Page], Awaitable[tuple[Sequence[M], str]]], page: Page
) -> tuple[Sequence[M], str]:
    """A page as a store makes it, and the next page's token; where it is too large, the page of those that fit."""
    items, token = await read(page)
    fitting = _within(PAGE_BYTES, items, lambda item: item.ByteSize())
    return (items, token) if len(fitting) == len(items) else await read(replace(page, size=len(fitting)))


def _within(most: int, items: Sequence[T], size: Callable[[T], int]) -> list[T]:
    """The first items that have so many bytes together; one at least, if there is one."""
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
        said, reason = "is not a token of this listing; begin without one", error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN
        raise InvalidRequest([FieldViolation(field="page_token", description=said, reason=reason)], reason=reason)
    return name
