"""Views that are extended as messages come: at every point what a view made at once shows."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import message_pb2
from bough_server.history.session import SessionView, TranscriptView
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.history.visible import reader_of
from tests.support.visible import view
from tests.unit.test_history import result, said, user

SCOPES = (
    message_pb2.HISTORY_SCOPE_SESSION,
    message_pb2.HISTORY_SCOPE_CALLS,
    message_pb2.HISTORY_SCOPE_BRANCH,
    message_pb2.HISTORY_SCOPE_NONE,
)
ACTIONS = st.one_of(
    st.tuples(st.just("say"), st.just(0)),
    st.tuples(st.just("ask"), st.integers(1, 2)),
    st.tuples(st.just("answer"), st.integers(0, 7)),
    st.tuples(st.just("join"), st.booleans()),
    st.tuples(st.just("pop"), st.just(0)),
)


class Grown:
    """A transcript that grows by random actions; call ids may be used twice, as logs of other systems may have them."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._asked = 0

    def act(self, action: str, number: int) -> None:
        """Append what the action names, or remove the last entry."""
        if action == "say":
            self._transcript.add_message(said("lead", f"word {len(self._transcript.entries)}"))
        elif action == "ask":
            made = [(f"c{(self._asked + place) % 6}", "look", "{}") for place in range(number)]
            self._asked += number
            self._transcript.add_message(said("lead", "I ask.", *made))
        elif action == "answer":
            self._transcript.add_message(result("lead", f"c{number}", "look", f"found {number}"))
        elif action == "join":
            child = Transcript(agent="clerk", chain="lc", above=self._transcript)
            child.add_message(said("clerk", "A word.", ("c0", "look", "{}"), invocation="i1"))
            self._transcript.join(child, by_call=bool(number))
        elif self._transcript.entries:
            self._transcript.entries.pop()


def _session(runs: Sequence[int]) -> list[HistoryEntry]:
    """Messages of runs, one after another; a run that comes again continues, which no session has."""
    lines: list[HistoryEntry] = []
    for run in runs:
        name = f"r{run}"
        made = [
            user("go", invocation=name),
            said("lead", "", (f"c{len(lines) % 3}", "look", "{}"), invocation=name),
            result("lead", f"c{run % 3}", "look", "found", invocation=name),
            said("clerk", "Done.", invocation=name),
        ]
        lines.extend(
            HistoryEntry(message, message.author or "lead", "l", position, is_relay=message.author == "clerk")
            for position, message in enumerate(made, len(lines) + 1)
        )
    return lines


@given(st.lists(ACTIONS, max_size=25), st.integers(0, 25), st.sampled_from(SCOPES))
def test_a_view_of_a_transcript_is_at_every_point_what_is_made_at_once(
    actions: list[tuple[str, int]], fork: int, scope: message_pb2.HistoryScope.ValueType
) -> None:
    transcript = Transcript(agent="lead", chain="l")
    transcript.add_message(user("go"))
    before, session = Grown(transcript), _session([1, 2])
    for action, number in actions[:fork]:
        before.act(action, number)
    lane = transcript.lane()
    grown, kept = Grown(lane), TranscriptView(lane, reader_of(lane, scope=scope))
    of_session = SessionView(reader_of(lane, scope=scope)).extend_to(session)
    for action, number in actions[fork:]:
        grown.act(action, number)
        assert kept.below(of_session) == view(lane, session, scope=scope)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=6), st.sampled_from(SCOPES))
def test_a_view_of_a_session_is_after_every_run_what_is_made_at_once(
    turns: list[list[int]], scope: message_pb2.HistoryScope.ValueType
) -> None:
    transcript, runs = Transcript(agent="lead", chain="l"), list[int]()
    reader = reader_of(transcript, scope=scope)
    kept = SessionView(reader)
    for more in turns:
        runs.extend(more)
        session = _session(runs)
        kept = kept.extend_to(session)
        again = SessionView(reader).extend_to(session)
        assert (kept.shown, kept.spoken, kept.size) == (again.shown, again.spoken, again.size)


def test_messages_that_are_settled_are_not_looked_at_again() -> None:
    transcript = Transcript(agent="lead", chain="l")
    transcript.add_message(user("go"))
    kept = TranscriptView(transcript, reader_of(transcript, scope=message_pb2.HISTORY_SCOPE_SESSION))
    empty = SessionView(reader_of(transcript, scope=message_pb2.HISTORY_SCOPE_SESSION))
    shown = [kept.below(empty)]
    for number in range(3):
        transcript.add_message(said("lead", "", (f"c{number}", "look", "{}")))
        shown.append(kept.below(empty))  # with the call open, as an agent in code may look
        transcript.add_message(result("lead", f"c{number}", "look", "found"))
        shown.append(kept.below(empty))
    assert [len(one) for one in shown] == [1, 1, 3, 3, 5, 5, 7]
    assert all(one is same for one, same in zip(shown[-2][:5], shown[-1], strict=False))
