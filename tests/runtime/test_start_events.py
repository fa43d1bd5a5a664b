"""What the starts of sub-agents and model calls say: revision, who transferred, which iteration, which settings."""

from pathlib import Path

from bough.v1 import event_pb2, fork_pb2, message_pb2, model_pb2
from bough_server.agents.definition import revision
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context
from tests.runtime.test_plan_execute import SCRIPT
from tests.runtime.test_plan_execute import TEAM as PLANNERS
from tests.runtime.test_transfers import to, transfer
from tests.support.composite_agents import loop, sequence, supervisor, swarm
from tests.support.fork_agents import World, open_forked, place, run_of
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script

Log = list[event_pb2.AgentEvent]


def starts(log: Log) -> list[tuple[str, event_pb2.SubAgentStarted]]:
    return [(event.agent, event.sub_agent_started) for event in having(log, "sub_agent_started")]


def transferred(log: Log) -> list[tuple[str, str]]:
    """Every sub-agent, and the agent whose invocation transferred to it."""
    names = {event.invocation_id: event.agent for event in log}
    return [(name, names.get(started.from_invocation_id, "")) for name, started in starts(log)]


def iterations(log: Log) -> list[tuple[str, int | None]]:
    return [(name, started.iteration if started.HasField("iteration") else None) for name, started in starts(log)]


async def turn(harness: RunHarness, agent: str) -> Log:
    log = await harness.turn(agent)
    await check_replay(harness, log)
    return log


async def test_a_member_of_a_swarm_says_which_member_transferred_to_it(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b")), "Done."], b=[calls(transfer("c"))], c=["From c."])
    team = (swarm("s", "a", "b", "c"), llm("a"), llm("b"), llm("c"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await turn(harness, "s")
    assert transferred(log) == [("a", ""), ("b", "a"), ("c", "b")]
    (first, second, _) = having(log, "sub_agent_started")
    assert second.sub_agent_started.from_invocation_id == first.invocation_id
    assert {event.parent_invocation_id for event in having(log, "sub_agent_started")} == {log[0].invocation_id}


async def test_a_member_of_a_supervisor_was_transferred_to_by_the_supervisor(tmp_path: Path) -> None:
    turns = script(s=[calls(transfer("a")), calls(transfer("b")), "Done."], a=["From a."], b=["From b."])
    async with open_team(tmp_path, turns, supervisor("s", "a", "b"), llm("a"), llm("b")) as harness:
        log = await turn(harness, "s")
    assert transferred(log) == [("a", "s"), ("b", "s")]


async def test_who_answers_in_its_callers_place_was_transferred_to_by_it(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"))], b=[calls(transfer("c"))], c=["From c."])
    team = (llm("a", links=[to("b")]), llm("b", links=[to("c")]), llm("c"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await turn(harness, "a")
    assert transferred(log) == [("b", "a"), ("c", "b")]


async def test_a_called_agent_has_no_agent_that_it_was_transferred_from(tmp_path: Path) -> None:
    async with open_forked(tmp_path, World()) as harness:
        log = await turn(harness, "p")
    assert transferred(log) == [("c", "")]
    assert iterations(log) == [("c", None)]


async def test_children_of_a_loop_say_in_which_iteration_they_run(tmp_path: Path) -> None:
    turns = script(a=["From a.", "From a."], b=["From b.", "From b."])
    team = (loop("l", "a", "s", rounds=2), sequence("s", "b"), llm("a"), llm("b"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await turn(harness, "l")
    assert iterations(log) == [("a", 0), ("s", 0), ("b", None), ("a", 1), ("s", 1), ("b", None)]


async def test_the_agents_of_a_plan_say_in_which_iteration_they_run(tmp_path: Path) -> None:
    async with open_team(tmp_path, SCRIPT, *PLANNERS) as harness:
        log = await turn(harness, "lead")
    assert iterations(log) == [
        ("planner", 0),
        ("executor", 0),
        ("replanner", 0),
        ("executor", 1),
        ("replanner", 1),
    ]


async def test_a_child_says_the_revision_of_its_definition_and_code_has_none(tmp_path: Path) -> None:
    @agent(description="Says so.", version="7")
    async def code(ctx: Context, input: message_pb2.Message) -> str:
        return "So."

    c = llm("c")
    async with open_team(tmp_path, script(c=["From c."]), sequence("s", "c", "code"), c, code_agents=[code]) as harness:
        log = await turn(harness, "s")
    assert [(name, started.revision) for name, started in starts(log)] == [("c", revision(c)), ("code", "")]
    refs = {ref.name: ref.revision for ref in log[0].run_started.definition_refs}
    assert refs["c"] == revision(c)


async def test_a_child_that_a_fork_shares_keeps_the_revision_that_it_started_with(tmp_path: Path) -> None:
    turns = script(
        p=[calls(call("call_c", message="one")), calls(call("call_c", message="two")), "Done."], c=["Found."]
    )
    p, c = llm("p", links=["c"]), llm("c")
    in_verse = fork_pb2.AgentOverride(instruction="Say it in verse.")
    changed = llm("c")
    changed.llm.instruction = in_verse.instruction
    async with open_team(tmp_path, turns, p, c) as harness:
        origin = await turn(harness, "p")
        fork = await harness.fork(run_of(origin), place(origin, "sub_agent_started"), agents={"c": in_verse})
        log = await harness.log(fork)
        await check_replay(harness, log)
    assert [started.revision for _, started in starts(log)] == [revision(c), revision(changed)]
    assert having(log, "run_forked")[0].run_forked.definition_refs[0].revision == revision(changed)
    assert answer_of(log) == "Done."


async def test_a_model_call_says_its_parameters(tmp_path: Path) -> None:
    settings = model_pb2.ModelSettings(temperature=0.0, max_output_tokens=50, extra_json='{"seed": 1}')
    turns = script(p=[calls(call("call_c", message="x")), "Done."], c=["Found."])
    async with open_team(tmp_path, turns, llm("p", links=["c"], settings=settings), llm("c")) as harness:
        log = await turn(harness, "p")
    asked = {event.agent: event.llm_started for event in having(log, "llm_started")}
    assert asked["p"].settings == settings
    assert asked["p"].settings.HasField("temperature")
    assert not asked["c"].HasField("settings")
