"""Pages of lists in memory."""

import zlib
from itertools import pairwise

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2, execution_pb2, run_pb2
from bough_server.api.pagination import PAGE_BYTES, page_by_name, page_of, run_filter
from bough_server.errors import InvalidRequest
from bough_server.store.ports.runs import Page, RunFilter

_NAMES = st.lists(st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,58}", fullmatch=True), unique=True, max_size=30)


@given(_NAMES, st.integers(1, 40))
def test_the_pages_of_a_list_are_the_list_by_name(names: list[str], size: int) -> None:
    pages, token = [], ""
    while True:
        page, token = page_by_name(names, Page(size=size, token=token), listing="agents", name=str, size=len)
        pages.append(page)
        if not token:
            break
    assert [name for page in pages for name in page] == sorted(names)
    assert [len(page) for page in pages[:-1]] == [size] * (len(pages) - 1)


@given(_NAMES, st.integers(1, 40), st.integers(1, 2 * PAGE_BYTES))
def test_a_page_ends_before_it_is_too_large_but_for_one_item(names: list[str], size: int, most: int) -> None:
    sizes = {name: zlib.crc32(name.encode()) % most for name in names}
    pages, token = [], ""
    while True:
        request = Page(size=size, token=token)
        page, token = page_by_name(names, request, listing="agents", name=str, size=sizes.__getitem__)
        pages.append(page)
        if not token:
            break
    assert [name for page in pages for name in page] == sorted(names)
    for page, following in pairwise(pages):
        held = sum(map(sizes.__getitem__, page))
        assert len(page) == 1 or held <= PAGE_BYTES
        assert len(page) == size or held + sizes[following[0]] > PAGE_BYTES


@pytest.mark.parametrize("token", ["?", "YQ==", "dG9vbHM6YQ==", "_w=="])
def test_a_token_of_another_listing_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        page_by_name(["a", "b"], Page(size=1, token=token), listing="agents", name=str, size=len)
    assert caught.value.reason == error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN


def test_a_page_is_50_where_nothing_is_said_and_1000_at_most() -> None:
    assert [page_of(size, "t") for size in (0, 7, 5_000)] == [Page(size=n, token="t") for n in (50, 7, 1_000)]


def test_a_filter_tells_absent_times_from_the_epoch() -> None:
    asked = run_pb2.RunFilter(
        session_id="s",
        agent="a",
        states=[execution_pb2.EXECUTION_STATE_PENDING],
        labels={"k": "v"},
        create_time_from=Timestamp(nanos=5),
        evaluation_id="e",
    )
    assert run_filter(asked) == RunFilter(
        session_id="s",
        agent="a",
        states=(execution_pb2.EXECUTION_STATE_PENDING,),
        labels={"k": "v"},
        create_time_from_ns=5,
        create_time_before_ns=None,
        evaluation_id="e",
    )
