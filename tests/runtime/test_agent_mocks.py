"""Agents of a case of an evaluation that mocks answer for, and mocks that answer only so often."""

from collections import Counter
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, eval_set_pb2, event_pb2, execution_pb2, invocation_pb2
from bough_server import Context, RunError, agent
from bough_server.evals.job.mock_uses import MockUses, count_mock_uses
from bough_server.runs.admission import EvaluationRun
from tests.durability.prefixes.recovery import cut_off
from tests.runtime.test_tool_mocks import broken, look, run
from tests.support.fork_agents import run_of
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.payment_agents import team, whole
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script
from tests.support.tool_mocks import TURN, failing, mock

NOT_MOCKED = error_pb2.ERROR_REASON_TOOL_NOT_MOCKED
FAILED, SUCCEEDED = execution_pb2.EXECUTION_STATE_FAILED, execution_pb2.EXECUTION_STATE_SUCCEEDED


def answering(agent: str, text: str, *, error: str = "", **fields: object) -> eval_set_pb2.AgentMock:
    """A mock that answers for an agent with a text, or fails with an error."""
    made = eval_set_pb2.AgentMock(agent=agent, **fields)  # type: ignore[arg-type]
    if error:
        made.error.message = error
    else:
        made.text = text
    return made


def case_with(
    *agents: eval_set_pb2.AgentMock, tools: list[eval_set_pb2.ToolMock] | None = None, strict: bool | None = None
) -> EvaluationRun:
    """A turn of a case with these mocks."""
    return EvaluationRun(ref=TURN, mocks=eval_set_pb2.ToolMocks(agents=agents, tools=tools or [], strict=strict))


async def tree_of(it: RunHarness, log: list[event_pb2.AgentEvent]) -> dict[str, invocation_pb2.AgentInvocation]:
    """The last node of each agent of the run's tree."""
    invocation = await it.tree(log)
    return {node.name: node for node in invocation.agents}


def linked(name: str, mode: agent_pb2.LinkMode.ValueType = agent_pb2.LINK_MODE_UNSPECIFIED) -> agent_pb2.AgentLink:
    return agent_pb2.AgentLink(agent=name, link_mode=mode)


ASKS = {"p": [calls(call("call_c", message="go")), "Done."]}
"""`p` calls `c` and answers. `c` itself has no turn: the script fails if it runs."""


async def test_a_mocked_agent_has_a_start_and_an_end_and_nothing_inside(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(**ASKS), llm("p", links=[linked("c")]), llm("c")) as it:
        log = await run(it, case_with(answering("c", "Found.")))
        nodes = await tree_of(it, log)
    c = nodes["c"]
    assert (c.state, c.step_count, c.tree_usage.model_calls, c.mock_index) == (SUCCEEDED, 0, 0, 0)
    assert (c.HasField("mock_index"), nodes["p"].HasField("mock_index")) == (True, False)
    assert [text_of(result) for result in results_of(log)] == ["Found."]
    inside = [event for event in log if event.invocation_id == c.invocation_id]
    assert [event.WhichOneof("payload") for event in inside] == ["sub_agent_started", "sub_agent_completed"]


async def test_an_agent_that_takes_over_or_is_a_member_is_mocked_as_one_that_is_called(tmp_path: Path) -> None:
    turns = script(p=[calls(call("transfer_to_agent", agent_name="c"))])
    over = llm("p", links=[linked("c", agent_pb2.LINK_MODE_TRANSFER)])
    line = agent_pb2.AgentDefinition(
        name="line",
        description="One after the other.",
        sequence=agent_pb2.SequenceAgent(),
        sub_agents=[linked("c"), linked("d")],
    )
    async with open_team(tmp_path, turns, over, llm("c"), llm("d"), line) as it:
        mocks = case_with(answering("c", "Taken over."), answering("d", "Then this."))
        assert answer_of(await run(it, mocks)) == "Taken over."
        assert answer_of(await run(it, mocks, "line")) == "Then this."


async def test_the_first_mock_answers_that_matches_the_caller_and_the_input(tmp_path: Path) -> None:
    @agent(description="Asks c twice.", agents=["c"], name="coder")
    async def coder(ctx: Context, input: str) -> str:
        said = [text_of(await ctx.dispatch("c", text)) for text in ("one", "two")]
        return ", ".join(said)

    match = eval_set_pb2.ValueMatcher(equals_json='"two"')
    mocks = case_with(
        answering("c", "of p", caller="p"), answering("c", "second", input_match=match), answering("c", "any")
    )
    async with open_team(tmp_path, script(), llm("c"), code_agents=[coder]) as it:
        assert answer_of(await run(it, mocks, "coder")) == "any, second"


async def test_an_agent_that_fails_once_and_then_works(tmp_path: Path) -> None:
    again = [calls(call("call_c", message="go")), calls(call("call_c", message="again")), "Done."]
    mocks = case_with(answering("c", "", error="The line is dead.", times=1), answering("c", "Found."))
    members = llm("p", links=[linked("c")]), llm("c")
    (tmp_path / "whole").mkdir()
    async with open_team(tmp_path / "whole", script(p=again), *members) as it:
        origin = await run(it, mocks)
    first, second = results_of(origin)
    assert "The line is dead." in first.error.message
    assert text_of(second) == "Found."
    for through in range(1, len(origin)):
        folder = tmp_path / str(through)
        cut_off(tmp_path / "whole", origin[:through], folder)
        async with open_team(folder, script(p=again), *members) as it:
            await it.runs.recover()
            log = await whole(it, run_of(origin))
        assert [one.HasField("error") for one in results_of(log)] == [True, False], through


async def test_a_tool_that_fails_once_and_then_works(tmp_path: Path) -> None:
    again = [calls(call("look", what="leaf")), calls(call("look", what="leaf")), "Done."]
    dead = failing("look", "The line is dead.")
    dead.times = 1
    mocks = case_with(tools=[dead, mock("look", "red")])
    (tmp_path / "whole").mkdir()
    async with team(tmp_path / "whole", again, broken) as it:
        origin = await run(it, mocks)
    for through in range(1, len(origin)):
        folder = tmp_path / str(through)
        cut_off(tmp_path / "whole", origin[:through], folder)
        async with team(folder, again, broken) as it:
            await it.runs.recover()
            log = await whole(it, run_of(origin))
        assert [one.HasField("error") for one in results_of(log)] == [True, False], through
        starts = [event.tool_started for event in having(log, "tool_started")]
        assert [start.mock_index for start in starts][-1:] == [1]


async def test_a_call_that_a_fork_starts_again_uses_up_one_mock_of_the_fork_over_crashes(tmp_path: Path) -> None:
    again = [calls(call("look", what="leaf")), calls(call("look", what="leaf")), "Done."]
    first = mock("look", "first")
    first.times = 1
    (tmp_path / "whole").mkdir()
    async with team(tmp_path / "whole", again, look) as it:
        origin = await it.start("p")
        start = having(await it.log(origin), "tool_started")[0].sequence
        forked = await it.log(await it.fork(origin, start, case=case_with(tools=[first, mock("look", "then")])))
    for through in range(start + 1, len(forked)):
        folder = tmp_path / str(through)
        cut_off(tmp_path / "whole", forked[:through], folder)
        async with team(folder, again, broken) as it:
            await it.runs.recover()
            log = await whole(it, run_of(forked))
            uses = count_mock_uses([await it.tree(log)])
        assert [text_of(result) for result in results_of(log)] == ["first", "then"], through
        assert uses == MockUses(tools=Counter({0: 1, 1: 1}))


async def test_parallel_calls_use_mocks_up_in_the_order_in_which_they_start(tmp_path: Path) -> None:
    at_once = [calls(*(call("look", what=f"leaf {number}") for number in range(4))), "Done."]
    first = mock("look", "first")
    first.times = 3
    async with team(tmp_path, at_once, broken) as it:
        log = await run(it, case_with(tools=[first, mock("look", "then")]))
    starts = having(log, "tool_started")
    assert [event.tool_started.mock_index for event in starts] == [0, 0, 0, 1]
    assert sorted(text_of(result) for result in results_of(log)) == ["first", "first", "first", "then"]


@pytest.mark.parametrize("strict", [None, True, False])
async def test_an_agent_that_mocks_name_never_runs_itself_unless_they_say_so(
    tmp_path: Path, strict: bool | None
) -> None:
    turns = script(**ASKS, c=["I ran."])
    other = eval_set_pb2.ValueMatcher(equals_json='"other"')
    async with open_team(tmp_path, turns, llm("p", links=[linked("c")]), llm("c")) as it:
        log = await run(it, case_with(answering("c", "Found.", input_match=other), strict=strict))
    (result,) = results_of(log)
    if strict is False:
        assert text_of(result) == "I ran."
        return
    assert result.error.reason == NOT_MOCKED
    assert result.error.message == (
        "The call of the agent 'c' by 'p' with the input \"go\" is answered by no mock of this case, and mocks name "
        "that agent: the agent did not run. Add a mock for the call, or set mocks.strict to false."
    )


async def test_agents_that_no_mock_names_run(tmp_path: Path) -> None:
    turns = script(**ASKS, c=["I ran."])
    async with open_team(tmp_path, turns, llm("p", links=[linked("c")]), llm("c")) as it:
        log = await run(it, case_with(answering("p", "never of the root"), answering("d", "x")))
    assert ([text_of(result) for result in results_of(log)], answer_of(log)) == (["I ran."], "Done.")


async def test_a_mocked_failure_aborts_or_is_handled_as_any(tmp_path: Path) -> None:
    @agent(description="Recovers.", agents=["c"], name="coder")
    async def coder(ctx: Context, input: str) -> str:
        try:
            return text_of(await ctx.dispatch("c", "go"))
        except RunError as error:
            return f"recovered from {error_pb2.ErrorReason.Name(error.reason)}"

    async with open_team(tmp_path, script(), llm("c"), code_agents=[coder]) as it:
        log = await run(it, case_with(answering("c", "", error="Gone.")), "coder")
        nodes = await tree_of(it, log)
    assert answer_of(log) == "recovered from ERROR_REASON_SUB_AGENT_FAILED"
    assert (nodes["c"].state, nodes["c"].error.reason) == (FAILED, error_pb2.ERROR_REASON_INTERNAL)


async def test_a_fork_with_mocks_is_answered_by_those_of_its_origin_in_what_they_share(tmp_path: Path) -> None:
    again = script(p=[calls(call("call_c", message="go")), calls(call("call_c", message="again")), "Done."])
    async with open_team(tmp_path, again, llm("p", links=[linked("c")]), llm("c")) as it:
        origin = await run(it, case_with(answering("b", "never"), answering("c", "Found.")))
        start = having(origin, "sub_agent_started")[0].sequence
        # While the agent is open, at its end, and after the end of its call.
        for after in (start, start + 1, start + 2):
            log = await it.log(await it.fork(run_of(origin), after, case=case_with(answering("c", "Other.", times=1))))
            await check_replay(it, log)
            assert [text_of(result) for result in results_of(log)] == ["Found.", "Other."], after
            assert answer_of(log) == "Done."
            assert count_mock_uses([await it.tree(log)]) == MockUses(agents=Counter({0: 1}))
