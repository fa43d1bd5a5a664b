"""Keys, branches and joined deltas: the small rules that the runtime stands on."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import message_pb2, policy_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.recorder import DeltaCoalescing
from bough_server.runtime.child_call import MAX_BRANCH_BYTES, branch_below, run_path_below
from bough_server.runtime.running_agent import choose_coalescing
from bough_server.truncation import truncate_result, truncate_text


@pytest.mark.parametrize(
    ("scope", "key", "covered"),
    [
        ("", "s0.m", True),
        ("s0.t1", "s0.t1", True),
        ("s0.t1", "s0.t1/s0.m", True),
        ("s0.t1", "s0.t1.ok", True),
        ("s0.t1", "s0.t10", False),
        ("s0.t1", "s0.t10/s0.m", False),
        ("e0", "e0.1/e0", True),
    ],
)
def test_a_scope_covers_itself_its_lanes_and_what_lies_below(scope: str, key: str, covered: bool) -> None:
    assert keys.covers(scope, key) is covered


def test_a_digest_keeps_its_parts_apart() -> None:
    assert keys.digest("ab", "c") != keys.digest("a", "bc")


def test_ids_of_a_run_derive_from_its_key_root_alone() -> None:
    root = ids.new_uuid7(1_700_000_000_000_000_000)
    assert ids.invocation_id(root, "") == root
    assert ids.invocation_id(root, "s0.t1") == ids.invocation_id(root, "s0.t1")
    assert ids.invocation_id(root, "s0.t1") != ids.invocation_id(root, "s0.t2")


@given(st.uuids(), st.text(max_size=80))
def test_a_derived_id_is_a_uuid_of_version_five(root: uuid.UUID, name: str) -> None:
    assert ids.derive_id(str(root), name) == str(uuid.uuid5(root, name))


@given(st.lists(st.integers(min_value=0, max_value=2**42), min_size=2, max_size=8, unique=True))
def test_later_run_ids_sort_later(milliseconds: list[int]) -> None:
    made = [ids.new_uuid7(each * 1_000_000) for each in sorted(milliseconds)]
    assert made == sorted(made)


@given(st.lists(st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,58}", fullmatch=True), min_size=1, max_size=40))
def test_a_branch_is_bounded_and_keeps_its_root_and_its_last_name(names: list[str]) -> None:
    branch = ""
    for name in names:
        branch = branch_below(branch, name)
    assert len(branch.encode()) <= MAX_BRANCH_BYTES
    assert branch.split("/")[0] == names[0]
    assert branch.split("/")[-1] == names[-1]
    if len("/".join(names)) <= MAX_BRANCH_BYTES:
        assert branch == "/".join(names)


def test_a_run_path_keeps_the_last_thirty_two_names() -> None:
    path: tuple[str, ...] = ()
    for number in range(40):
        path = run_path_below(path, str(number))
    assert path == tuple(str(number) for number in range(8, 40))


def test_the_first_delta_policy_that_says_anything_wins() -> None:
    nothing = policy_pb2.DeltaPolicy()
    every = policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())
    joined = policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas(max_chars=7))
    assert choose_coalescing([nothing, nothing]) == DeltaCoalescing(max_interval=None, max_chars=256)
    assert choose_coalescing([nothing, joined, every]) == DeltaCoalescing(max_interval=None, max_chars=7)
    assert choose_coalescing([every, joined]).max_chars == 0


@given(st.text(max_size=400), st.integers(min_value=0, max_value=300))
def test_a_cut_text_fits_and_is_whole_where_it_fits(text: str, limit: int) -> None:
    cut = truncate_text(text, limit)
    if len(text.encode()) <= limit:
        assert cut == text
    else:
        assert len(cut.encode()) <= max(limit, len("\n[...]\n"))


def test_a_cut_result_says_so_and_leaves_the_original_alone() -> None:
    whole = message_pb2.ToolResult(parts=[message_pb2.Part(data_json='"' + "x" * 5_000 + '"')])
    before = whole.SerializeToString()
    cut = truncate_result(whole, 1_000)
    assert cut.truncated
    assert cut.original_bytes == len(before)
    assert cut.parts[0].truncated
    assert cut.parts[0].original_bytes == 5_002
    assert cut.ByteSize() < 1_300
    assert whole.SerializeToString() == before
