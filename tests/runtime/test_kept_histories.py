"""Sessions' messages that are kept between runs, and views that are extended: always what reading all again gives."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2, event_pb2, message_pb2, policy_pb2, run_pb2
from bough_server.errors import ForkRefused, InvalidRequest
from bough_server.history.session import SessionHistories, SessionHistory
from bough_server.history.visible import VisibleMessage
from bough_server.identity import Principal
from bough_server.runtime.visible_history import VisibleHistory
from bough_server.store.ports.sessions import Sessions
from bough_server.tools.tool import tool
from tests.support.examples import examples
from tests.support.log_readings import check_replay
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import Scripts, call, calls, llm, script

SCOPES: Final = {
    "alone": message_pb2.HISTORY_SCOPE_NONE,
    "branch": message_pb2.HISTORY_SCOPE_BRANCH,
    "calls": message_pb2.HISTORY_SCOPE_CALLS,
    "session": message_pb2.HISTORY_SCOPE_SESSION,
}
ROOTS: Final = (*SCOPES, "short", "forgetful", "mover", "clerk")
SESSIONS: Final = ("first", "second")
CONTINUE: Final = policy_pb2.RunPolicy(on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE)


@tool
async def lookup(query: str) -> str:
    """Looks a topic up."""
    return f"You asked for {query}."


def _lead(name: str, **history: object) -> agent_pb2.AgentDefinition:
    """An agent that asks a clerk and a writer at once, then a clerk again."""
    definition = llm(name, links=["clerk", "writer"], tools=["lookup"])
    definition.history.CopyFrom(agent_pb2.HistoryPolicy(**history))  # type: ignore[arg-type]
    return definition


def _team() -> list[agent_pb2.AgentDefinition]:
    summarize = agent_pb2.Summarization(max_tokens=150)
    window = agent_pb2.SlidingWindow(max_tokens=200)
    session = message_pb2.HISTORY_SCOPE_SESSION
    mover = llm("mover", links=[agent_pb2.AgentLink(agent="writer", link_mode=agent_pb2.LINK_MODE_TRANSFER)])
    mover.llm.skip_transfer_messages = True
    return [
        *(_lead(name, scope=scope) for name, scope in SCOPES.items()),
        _lead("short", scope=session, sliding_window=window),
        _lead("forgetful", scope=session, summarize=summarize),
        mover,
        llm("clerk", tools=["lookup"]),
        llm("writer"),
    ]


def _turns() -> str:
    ask = calls(call("call_clerk", message="What is it?"), call("call_writer", message="Say it."), text="I ask.")
    again = calls(call("lookup", query="more"), call("call_clerk", message="And more?"))
    leads = {name: [ask, again, f"The {name} answers."] for name in (*SCOPES, "short", "forgetful")}
    return script(
        **leads,
        **{"forgetful.summary": ["All was asked."]},
        mover=[calls(call("transfer_to_agent", agent_name="writer"))],
        clerk=[calls(call("lookup", query="it"), text="I look."), "It is a branch."],
        writer=["A word."],
    )


@asynccontextmanager
async def open_all() -> AsyncIterator[RunHarness]:
    with tempfile.TemporaryDirectory() as folder:
        async with open_harness(Path(folder), models=Scripts(_turns()), definitions=_team(), tools=[lookup]) as story:
            yield story


@dataclass
class Compared:
    """How often the kept was compared with what reading and building all again gives."""

    reads: int = 0
    views: int = 0
    differences: list[str] = field(default_factory=list)
    """What differed. An exception that is raised where they are compared would only fail the run's model call."""


@contextmanager
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    """Compare every read of a session, and every view of an agent, while this is open."""
    done, read, shown = Compared(), SessionHistories.read, VisibleHistory.list_all_visible

    async def compared_read(
        self: SessionHistories, sessions: Sessions, principal: Principal, session_id: str, *, through: int
    ) -> SessionHistory:
        kept = await read(self, sessions, principal, session_id, through=through)
        again = await sessions.history(principal, session_id, through=through)
        if [*kept.stored] != [*again]:
            done.differences.append(f"the session up to {through}")
        done.reads += 1
        return kept

    def compared_shown(self: VisibleHistory) -> list[VisibleMessage]:
        kept = shown(self)
        execution, view = self._execution, self._view
        session, execution.session = execution.session, SessionHistory(execution.session.stored)
        self._view = None
        if shown(self) != kept or [*execution.session.summaries] != [*session.summaries]:
            done.differences.append(f"what {self._running.name} sees")
        execution.session, self._view = session, view
        done.views += 1
        return kept

    with monkeypatch.context() as patched:
        patched.setattr(SessionHistories, "read", compared_read)
        patched.setattr(VisibleHistory, "list_all_visible", compared_shown)
        yield done
    assert done.differences == []


@dataclass
class Story:
    """The runs that a random sequence of actions has made."""

    harness: RunHarness
    logs: list[tuple[run_pb2.Run, Sequence[event_pb2.AgentEvent]]] = field(default_factory=list)

    async def turn(self, agent: str, session_id: str, *, cancelled_after: int = 0) -> None:
        """A run in a session, cancelled after so many events unless that is 0."""
        run = await self.harness.start(agent, "Go.", session_id=session_id, creates=True, policy=CONTINUE)
        await self._followed(run, cancelled_after)

    async def _followed(self, run: run_pb2.Run, cancelled_after: int) -> None:
        log: list[event_pb2.AgentEvent] = []
        async for event in self.harness.follow(run):
            log.append(event)
            if len(log) == cancelled_after:
                await self.harness.runs.cancel(ME, run.run_id)
        await self.harness.until_over(run)
        self.logs.append((run, log))

    async def fork(self, number: int, after: int, agent: str) -> None:
        """A fork of a run, if it can be forked there, and a turn in the fork's session."""
        if not self.logs:
            return
        origin, log = self.logs[number % len(self.logs)]
        try:
            fork = await self.harness.fork(origin, 1 + after % max(1, len(log) - 1), allow_open_effects=True)
        except (ForkRefused, InvalidRequest):
            return
        await self._followed(fork, 0)
        await self.turn(agent, fork.session_id)

    async def delete(self, session_id: str) -> None:
        """A session's end; the next turn creates another of the same id."""
        if any(run.session_id == session_id for run, _ in self.logs):
            await self.harness.store.sessions.delete(ME, session_id)
            self.logs = [(run, log) for run, log in self.logs if run.session_id != session_id]


agents, sessions = st.sampled_from(ROOTS), st.sampled_from(SESSIONS)
ACTIONS: Final = st.one_of(
    st.tuples(st.just("turn"), agents, sessions),
    st.tuples(st.just("turn"), agents, sessions),
    st.tuples(st.just("cancel"), agents, sessions, st.integers(1, 60)),
    st.tuples(st.just("fork"), st.integers(0, 9), st.integers(0, 80), agents),
    st.tuples(st.just("delete"), sessions),
)


async def play(actions: Sequence[tuple[object, ...]]) -> None:
    async with open_all() as harness:
        story = Story(harness)
        for action in actions:
            match action:
                case ("turn", str(agent), str(session_id)):
                    await story.turn(agent, session_id)
                case ("cancel", str(agent), str(session_id), int(after)):
                    await story.turn(agent, session_id, cancelled_after=after)
                case ("fork", int(number), int(after), str(agent)):
                    await story.fork(number, after, agent)
                case ("delete", str(session_id)):
                    await story.delete(session_id)
        for _, log in story.logs:
            await check_replay(harness, log)


@pytest.mark.grid
@examples(6)
@given(st.lists(ACTIONS, min_size=2, max_size=6))
def test_what_is_kept_equals_what_is_read_and_built_again(actions: list[tuple[object, ...]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, compared(monkeypatch):
        asyncio.run(play(actions))


async def test_turns_of_all_agents_in_one_session_keep_what_reading_again_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with compared(monkeypatch) as done:
        await play([("turn", agent, "first") for agent in (*ROOTS, "session")])
    assert done.reads > len(ROOTS)
    assert done.views > 3 * len(ROOTS)
