"""What `@agent` makes of a coroutine: what its code gets, and what it may return."""

from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2
from bough_server import Context, Message, Outcome, Part, agent, text_of
from bough_server.agents.function import FunctionAgent
from bough_server.runtime.agent import Agent
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import llm, open_team, script

TEXTS = Message(parts=[Part(text="one "), Part(text="two")])
MIXED = Message(parts=[Part(text="one"), Part(data_json="1")])


def telling(input: Message) -> FunctionAgent:
    @agent(agents=["p"])
    async def lead(ctx: Context, input_of_run: str) -> Message:
        """Tells another agent something."""
        return await ctx.dispatch("p", input)

    return lead


@agent(name="p")
async def of_text(ctx: Context, input: str) -> str:
    """Repeats a text."""
    assert type(input) is str
    return f"I heard: {input}"


@agent(name="p")
async def of_text_postponed(ctx: Context, input: "str") -> str:
    """Repeats a text."""
    assert type(input) is str
    return f"I heard: {input}"


@agent(name="p")
async def of_messages(ctx: Context, input: Message) -> Message:
    """Repeats a message."""
    return Message(parts=input.parts)


@pytest.mark.parametrize("code", [of_text, of_text_postponed])
async def test_an_input_annotated_as_text_is_the_text_of_the_message(tmp_path: Path, code: FunctionAgent) -> None:
    async with open_team(tmp_path, script(), code_agents=[telling(TEXTS), code]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert answer_of(log) == "I heard: one two"


async def test_text_alone_fits_an_input_annotated_as_text(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(), code_agents=[telling(MIXED), of_text]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    (failed,) = having(log, "sub_agent_failed")
    assert failed.sub_agent_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert failed.sub_agent_failed.error.message == (
        "The agent 'p' takes text alone, and its input has a part of data_json. Annotate its input as Message to take "
        "any."
    )


async def test_any_other_input_is_the_message(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(), code_agents=[telling(MIXED), of_messages]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert list(log[-1].run_completed.final_answer.parts) == list(MIXED.parts)


async def test_code_may_change_its_copy_of_the_definition(tmp_path: Path) -> None:
    @agent(name="p", agents=["c"])
    async def careless(ctx: Context, input: str) -> str:
        """Changes what it is given."""
        ctx.definition.sub_agents.clear()
        ctx.definition.name = "other"
        await ctx.dispatch("c", "go")
        return ctx.definition.name

    before = careless.definition.SerializeToString()
    async with open_team(tmp_path, script(c=["Yes."]), llm("c"), code_agents=[careless]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == "p"
    assert careless.definition.SerializeToString() == before


def flow(name: str, kind: str, *links: str) -> agent_pb2.AgentDefinition:
    definition = agent_pb2.AgentDefinition(name=name, description="A flow.")
    definition.sub_agents.extend(agent_pb2.AgentLink(agent=link) for link in links)
    if kind == "loop":
        definition.loop.max_iterations = 3
    else:
        definition.sequence.SetInParent()
    return definition


def returning(outcome: Outcome) -> Agent:
    @agent(name="p")
    async def ends(ctx: Context, input: str) -> Outcome:
        """Ends more than itself."""
        return outcome

    return ends


async def test_an_exit_ends_every_agent_above(tmp_path: Path) -> None:
    team = (flow("outer", "sequence", "inner", "never"), flow("inner", "sequence", "p", "never"), llm("never"))
    async with open_team(tmp_path, script(), *team, code_agents=[returning(Outcome.exit("That is all."))]) as harness:
        log = await harness.turn("outer")
        await check_replay(harness, log)
    assert answer_of(log) == "That is all."
    assert log[-1].run_completed.end_reason == execution_pb2.END_REASON_EXITED
    assert [event.agent for event in having(log, "sub_agent_started")] == ["inner", "p"]


@pytest.mark.parametrize(
    ("outcome", "says"),
    [(Outcome.break_loop(), []), (Outcome.break_loop("Good enough."), ["Good enough."])],
)
async def test_a_break_ends_the_loop_with_the_answer_before(tmp_path: Path, outcome: Outcome, says: list[str]) -> None:
    team = (flow("loop", "loop", "writer", "p"), llm("writer"))
    async with open_team(tmp_path, script(writer=["A draft."]), *team, code_agents=[returning(outcome)]) as harness:
        log = await harness.turn("loop")
        stored = await harness.messages(log[0].session_id)
        await check_replay(harness, log)
    assert answer_of(log) == "A draft."
    assert [text_of(one.message) for one in stored[1:]] == ["A draft.", *says, "A draft."]


async def test_a_transfer_runs_another_member_with_its_message(tmp_path: Path) -> None:
    swarm = agent_pb2.AgentDefinition(name="swarm", description="A swarm.")
    swarm.sub_agents.extend([agent_pb2.AgentLink(agent="p"), agent_pb2.AgentLink(agent="b")])
    swarm.swarm.entry_agent = "p"
    code = returning(Outcome.transfer("b", "Pay it back."))
    async with open_team(tmp_path, script(b=["Done."]), swarm, llm("b"), code_agents=[code]) as harness:
        log = await harness.turn("swarm")
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert having(log, "sub_agent_started")[-1].sub_agent_started.input.parts[0].text == "Pay it back."
