"""Conversations that stay with the member they were handed to: the agent that a run of a team starts with."""

import asyncio
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, event_pb2, run_pb2
from bough_server.models.model import ModelRequest
from tests.runtime.test_flows import EXIT
from tests.runtime.test_supervisors import shown_to
from tests.runtime.test_transfers import to, transfer
from tests.support.composite_agents import Link, sequence, supervisor, swarm
from tests.support.fork_agents import run_of
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness, names
from tests.support.session_agents import QUEUE
from tests.support.teams import call, calls, llm, open_team, script

LAST = agent_pb2.NEXT_RUN_START_LAST_SPEAKER
TURNS = script(
    triage=[{"when": "money", **calls(transfer("refunds"))}, {"when": "back", "text": "Hello from triage."}, "Triage."],
    refunds=[{"when": "back", **calls(transfer("triage"))}, "Refunds here."],
)


def staying(*links: Link, name: str = "desk") -> agent_pb2.AgentDefinition:
    """A swarm that a conversation stays with."""
    definition = swarm(name, *(links or ("triage", "refunds")))
    definition.swarm.next_run_starts_with = LAST
    return definition


TEAM = (staying(), llm("triage"), llm("refunds"))


def began(log: list[event_pb2.AgentEvent]) -> list[str]:
    """The agents of a run below its root, in the order of their starts."""
    return [event.agent for event in having(log, "sub_agent_started")]


async def turns(harness: RunHarness, agent: str, *texts: str) -> list[list[event_pb2.AgentEvent]]:
    """The logs of the runs of one session."""
    logs: list[list[event_pb2.AgentEvent]] = []
    for text in texts:
        logs.append(await harness.turn(agent, text, session_id=logs[0][0].session_id if logs else ""))
        await check_replay(harness, logs[-1])
    return logs


async def test_a_run_of_a_swarm_starts_with_the_member_that_spoke_last(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, TURNS, *TEAM, heard=heard) as harness:
        logs = await turns(harness, "desk", "money", "and now?", "back", "and now?")
    assert [began(log) for log in logs] == [["triage", "refunds"], ["refunds"], ["refunds", "triage"], ["triage"]]
    assert [log[0].run_started.starts_with for log in logs] == ["", "refunds", "refunds", "triage"]
    assert [answer_of(log) for log in logs] == ["Refunds here.", "Refunds here.", "Hello from triage.", "Triage."]
    assert shown_to(heard, "refunds")[1] == [
        "USER: money",
        'USER: For context: [triage] called tool: `transfer_to_agent` with arguments: {"agent_name": "refunds"}.',
        "USER: For context: [triage] `transfer_to_agent` tool returned result: Transferred to refunds..",
        "ASSISTANT: Refunds here.",
        "USER: and now?",
    ]


@pytest.mark.parametrize("start", [agent_pb2.NEXT_RUN_START_UNSPECIFIED, agent_pb2.NEXT_RUN_START_ENTRY])
async def test_every_run_starts_with_the_entry_unless_the_definition_says_otherwise(
    tmp_path: Path, start: agent_pb2.NextRunStart.ValueType
) -> None:
    desk = swarm("desk", "triage", "refunds")
    desk.swarm.next_run_starts_with = start
    async with open_team(tmp_path, TURNS, desk, *TEAM[1:]) as harness:
        logs = await turns(harness, "desk", "money", "and now?")
    assert [log[0].run_started.starts_with for log in logs] == ["", ""]
    assert began(logs[1])[0] == "triage"


async def test_a_member_that_is_not_linked_any_more_leaves_its_place_to_the_entry(tmp_path: Path) -> None:
    async with open_team(tmp_path, TURNS, *TEAM) as harness:
        (log,) = await turns(harness, "desk", "money")
    smaller = (staying("triage", "repairs"), llm("triage"), llm("repairs"))
    async with open_team(tmp_path, TURNS, *smaller) as harness:
        second = await harness.turn("desk", "and now?", session_id=log[0].session_id)
        await check_replay(harness, second)
    assert (second[0].run_started.starts_with, began(second)) == ("", ["triage"])


async def test_a_member_that_spoke_through_agents_below_it_is_the_one_that_starts(tmp_path: Path) -> None:
    said = script(
        triage=[{"when": "money", **calls(transfer("flow"))}, calls(transfer("tail"))],
        a=["From a."],
        tail=[{"when": "tail", **calls(transfer("end"))}],
        end=["From the end."],
    )
    team = (
        staying("triage", "flow", "tail"),
        llm("triage"),
        sequence("flow", "a"),
        llm("a"),
        llm("tail", links=[to("end")]),
        llm("end"),
    )
    async with open_team(tmp_path, said, *team) as harness:
        flow = await turns(harness, "desk", "money", "more")
        tail = await turns(harness, "desk", "tail", "tail again")
    assert [began(log) for log in flow] == [["triage", "flow", "a"], ["flow", "a"]]
    assert [began(log) for log in tail] == [["triage", "tail", "end"], ["tail", "end"]]


async def test_a_run_that_failed_does_not_move_the_conversation(tmp_path: Path) -> None:
    said = script(
        triage=[{"when": "money", **calls(transfer("refunds"))}, "Triage."],
        refunds=[{"when": "break", **calls(transfer("broken"))}, "Refunds here."],
        broken=[{"text": "never", "error": {"reason": "UNAVAILABLE"}}],
    )
    team = (staying("triage", "refunds", "broken"), llm("triage"), llm("refunds"), llm("broken"))
    async with open_team(tmp_path, said, *team) as harness:
        logs = await turns(harness, "desk", "money", "break", "and now?")
    assert [began(log) for log in logs] == [["triage", "refunds"], ["refunds", "broken"], ["refunds"]]


async def test_a_queued_run_finds_it_when_it_begins_and_says_so_in_run_dequeued(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def wait(*_: object) -> None:
        await gate.wait()

    async with open_team(tmp_path, TURNS, *TEAM, gate=wait) as harness:
        first = await harness.start("desk", "money")
        queued = await harness.start("desk", "and now?", session_id=first.session_id, policy=QUEUE)
        gate.set()
        log = await harness.log(queued)
        await check_replay(harness, log)
    assert names(log)[:3] == ["desk: run.started", "desk: run.queued", "desk: run.dequeued"]
    assert (log[0].run_started.starts_with, log[2].run_dequeued.starts_with) == ("", "refunds")
    assert began(log) == ["refunds"]


async def test_a_fork_starts_with_the_member_that_its_origin_started_with(tmp_path: Path) -> None:
    async with open_team(tmp_path, TURNS, *TEAM) as harness:
        _, second, third = await turns(harness, "desk", "money", "and now?", "back")
        # The session has moved on to triage since: the fork of the second run does not look at it.
        log = await harness.log(await harness.fork(run_of(second), 1))
        await check_replay(harness, log)
        fork = run_pb2.Run(run_id=log[0].run_id, session_id=log[0].session_id)
        following = await harness.turn("desk", "and now?", session_id=fork.session_id)
    assert began(third) == ["refunds", "triage"]
    assert (log[0].run_started.starts_with, began(log)) == ("refunds", ["refunds"])
    assert (following[0].run_started.starts_with, began(following)) == ("refunds", ["refunds"])


async def test_a_conversation_goes_on_where_its_fork_was_left_even_if_the_origin_is_of_another_session(
    tmp_path: Path,
) -> None:
    async with open_team(tmp_path, TURNS, *TEAM) as harness:
        _, second = await turns(harness, "desk", "money", "and now?")
        cancelled = await harness.fork(run_of(second), 1)
        await harness.log(cancelled)
        logs = [await harness.turn("desk", "back", session_id=cancelled.session_id) for _ in range(2)]
    assert [log[0].run_started.starts_with for log in logs] == ["refunds", "triage"]


def leading(*links: Link, tools: tuple[str, ...] = ()) -> agent_pb2.AgentDefinition:
    definition = supervisor("head", *links, tools=tools)
    definition.supervisor.next_run_starts_with = LAST
    return definition


async def test_a_run_of_a_supervisor_starts_with_the_member_whose_exit_was_the_last_answer(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    said = script(
        head=[{"when": "money", **calls(transfer("refunds"))}, "From the head."],
        refunds=[
            {"when": "over", "text": "That is all from me."},
            calls(call("exit", final_answer="Refunds here.")),
        ],
    )
    team = (leading("refunds"), llm("refunds", tools=["exit"]))
    async with open_team(tmp_path, said, *team, heard=heard) as harness:
        logs = await turns(harness, "head", "money", "and now?", "over", "and now?")
    assert [log[0].run_started.starts_with for log in logs] == ["", "refunds", "refunds", ""]
    assert [answer_of(log) for log in logs] == ["Refunds here.", "Refunds here.", "From the head.", "From the head."]
    assert [event.effect_key for event in having(logs[2], "sub_agent_started")] == ["h0"]
    assert [request.agent for request in heard] == ["head", "refunds", "refunds", "refunds", "head", "head"]


async def test_a_supervisor_goes_on_after_the_member_that_started_and_failed(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    said = script(
        head=[{"when": "money", **calls(transfer("refunds"))}, calls(transfer("refunds")), "From the head."],
        refunds=[
            {"when": "fail", "text": "never", "error": {"reason": "UNAVAILABLE"}},
            calls(call("exit", final_answer="Refunds here.")),
        ],
    )
    team = (leading("refunds"), llm("refunds", tools=["exit"]))
    async with open_team(tmp_path, said, *team, heard=heard) as harness:
        logs = await turns(harness, "head", "money", "fail")
    keys = [event.effect_key for event in having(logs[1], "sub_agent_started")]
    assert keys == ["h0", "h1"]
    assert shown_to(heard, "head")[1][-1].startswith("USER: For context: [refunds] failed: ")


async def test_an_agent_that_a_supervisor_calls_as_a_tool_never_starts_its_run(tmp_path: Path) -> None:
    async with open_team(
        tmp_path, script(head=[calls(transfer("a"))], a=[EXIT]), leading("a"), llm("a", tools=["exit"])
    ) as harness:
        (log,) = await turns(harness, "head", "one")
    tool = agent_pb2.AgentLink(agent="a", link_mode=agent_pb2.LINK_MODE_TOOL)
    async with open_team(tmp_path, script(head=["From the head."]), leading(tool), llm("a")) as harness:
        second = await harness.turn("head", "two", session_id=log[0].session_id)
    assert second[0].run_started.starts_with == ""


async def test_a_swarm_below_the_root_starts_with_its_entry(tmp_path: Path) -> None:
    async with open_team(tmp_path, TURNS, sequence("outer", "desk"), *TEAM) as harness:
        logs = await turns(harness, "outer", "money", "and now?")
    assert [log[0].run_started.starts_with for log in logs] == ["", ""]
    assert began(logs[1])[:2] == ["desk", "triage"]


class Hold:
    """A gate that holds the model of an agent for ever when it answers for the n-th time from now on."""

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        """Hold no model."""
        self.hold("", 0)

    def hold(self, agent: str, number: int) -> None:
        """Hold a model from its answer of this number, from 1."""
        self._agent, self._left, self.reached = agent, number, asyncio.Event()

    async def __call__(self, agent: str, turn: int, piece: int) -> None:
        """Waits for ever where it is to."""
        self._left -= agent == self._agent and piece == 0
        if agent == self._agent and self._left <= 0:
            self.reached.set()
            await asyncio.Event().wait()


async def test_a_queued_run_that_is_continued_after_a_crash_starts_with_what_is_recorded(tmp_path: Path) -> None:
    hold = Hold()
    hold.hold("triage", 1)
    async with open_team(tmp_path, TURNS, *TEAM, gate=hold) as harness:
        first = await harness.start("desk", "money")
        queued = await harness.start("desk", "and now?", session_id=first.session_id, policy=QUEUE)
        await hold.reached.wait()
        await harness.crash()
    hold.hold("refunds", 2)
    async with open_team(tmp_path, TURNS, *TEAM, gate=hold) as harness:
        assert await harness.runs.recover() == 2
        await harness.log(first)
        await hold.reached.wait()
        await harness.crash()
    hold.release()
    async with open_team(tmp_path, TURNS, *TEAM, gate=hold) as harness:
        assert await harness.runs.recover() == 1
        log = await harness.log(queued)
        await check_replay(harness, log)
    assert [event.run_dequeued.starts_with for event in having(log, "run_dequeued")] == ["refunds"]
    assert (began(log), answer_of(log)) == (["refunds"], "Refunds here.")


async def test_the_entry_starts_if_the_run_that_gave_the_last_answer_was_deleted(tmp_path: Path) -> None:
    """A fork that was cancelled before it answered has the answers of earlier runs, which are of another session."""
    hold = Hold()
    async with open_team(tmp_path, TURNS, *TEAM, gate=hold) as harness:
        _, second = await turns(harness, "desk", "money", "and now?")
        hold.hold("refunds", 1)
        fork = await harness.fork(run_of(second), 1)
        await hold.reached.wait()
        await harness.runs.cancel(ME, fork.run_id)
        await harness.log(fork)
        hold.release()
        before = await harness.turn("desk", "and now?", session_id=fork.session_id)
    assert before[0].run_started.starts_with == "refunds"
    async with open_team(tmp_path / "other", TURNS, *TEAM, gate=hold) as harness:
        _, second = await turns(harness, "desk", "money", "and now?")
        hold.hold("refunds", 1)
        fork = await harness.fork(run_of(second), 1)
        await hold.reached.wait()
        await harness.runs.cancel(ME, fork.run_id)
        await harness.log(fork)
        hold.release()
        await harness.store.sessions.delete(ME, second[0].session_id)
        after = await harness.turn("desk", "and now?", session_id=fork.session_id)
    assert (after[0].run_started.starts_with, began(after)) == ("", ["triage"])
