"""What a caller sees of the agents that it called as tools, over the turns of a session: calls and results alone."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from bough.v1 import agent_pb2, message_pb2
from bough_server.models.model import ModelRequest
from bough_server.store.opening import rebuild_projections
from bough_server.store.ports.sessions import StoredCall
from bough_server.tools.tool import tool
from tests.support.composite_agents import parallel, sequence
from tests.support.fork_agents import run_of
from tests.support.log_readings import check_replay, having, text_of
from tests.support.older_schema import CHARGES_UNDONE
from tests.support.run_harness import ME
from tests.support.teams import call, calls, llm, open_team, script

LONG = "a long page of what the tool found, " * 50


@tool
def read(page: str) -> str:
    """Reads a page."""
    return f"{page}: {LONG}"


def shown(request: ModelRequest) -> list[str]:
    """The messages of a request in a line each: roles, texts, calls with arguments, results with calls."""
    return [
        " ".join([message_pb2.Role.Name(message.role).removeprefix("ROLE_"), *map(_words, message.parts)])
        for message in request.messages
    ]


def _words(part: message_pb2.Part) -> str:
    if part.HasField("tool_call"):
        return f"<{part.tool_call.name} {part.tool_call.arguments_json}>"
    if part.HasField("tool_result"):
        result = part.tool_result
        return f"<{result.call.name} = {result.error.message or text_of(result)}>"
    return part.text


def size_of(request: ModelRequest) -> int:
    return sum(len(line) for line in shown(request))


TURNS = 5
READING = script(
    lead=[
        turn
        for number in range(TURNS)
        for turn in (
            {"when": f"question {number}", **calls(call("call_clerk", message=f"Look up {number}."))},
            {"when": f"question {number}", "text": f"Answer {number}."},
        )
    ],
    clerk=[
        *({"calls": [call("read", page=f"page {page}")]} for page in range(4)),
        {"text": "It is on page 3."},
    ],
)
TEAM = (llm("lead", links=["clerk"]), llm("clerk", tools=["read"]))


def exchange(number: int) -> list[str]:
    return [
        f"USER question {number}",
        f'ASSISTANT <call_clerk {{"message": "Look up {number}."}}>',
        "TOOL <call_clerk = It is on page 3.>",
        f"ASSISTANT Answer {number}.",
    ]


async def test_a_caller_keeps_its_calls_with_their_results_and_nothing_of_its_childrens_insides(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, READING, *TEAM, tools=[read], heard=heard) as harness:
        session_id = ""
        for number in range(TURNS):
            log = await harness.turn("lead", f"question {number}", session_id=session_id)
            session_id = log[0].session_id
            await check_replay(harness, log)
        stored = await harness.messages(session_id)
    first = [request for request in heard if request.agent == "lead"][::2]
    assert [shown(request) for request in first] == [
        [line for earlier in range(number) for line in exchange(earlier)] + [f"USER question {number}"]
        for number in range(TURNS)
    ]
    assert size_of(first[-1]) < 1_000
    assert sum(len(text_of(one.message.parts[0].tool_result)) for one in stored) > TURNS * 4 * len(LONG)


async def test_an_agent_of_scope_session_still_sees_what_its_children_said(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    lead = llm("lead", links=["clerk"])
    lead.history.scope = message_pb2.HISTORY_SCOPE_SESSION
    async with open_team(tmp_path, READING, lead, TEAM[1], tools=[read], heard=heard) as harness:
        log = await harness.turn("lead", "question 0")
        await harness.turn("lead", "question 1", session_id=log[0].session_id)
    second = [request for request in heard if request.agent == "lead"][2]
    assert size_of(second) > 4 * len(LONG)
    assert "call_clerk" not in " ".join(shown(second))


async def test_a_child_sees_its_own_earlier_calls_from_within_and_a_sibling_sees_them_from_outside(
    tmp_path: Path,
) -> None:
    heard: list[ModelRequest] = []
    turns = script(
        lead=[
            {"when": "one", **calls(call("call_mid", message="First."), text="I ask.")},
            {"when": "one", "text": "Half."},
            {"when": "two", **calls(call("call_mid", message="Second."))},
            {"when": "two", **calls(call("call_other", message="And you?"))},
            {"when": "two", "text": "Whole."},
        ],
        mid=[calls(call("call_low", message="Help.")), "From mid."],
        low=["From low."],
        other=["From other."],
    )
    calling = agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_CALLS)
    team = (
        llm("lead", links=["mid", agent_pb2.AgentLink(agent="other", history=calling)]),
        llm("mid", links=["low"]),
        llm("low"),
        llm("other"),
    )
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        first = await harness.turn("lead", "one")
        log = await harness.turn("lead", "two", session_id=first[0].session_id)
        await check_replay(harness, log)
    inner = ["USER First.", 'ASSISTANT <call_low {"message": "Help."}>', "TOOL <call_low = From low.>"]
    outer = [
        'USER For context: [lead] said: I ask.. [lead] called tool: `call_mid` with arguments: {"message": "First."}.',
        "USER For context: [lead] `call_mid` tool returned result: From mid..",
    ]
    assert shown([request for request in heard if request.agent == "mid"][2]) == [
        "USER one",
        "USER For context: [lead] said: I ask..",
        *inner,
        "ASSISTANT From mid.",
        "USER For context: [lead] said: Half..",
        "USER two",
        "USER Second.",
    ]
    assert shown(next(request for request in heard if request.agent == "other")) == [
        "USER one",
        *outer,
        "USER For context: [lead] said: Half..",
        "USER two",
        'USER For context: [lead] called tool: `call_mid` with arguments: {"message": "Second."}.',
        "USER For context: [lead] `call_mid` tool returned result: From mid..",
        "USER And you?",
    ]


async def test_a_child_that_failed_is_seen_with_its_error_in_the_next_turn(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(
        lead=[{"when": "one", **calls(call("call_bad", message="Go."))}, "It failed.", "Next."],
        bad=[{"text": "never", "error": {"reason": "UNAVAILABLE", "after_chunks": 1}}],
    )
    async with open_team(tmp_path, turns, llm("lead", links=["bad"]), llm("bad"), heard=heard) as harness:
        first = await harness.turn("lead", "one")
        await harness.turn("lead", "two", session_id=first[0].session_id)
    lines = shown(heard[-1])
    assert lines[1] == 'ASSISTANT <call_bad {"message": "Go."}>'
    assert lines[2].startswith("TOOL <call_bad = The agent 'bad' failed")
    assert lines[3:] == ["ASSISTANT It failed.", "USER two"]


async def test_what_runs_below_a_called_composite_is_inside_the_call(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(
        lead=[
            {"when": "one", **calls(call("call_both", message="Go."))},
            {"when": "one", "text": "Done."},
            {"when": "two", "text": "Again."},
        ],
        a=[calls(call("call_c", message="Help a.")), "From a."],
        b=["From b."],
        c=["From c."],
    )
    team = (llm("lead", links=["both"]), parallel("both", "a", "b"), llm("a", links=["c"]), llm("b"), llm("c"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        first = await harness.turn("lead", "one")
        log = await harness.turn("lead", "two", session_id=first[0].session_id)
        await check_replay(harness, log)
        history = await harness.store.sessions.history(ME, first[0].session_id, through=99)
    ids = {event.agent: event.invocation_id for event in having(first, "sub_agent_started")}
    inside = [set(one.inside) for one in history if isinstance(one, StoredCall) and one.inside]
    assert inside == [{ids["c"]}, {ids["both"], ids["a"], ids["b"], ids["c"]}]
    assert shown(heard[-1]) == [
        "USER one",
        'ASSISTANT <call_both {"message": "Go."}>',
        "TOOL <call_both = From a.\n\nFrom b.>",
        "ASSISTANT Done.",
        "USER two",
    ]


async def test_a_fork_and_a_rebuild_keep_the_calls_of_the_session(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, READING, *TEAM, tools=[read]) as harness:
        first = await harness.turn("lead", "question 0")
        second = await harness.turn("lead", "question 1", session_id=first[0].session_id)
        called = next(event for event in second if event.HasField("tool_completed") and not event.depth)
        forks = [
            await harness.fork(run_of(second), 1),
            await harness.fork(run_of(second), called.sequence),
        ]
        for fork in forks:
            await harness.log(fork)
        sessions = [first[0].session_id, *(fork.session_id for fork in forks)]
        before = [await harness.store.sessions.history(ME, one, through=99) for one in sessions]
    rebuild_projections(f"sqlite:///{tmp_path / 'bough.db'}")
    async with open_team(tmp_path, READING, *TEAM, tools=[read], heard=heard) as harness:
        assert [await harness.store.sessions.history(ME, one, through=99) for one in sessions] == before
        for session_id in sessions:
            await harness.turn("lead", "question 2", session_id=session_id)
    asked = [request for request in heard if request.agent == "lead"][::2]
    assert [shown(request) for request in asked] == [[*exchange(0), *exchange(1), "USER question 2"]] * 3


async def test_a_deleted_session_leaves_no_calls(tmp_path: Path) -> None:
    async with open_team(tmp_path, READING, *TEAM, tools=[read]) as harness:
        session_id = (await harness.turn("lead", "question 0"))[0].session_id
        assert len(await harness.store.sessions.history(ME, session_id, through=99)) == 14
        await harness.store.sessions.delete(ME, session_id)
        assert await harness.store.sessions.history(ME, session_id, through=99) == []


async def test_an_answer_that_a_root_relayed_is_seen_once(tmp_path: Path) -> None:
    """By an agent that sees its author's words as these, by one that does not as the root's answer."""
    heard: list[ModelRequest] = []
    branch = agent_pb2.AgentLink(agent="b", history=agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_BRANCH))
    turns = script(a=["From a."], b=["From b."], c=["From c."])
    team = (sequence("s", branch, "a", "c"), llm("a"), llm("b"), llm("c"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        first = await harness.turn("s", "one")
        await harness.turn("s", "two", session_id=first[0].session_id)
    assert shown(heard[3]) == ["USER one", "ASSISTANT From b.", "USER For context: [c] said: From c..", "USER two"]
    assert shown(heard[4]) == [
        "USER one",
        "USER For context: [b] said: From b..",
        "ASSISTANT From a.",
        "USER For context: [c] said: From c..",
        "USER two",
        "USER For context: [b] said: From b..",
    ]


async def test_a_call_that_was_cancelled_is_seen_with_its_error_in_the_next_turn(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    reading = asyncio.Event()

    @tool
    async def wait() -> str:
        """Waits to be cancelled."""
        reading.set()
        await asyncio.Event().wait()
        return "never"

    turns = script(
        lead=[{"when": "one", **calls(call("call_clerk", message="Go."))}, {"when": "two", "text": "Next."}],
        clerk=[calls(call("wait"))],
    )
    team = (llm("lead", links=["clerk"]), llm("clerk", tools=["wait"]))
    async with open_team(tmp_path, turns, *team, tools=[wait], heard=heard) as harness:
        run = await harness.start("lead", "one")
        await reading.wait()
        await harness.runs.cancel(ME, run.run_id)
        await harness.log(run)
        await harness.turn("lead", "two", session_id=run.session_id)
    lines = shown(heard[-1])
    assert lines[:2] == ["USER one", 'ASSISTANT <call_clerk {"message": "Go."}>']
    assert lines[2].startswith("TOOL <call_clerk = ")
    assert lines[3:] == ["USER two"]


def _make_first_revision(database: sqlite3.Connection) -> None:
    """Undo the migrations after the first, so that the next server upgrades the database again."""
    for statement in CHARGES_UNDONE:
        database.execute(statement)
    for trigger in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        database.execute(f"DROP TRIGGER {trigger[0]}")
    for table in ("calls", "blobs", "session_blobs", "labels"):
        database.execute(f"DROP TABLE {table}")
    for index in (
        *("runs_of_evaluation", "runs_of_evaluations", "evaluations_newest_first", "evaluations_of_set"),
        *("runs_by_owner", "runs_of_user", "evaluation_runs_of_user", "evaluations_of_user", "sessions_of_user"),
        "runs_asking",
    ):
        database.execute(f"DROP INDEX {index}")
    for index, columns in (("runs_by_request", "request_id"), ("runs_newest_first", "create_time_ns")):
        database.execute(f"DROP INDEX {index}")
        database.execute(f"CREATE INDEX {index} ON runs (tenant_id, {columns})")
    for column in (
        *("kind", "evaluation_id", "case_id", "eval_set_name", "totals", "verdict"),
        *("evaluation_role", "evaluation"),
    ):
        database.execute(f"ALTER TABLE runs DROP COLUMN {column}")
    database.execute("ALTER TABLE usage_entries DROP COLUMN cache_write_tokens")
    database.execute("UPDATE alembic_version SET version_num = '0006'")


async def test_calls_of_runs_from_before_the_table_of_calls_are_there_after_a_rebuild(tmp_path: Path) -> None:
    """Until then their exchanges are seen, as with SESSION."""
    heard: list[ModelRequest] = []
    path = tmp_path / "bough.db"
    async with open_team(tmp_path, READING, *TEAM, tools=[read]) as harness:
        session_id = (await harness.turn("lead", "question 0"))[0].session_id
        before = await harness.store.sessions.history(ME, session_id, through=99)
    with closing(sqlite3.connect(path, isolation_level=None)) as intruder:
        _make_first_revision(intruder)
    async with open_team(tmp_path, READING, *TEAM, tools=[read], heard=heard) as harness:
        await harness.turn("lead", "question 1", session_id=session_id)
    rebuild_projections(f"sqlite:///{path}")
    async with open_team(tmp_path, READING, *TEAM, tools=[read], heard=heard) as harness:
        assert await harness.store.sessions.history(ME, session_id, through=before[-1].message.position) == before
        await harness.turn("lead", "question 2", session_id=session_id)
    asked = [shown(request) for request in heard if request.agent == "lead"]
    first = next(lines for lines in asked if lines[-1] == "USER question 1")
    assert first[1:3] == [
        "USER For context: [lead] said: Look up 0..",
        'USER For context: [clerk] called tool: `read` with arguments: {"page": "page 0"}.',
    ]
    last = next(lines for lines in asked if lines[-1] == "USER question 2")
    assert last == [*exchange(0), *exchange(1), "USER question 2"]


async def test_a_request_begins_with_what_the_last_request_of_the_run_before_was(tmp_path: Path) -> None:
    """So a provider's cache of prompts serves it: calls beside text, beside tools, and several at once included."""
    heard: list[ModelRequest] = []
    turns = script(
        lead=[
            {"when": "one", **calls(call("call_a", message="Go."), call("read", page="mine"), text="I ask.")},
            {"when": "one", **calls(call("call_b", message="Go."), call("call_a", message="Again."))},
            {"when": "one", **calls(call("call_b", message=""), reasoning="Once more.")},
            {"when": "one", "text": "Done."},
            {"when": "two", "text": "Next."},
        ],
        a=[calls(call("read", page="of a")), "From a."],
        b=["From b."],
    )
    team = (llm("lead", links=["a", "b"], tools=["read"]), llm("a", tools=["read"]), llm("b"))
    async with open_team(tmp_path, turns, *team, tools=[read], heard=heard) as harness:
        first = await harness.turn("lead", "one")
        await harness.turn("lead", "two", session_id=first[0].session_id)
    *_, last, following = [request for request in heard if request.agent == "lead"]
    assert len(last.messages) == 9
    assert shown(following) == [*shown(last), "ASSISTANT Done.", "USER two"]
