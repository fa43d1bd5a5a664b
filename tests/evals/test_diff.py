"""Differences between two records, in words and as laws."""

from collections.abc import Sequence

import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_result_pb2, execution_pb2, invocation_pb2, usage_pb2
from bough_server.evals.trees.diff import diff
from tests.evals.invocations import Agent, Call, agent, invocation
from tests.support.examples import examples

ADDED = eval_result_pb2.CHANGE_KIND_ADDED
REMOVED = eval_result_pb2.CHANGE_KIND_REMOVED
MOVED = eval_result_pb2.CHANGE_KIND_MOVED
CHANGED = eval_result_pb2.CHANGE_KIND_CHANGED

AgentDifference = eval_result_pb2.AgentDifference
InvocationDiff = eval_result_pb2.InvocationDiff


def agents_in_words(found: InvocationDiff) -> list[str]:
    return [difference.message for difference in found.agent_differences]


def calls_in_words(found: InvocationDiff) -> list[str]:
    return [f"{difference.branch}: {difference.message}" for difference in found.call_differences]


def searches(*queries: str) -> list[Call]:
    return [Call(name="search", arguments_json=f'{{"q": "{query}"}}') for query in queries]


def test_equal_records_are_the_same_whatever_their_ids_and_times_are() -> None:
    left = invocation(agent("lead", agent("writer", calls=searches("a"))), answer="Done.", seconds=2, input_tokens=10)
    right = invocation(agent("lead", agent("writer", calls=searches("a"))), answer="Done.", seconds=5, input_tokens=30)
    for one in right.agents:
        one.invocation_id += "'"
        one.parent_invocation_id += "'" if one.parent_invocation_id else ""
    for call in right.tools:
        call.invocation_id += "'"
    right.final_response.message_id = "m"
    assert diff(left, right) == InvocationDiff(
        usage_before=usage_pb2.Usage(input_tokens=10),
        usage_after=usage_pb2.Usage(input_tokens=30),
        duration_before=duration_pb2.Duration(seconds=2),
        duration_after=duration_pb2.Duration(seconds=5),
        same_answer=True,
        same=True,
    )


def test_agents_were_removed_added_or_called_by_another() -> None:
    before = invocation(agent("lead", agent("critic", agent("editor")), agent("researcher"), agent("writer")))
    after = invocation(agent("lead", agent("researcher", agent("writer")), agent("painter")))
    found = diff(before, after)
    assert list(found.agent_differences) == [
        AgentDifference(
            kind=REMOVED,
            agent="critic",
            parent_before="lead",
            invocation_id_before="i2",
            message="critic was removed, it was called by lead",
        ),
        AgentDifference(
            kind=REMOVED,
            agent="editor",
            parent_before="lead/critic",
            invocation_id_before="i3",
            message="editor was removed, it was called by critic",
        ),
        AgentDifference(
            kind=MOVED,
            agent="writer",
            parent_before="lead",
            parent_after="lead/researcher",
            invocation_id_before="i5",
            invocation_id_after="i3",
            message="writer was called by lead, and is now called by researcher",
        ),
        AgentDifference(
            kind=ADDED,
            agent="painter",
            parent_after="lead",
            invocation_id_after="i4",
            message="painter was added, it is called by lead",
        ),
    ]
    assert not found.same


def test_what_a_moved_agent_called_moves_with_it() -> None:
    team = agent("r", agent("w", calls=["t"]))
    found = diff(
        invocation(agent("lead", agent("a", team), agent("b"))), invocation(agent("lead", agent("a"), agent("b", team)))
    )
    assert agents_in_words(found) == ["r was called by a, and is now called by b"]
    assert not found.call_differences


def test_moves_between_callers_of_one_name_and_to_a_root_are_told_apart() -> None:
    paths = diff(
        invocation(agent("lead", agent("a", agent("r", agent("w"))), agent("b", agent("r")))),
        invocation(agent("lead", agent("a", agent("r")), agent("b", agent("r", agent("w"))))),
    )
    assert agents_in_words(paths) == ["w was called by lead/a/r, and is now called by lead/b/r"]
    twins = diff(
        invocation(agent("lead", agent("r", agent("w"), calls=["t"]), agent("r", calls=["u"]))),
        invocation(agent("lead", agent("r", calls=["t"]), agent("r", agent("w"), calls=["u"]))),
    )
    assert agents_in_words(twins) == ["w was called by lead/r, and is now called by another lead/r"]
    roots = diff(invocation(agent("lead", agent("w"))), invocation(agent("lead"), agent("w")))
    assert agents_in_words(roots) == ["w was called by lead, and is now a root"]


def test_of_several_agents_of_one_name_those_that_did_the_same_belong_together() -> None:
    left = invocation(agent("lead", *[agent("r", calls=searches(query)) for query in ("a", "b", "c")]))
    right = invocation(agent("lead", *[agent("r", calls=searches(query)) for query in ("c", "b")]))
    found = diff(left, right)
    (removed,) = found.agent_differences
    assert (removed.kind, removed.invocation_id_before, removed.invocation_id_after) == (REMOVED, "i2", "")
    assert calls_in_words(found) == ["lead/r: search was removed"]


def test_calls_were_removed_added_or_changed() -> None:
    left = invocation(
        agent(
            "lead",
            calls=[
                *searches("a", "b"),
                Call(name="fetch", result_json='{"x": 1, "y": 2}'),
                Call(name="save"),
                Call(name="end", result_json="1"),
            ],
        )
    )
    right = invocation(
        agent(
            "lead",
            calls=[
                *searches("a", "other"),
                Call(name="fetch", arguments_json=" { } ", result_json='{"y":2,"x":1}'),
                Call(name="end", result_json="2"),
                Call(name="tell"),
            ],
        )
    )
    found = diff(left, right)
    assert calls_in_words(found) == [
        "lead: search has other arguments",
        "lead: save was removed",
        "lead: end has another result",
        "lead: tell was added",
    ]
    assert [difference.kind for difference in found.call_differences] == [CHANGED, REMOVED, CHANGED, ADDED]
    changed, removed, _, added = found.call_differences
    assert (changed.before.arguments_json, changed.after.arguments_json) == ('{"q": "b"}', '{"q": "other"}')
    assert not removed.HasField("after")
    assert not added.HasField("before")


def test_calls_are_compared_by_the_arguments_that_they_ran_with() -> None:
    edited, same, other = (invocation(agent("lead", calls=searches(query))) for query in ("a", "b", "a"))
    edited.tools[0].executed_arguments_json = '{"q": "b"}'
    assert diff(edited, same).same
    found = diff(edited, other)
    assert calls_in_words(found) == ["lead: search has other arguments"]
    call = found.call_differences[0].before
    assert (call.arguments_json, call.executed_arguments_json) == ('{"q": "a"}', '{"q": "b"}')


def test_a_call_that_fails_now_has_another_result() -> None:
    left, right = (invocation(agent("lead", calls=["t"])) for _ in range(2))
    right.tools[0].state = execution_pb2.EXECUTION_STATE_FAILED
    right.tools[0].error.message = "It failed."
    right.tools[0].ClearField("result_json")
    found = diff(left, right)
    assert calls_in_words(found) == ["lead: t has another result"]
    assert found.call_differences[0].after.error.message == "It failed."


def test_another_answer_is_a_difference() -> None:
    found = diff(invocation(agent("lead"), answer="Yes."), invocation(agent("lead"), answer="No."))
    assert (found.same_answer, found.same) == (False, False)
    assert not found.agent_differences


def test_what_is_not_known_of_a_record_is_unset() -> None:
    found = diff(invocation_pb2.Invocation(), invocation_pb2.Invocation())
    assert found == InvocationDiff(same_answer=True, same=True)
    odd = invocation(agent("lead"))
    odd.end_time.seconds = 2**62
    assert not diff(odd, odd).HasField("duration_before")


def test_a_diff_is_bounded_and_texts_in_it_are_cut() -> None:
    calls = [Call(name=f"t{number}", arguments_json=f'"{"x" * 10_000}"') for number in range(1000)]
    right = invocation(agent("lead", *[agent(f"a{number}") for number in range(2000)], calls=calls))
    found = diff(invocation(agent("lead")), right)
    assert (len(found.agent_differences), len(found.call_differences), found.same) == (500, 200, False)
    assert len(found.call_differences[0].after.arguments_json) <= 2000
    assert found.ByteSize() < 1_500_000


def test_deep_records_are_compared() -> None:
    deep = agent("x")
    for _ in range(3000):
        deep = agent("x", deep)
    record = invocation(deep)
    assert diff(record, record).same


# -- Laws


CALLS = st.builds(
    lambda name, arguments: Call(name=name, arguments_json=arguments), st.sampled_from("tu"), st.sampled_from("12")
)


def agents(depth: int) -> st.SearchStrategy[Agent]:
    below = st.lists(agents(depth - 1), max_size=2) if depth else st.just([])
    calls = st.lists(CALLS, max_size=2)
    return st.builds(
        lambda name, children, made: agent(name, *children, calls=made), st.sampled_from("ab"), below, calls
    )


RECORDS = st.lists(agents(2), max_size=2).map(lambda roots: invocation(*roots, answer="x" if len(roots) == 1 else ""))


def bag(messages: Sequence[str]) -> list[str]:
    return sorted(messages)


def seen_from_the_right(found: InvocationDiff) -> InvocationDiff:
    """The same diff with the records exchanged, without words and branches."""
    exchanged = {REMOVED: ADDED, ADDED: REMOVED}
    return InvocationDiff(
        agent_differences=[
            AgentDifference(
                kind=exchanged.get(one.kind, one.kind),
                agent=one.agent,
                parent_before=one.parent_after,
                parent_after=one.parent_before,
                invocation_id_before=one.invocation_id_after,
                invocation_id_after=one.invocation_id_before,
            )
            for one in found.agent_differences
        ],
        call_differences=[
            eval_result_pb2.CallDifference(
                tool=one.tool,
                kind=exchanged.get(one.kind, one.kind),
                before=one.after if one.HasField("after") else None,
                after=one.before if one.HasField("before") else None,
            )
            for one in found.call_differences
        ],
        same_answer=found.same_answer,
        same=found.same,
    )


def in_one_order(found: InvocationDiff) -> tuple[list[str], list[str], bool, bool]:
    return (
        bag(list(map(str, found.agent_differences))),
        bag(list(map(str, found.call_differences))),
        found.same_answer,
        found.same,
    )


@given(RECORDS)
def test_a_record_is_the_same_as_itself(record: invocation_pb2.Invocation) -> None:
    found = diff(record, record)
    assert found.same
    assert not found.agent_differences
    assert not found.call_differences


@examples(40)
@given(RECORDS, RECORDS)
def test_the_diff_of_exchanged_records_is_its_mirror(
    left: invocation_pb2.Invocation, right: invocation_pb2.Invocation
) -> None:
    there, back = diff(left, right), diff(right, left)
    twice = seen_from_the_right(seen_from_the_right(back))
    assert in_one_order(seen_from_the_right(there)) == in_one_order(twice)


@examples(40)
@given(RECORDS, RECORDS)
def test_every_agent_and_call_is_accounted_for(
    left: invocation_pb2.Invocation, right: invocation_pb2.Invocation
) -> None:
    found = diff(left, right)
    removed = sum(one.kind == REMOVED for one in found.agent_differences)
    added = sum(one.kind == ADDED for one in found.agent_differences)
    assert len(left.agents) - removed == len(right.agents) - added
    removed = sum(one.kind == REMOVED for one in found.call_differences)
    added = sum(one.kind == ADDED for one in found.call_differences)
    assert len(left.tools) - removed == len(right.tools) - added
    assert found.same == (found.same_answer and not found.agent_differences and not found.call_differences)


@pytest.mark.timeout(60)
def test_many_agents_with_long_lists_of_calls_are_compared_in_seconds() -> None:
    # A frequent call between rare ones is what difflib takes longest for.
    left, right = (
        invocation(*(agent(f"a{n}", calls=[f"{side}{m}" if m % 2 else "all" for m in range(1_000)]) for n in range(40)))
        for side in "lr"
    )
    assert len(diff(left, right).call_differences) == 200


def test_differences_of_calls_are_left_out_that_a_client_would_not_receive() -> None:
    texts = ["x" * 100_000] * 4
    calls = [
        Call(name=f"{number}" + "n" * 5_000, arguments_json=texts[0], result_json=texts[1]) for number in range(200)
    ]
    deep = agent("a" * 5_000, *(agent(f"{number}" + "b" * 5_000, calls=calls) for number in range(2)))
    found = diff(invocation(), invocation(deep))
    assert (found.same, 0 < len(found.call_differences) <= 200) == (False, True)
    assert found.ByteSize() <= 3_900_000
