"""What stays of a history that is too long: laws over random histories, and what a summary then stands for."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import message_pb2
from bough_server.history.overflow import (
    Compaction,
    Plan,
    Unit,
    last_input,
    plan_summary,
    replace_with_summary,
    units,
    window,
)
from bough_server.history.visible import VisibleMessage
from bough_server.models.tokens import message_tokens

ME = "me"


def user(text: str, position: int = 0, *, starts_exchange: bool = True) -> VisibleMessage:
    message = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=text)])
    return VisibleMessage(message=message, position=position, starts_exchange=starts_exchange)


def said(text: str, *calls: str, position: int = 0) -> VisibleMessage:
    message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, author=ME, parts=[message_pb2.Part(text=text)])
    message.parts.extend(message_pb2.Part(tool_call=message_pb2.ToolCall(call_id=call)) for call in calls)
    return VisibleMessage(message=message, position=position, asks=frozenset((ME, call) for call in calls))


def gave(call: str, position: int = 0) -> VisibleMessage:
    result = message_pb2.ToolResult(call=message_pb2.ToolCall(call_id=call), parts=[message_pb2.Part(text="It is so.")])
    message = message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=result)])
    return VisibleMessage(message=message, position=position, answers=(ME, call))


@st.composite
def exchanges(draw: st.DrawFn, name: str) -> list[VisibleMessage]:
    """What a user says, and steps with calls, with other agents' words among them."""
    shown = [user("u" * draw(st.integers(1, 90)))]
    for step in range(draw(st.integers(0, 3))):
        calls = [f"{name}.{step}.{number}" for number in range(draw(st.integers(0, 2)))]
        shown.append(said("s" * draw(st.integers(1, 90)), *calls))
        for call in calls:
            if draw(st.booleans()):
                shown.append(user("For context", starts_exchange=False))
            shown.append(gave(call))
    return shown


@st.composite
def histories(draw: st.DrawFn) -> list[VisibleMessage]:
    """Exchanges of a session, then one of a run."""
    session = [one for turn in range(draw(st.integers(0, 5))) for one in draw(exchanges(f"t{turn}"))]
    placed = [
        VisibleMessage(
            message=one.message, position=place, starts_exchange=one.starts_exchange, asks=one.asks, answers=one.answers
        )
        for place, one in enumerate(session, 1)
    ]
    return [*placed, *draw(exchanges("run"))]


def sizes(parts: Sequence[Unit]) -> list[int]:
    return [sum(message_tokens(one.message) for one in unit) for unit in parts]


def check_calls(shown: Sequence[VisibleMessage]) -> None:
    """Asserts that every call has its result and every result its call."""
    asked = {call for one in shown for call in one.asks}
    answered = [one.answers for one in shown if one.answers is not None]
    assert sorted(asked) == sorted(answered)


def told(shown: Sequence[VisibleMessage]) -> message_pb2.Message:
    return [one.message for one in shown if one.starts_exchange][-1]


@given(histories())
def test_units_are_the_history_and_no_call_is_cut_from_its_result(shown: list[VisibleMessage]) -> None:
    parts = units(shown)
    assert [one for unit in parts for one in unit] == shown
    for unit in parts:
        check_calls(unit)


@given(histories(), st.integers(-10, 300))
def test_a_window_fits_or_is_what_was_told_and_the_last_unit(shown: list[VisibleMessage], room: int) -> None:
    parts = units(shown)
    weights = sizes(parts)
    kept = window(parts, weights, room)
    left = [one for index in kept for one in parts[index]]
    check_calls(left)
    assert told(left) is told(shown)
    assert left[-1] is shown[-1]
    dropped = [index for index in range(len(parts)) if index not in kept]
    if sum(weights[index] for index in kept) > room:
        assert set(kept) == {last_input(parts), len(parts) - 1}
    elif dropped:
        assert sum(weights[index] for index in kept) + weights[dropped[-1]] > room, "no more is left out than has to be"


def compacted(plan: Plan, text: str = "It was so.") -> Compaction:
    summary = message_pb2.Message(kind=message_pb2.MESSAGE_KIND_SUMMARY, author=ME, parts=[message_pb2.Part(text=text)])
    summary.summary_range.from_position, summary.summary_range.to_position = plan.from_position, plan.to_position
    return Compaction(summary=summary, run_message_count=plan.run_message_count)


def view(shown: Sequence[VisibleMessage], before: Compaction | None) -> list[VisibleMessage]:
    """The history as it is shown after a compaction."""
    if before is None:
        return list(shown)
    through = before.summary.summary_range.to_position
    return replace_with_summary([one for one in shown if not one.position or one.position > through], before)


@given(histories(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3)), min_size=1, max_size=3), st.data())
def test_summaries_and_what_is_left_are_the_whole_history(
    shown: list[VisibleMessage], bounds: list[tuple[int, int]], data: st.DataObject
) -> None:
    before: Compaction | None = None
    seen: list[message_pb2.Message] = []
    for number, (room, keep_recent_exchanges) in enumerate(bounds):
        shown = [*shown, said("more", f"more.{number}"), gave(f"more.{number}")]
        parts = units(view(shown, before))
        plan = plan_summary(parts, sizes(parts), room, keep_recent_exchanges=keep_recent_exchanges, before=before)
        if plan is None:
            continue
        seen += [message for message in plan.messages if message.kind != message_pb2.MESSAGE_KIND_SUMMARY]
        before = compacted(plan)
        left = view(shown, before)
        check_calls(left)
        assert told(left) is told(shown)
        assert left[-1] is shown[-1]
        shown_still = [id(one.message) for one in left[1:]]
        summarized = [id(message) for message in seen]
        assert sorted({*summarized, *shown_still}) == sorted(id(one.message) for one in shown)
        assert len(summarized) == len({*summarized}), "nothing is summarized twice"
        assert not {*summarized} & {*shown_still}, "what is summarized is not shown"


@given(histories(), st.integers(1, 4))
def test_the_last_exchanges_are_kept_word_for_word_where_they_fit(
    shown: list[VisibleMessage], keep_recent_exchanges: int
) -> None:
    parts = units(shown)
    plan = plan_summary(parts, sizes(parts), 10**6, keep_recent_exchanges=keep_recent_exchanges, before=None)
    older = [one for unit in parts[:-keep_recent_exchanges] for one in unit if one.message is not told(shown)]
    assert (plan is None) is (not older)
    if plan is not None:
        left = view(shown, compacted(plan))
        recent = [one.message for unit in parts[-keep_recent_exchanges:] for one in unit]
        assert [one.message for one in left][-len(recent) :] == recent


def test_messages_that_were_said_in_another_order_than_they_are_shown_stay_together() -> None:
    shown = [user("a", 1), said("b", "x", position=2), gave("x", 5), user("c", 4), said("d", position=6), user("e", 7)]
    assert [[one.message.parts[0].text for one in unit if not one.answers] for unit in units(shown)] == [
        ["a", "b", "c", "d"],
        ["e"],
    ]


def test_what_a_window_leaves_of_a_run_does_not_begin_with_the_reader_s_own_words() -> None:
    shown = [
        user("one"),
        said("first", "x"),
        gave("x"),
        user("For context", starts_exchange=False),
        user("two"),
        said("last"),
    ]
    parts = units(shown)
    weights = sizes(parts)
    left = [one for index in window(parts, weights, sum(weights) - 1) for one in parts[index]]
    assert left == shown[3:]
