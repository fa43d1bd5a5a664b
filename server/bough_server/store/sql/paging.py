"""Page tokens of the store's lists: the last key that was given, bound to the filters; opaque to clients."""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select

from bough.v1 import error_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.store.window import PAGE_BYTES

Key = tuple[int, str]
"""What lists are ordered by: a number, such as a time, and an id."""


def read_page(
    connection: Connection, statement: Select[Any], *, count: int, size: Callable[[Row[Any]], int]
) -> tuple[list[Row[Any]], bool]:
    """The first rows of a query that are a page, and whether there are more.

    A page has at most `count` rows and PAGE_BYTES, as far as `size` knows the bytes of a row; one row in any case.
    """
    page: list[Row[Any]] = []
    total = 0
    with connection.execute(statement.limit(count + 1)) as rows:
        for row in rows:
            total += size(row)
            if page and (len(page) == count or total > PAGE_BYTES):
                return page, True
            page.append(row)
    return page, False


def token_of(key: Key, filters: Sequence[object]) -> str:
    """The token of the page after a key."""
    return base64.urlsafe_b64encode(json.dumps([*key, _digest(filters)]).encode()).decode()


def key_of(token: str, filters: Sequence[object]) -> Key | None:
    """The key that a token continues after; None for the first page. Raises InvalidRequest for a foreign token."""
    if not token:
        return None
    try:
        number, name, digest = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError):
        raise _foreign() from None
    if type(number) is not int or number.bit_length() > 63 or not isinstance(name, str) or digest != _digest(filters):
        raise _foreign()
    return number, name


def _digest(filters: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(filters, sort_keys=True).encode()).hexdigest()[:16]


def _foreign() -> InvalidRequest:
    said = "is not a token of this list with these filters: begin without one"
    reason = error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN
    return InvalidRequest([FieldViolation(field="page_token", description=said, reason=reason)], reason=reason)
