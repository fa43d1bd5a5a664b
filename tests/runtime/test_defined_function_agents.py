"""Agents in code under definitions, and runs whose code or functions are not there any more."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2
from bough.v1.run_pb2 import Run
from bough_server.agents.function import FunctionAgent, agent
from bough_server.functions import Condition, Function, InputBuilder, Rewriter
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.composite_agents import composite
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import Scripts, call, calls, llm, open_team, script


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


def worker(version: str = "7") -> FunctionAgent:
    @agent(name="worker", description="Works.", version=version, tools=["look"])
    async def work(ctx: Context, input: message_pb2.Message) -> str:
        asked = await ctx.model(request(ctx))
        found = await ctx.tools([part.tool_call for part in asked.message.parts if part.HasField("tool_call")])
        links = [link.agent for link in ctx.definition.sub_agents]
        said = [(await ctx.dispatch(link, found[0].result.parts[0].text)).parts[0].text for link in links]
        return f"{ctx.definition.name} of {links}: {' '.join(said)}"

    return work


def request(ctx: Context) -> ModelRequest:
    return ModelRequest(messages=ctx.history(), instruction="", tools=ctx.offers())


def named(name: str, *links: str, code: str = "worker") -> agent_pb2.AgentDefinition:
    """A definition of code."""
    return composite(name, links, function=agent_pb2.FunctionAgent(function=code))


TURNS = script(
    first=[calls(call("look", what="leaf"))],
    second=[calls(call("look", what="bark"))],
    lead=[calls(call("call_first", message="go"), call("call_second", message="go")), "Done."],
    a=["A."],
    b=["B."],
)
TEAM = (llm("lead", links=["first", "second"]), named("first", "a"), named("second", "b", "a"), llm("a"), llm("b"))


async def test_one_piece_of_code_runs_under_several_definitions(tmp_path: Path) -> None:
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], code_agents=[worker()]) as harness:
        log = await harness.turn("lead")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    answers = [one.tool_completed.result.parts[0].text for one in having(log, "tool_completed")]
    assert {"first of ['a']: A.", "second of ['b', 'a']: B. A."} <= set(answers)
    kinds = {one.name: one.kind for one in tree.agents}
    assert (kinds["first"], kinds["second"]) == (execution_pb2.AGENT_KIND_FUNCTION, execution_pb2.AGENT_KIND_FUNCTION)
    assert dict(log[0].run_started.versions.agents) == {"worker": "7"}
    assert set(log[0].run_started.versions.tools) == {"look"}
    assert "worker" not in {ref.name for ref in log[0].run_started.definition_refs}


async def test_code_that_is_named_runs_under_its_own_name_as_well(tmp_path: Path) -> None:
    turns = script(worker=[calls(call("look", what="leaf"))])
    async with open_team(tmp_path, turns, named("first"), tools=[look], code_agents=[worker()]) as harness:
        assert answer_of(await harness.turn("worker")) == "worker of []: "


async def test_what_a_definition_does_not_link_its_code_cannot_run(tmp_path: Path) -> None:
    @agent(agents=["a"])
    async def reaching(ctx: Context, input: message_pb2.Message) -> message_pb2.Message:
        """Reaches for a."""
        return await ctx.dispatch("a", "go")

    team = [named("bare", code="reaching"), llm("a")]
    async with open_team(tmp_path, script(a=["A."]), *team, code_agents=[reaching]) as harness:
        log = await harness.turn("bare")
        await check_replay(harness, log)
        assert answer_of(await harness.turn("reaching")) == "A."
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_NOT_LINKED


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"n": 1}', ""),
        ('{"n": "x"}', "The answer of the agent 'form' does not fit its output schema: n: 'x' is not of type"),
        ("one", "The answer of the agent 'form' does not fit its output schema: it is not JSON"),
        ('{"n": 1, "m": NaN}', "The answer of the agent 'form' does not fit its output schema: it is not JSON"),
        ('{"n": 1, "m": 1e999}', "The answer of the agent 'form' does not fit its output schema: it is not JSON"),
        ('{"n": 1, "m": "\\ud800"}', "The answer of the agent 'form' does not fit its output schema: it is not JSON"),
    ],
)
async def test_an_answer_of_code_fits_the_definitions_schema(tmp_path: Path, answer: str, said: str) -> None:
    @agent
    async def forms(ctx: Context, input: message_pb2.Message) -> str:
        """Fills a form in."""
        return answer

    form = named("form", code="forms")
    form.output_schema_json = '{"type": "object", "properties": {"n": {"type": "integer"}}}'
    async with open_team(tmp_path, script(), form, code_agents=[forms]) as harness:
        log = await harness.turn("form")
        await check_replay(harness, log)
    if said:
        error = log[-1].run_failed.error
        assert (error.message[: len(said)], error.reason) == (said, error_pb2.ERROR_REASON_INVALID_OUTPUT)
    else:
        assert log[-1].run_completed.final_answer.parts[0].data_json == answer


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (message_pb2.Part(data_json="{"), "which is not JSON"),
        (message_pb2.Part(data_json="[NaN]"), "which is not JSON"),
        (message_pb2.Part(tool_call=message_pb2.ToolCall(call_id="1", name="look")), "with a call or a result"),
        (message_pb2.Part(tool_result=message_pb2.ToolResult()), "with a call or a result"),
    ],
)
async def test_an_answer_of_code_is_something_that_can_be_said(
    tmp_path: Path, part: message_pb2.Part, said: str
) -> None:
    @agent
    async def odd(ctx: Context, input: message_pb2.Message) -> message_pb2.Message:
        """Answers oddly."""
        return message_pb2.Message(parts=[message_pb2.Part(text="So: "), part])

    async with open_team(tmp_path, script(), code_agents=[odd]) as harness:
        log = await harness.turn("odd")
        await check_replay(harness, log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_INVALID_OUTPUT
    assert said in error.message


async def test_a_definition_whose_code_answers_with_nothing_that_can_be_said_is_named(tmp_path: Path) -> None:
    @agent
    async def odd(ctx: Context, input: message_pb2.Message) -> str:
        """Answers oddly."""
        return {"not": "an answer"}  # type: ignore[return-value]

    async with open_team(tmp_path, script(), named("coded", code="odd"), code_agents=[odd]) as harness:
        said = [(await harness.turn(name))[-1].run_failed.error.message for name in ("coded", "odd")]
    end = "returned dict; return a str, a Message or an Outcome."
    assert said == [f"The agent 'coded', whose code is 'odd', {end}", f"The agent 'odd' {end}"]


class Held:
    """Holds the model of one agent until it is released."""

    def __init__(self) -> None:
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, agent: str, turn: int, chunk: int) -> None:
        if agent == "a":
            self.reached.set()
            await self.released.wait()


def enough(_: object) -> bool:
    return True


def build(_: object) -> str:
    return "Go on."


def bare(message: message_pb2.Message) -> list[message_pb2.Message]:
    return [message_pb2.Message(parts=[part for part in message.parts if part.text])]


ENOUGH, BUILD, BARE = (
    Condition(name="enough", function=enough),
    InputBuilder(name="build", function=build),
    Rewriter(name="bare", function=bare),
)


def at_work(
    folder: Path, *, version: str = "7", functions: Sequence[Function] = (ENOUGH, BUILD, BARE), gate: Held | None = None
) -> AbstractAsyncContextManager[RunHarness]:
    built = agent_pb2.AgentLink(agent="w", input=agent_pb2.InputBuilder(function="build"))
    until = agent_pb2.LoopUntil(predicate="enough")
    return open_harness(
        folder,
        models=Scripts(script(w=[calls(call("look", what="leaf"))], a=["A."]), gate=gate),
        definitions=[
            composite("lead", [built], loop=agent_pb2.LoopAgent(max_iterations=3, until=until)),
            named("w", "a"),
            llm("a", history_rewriter="bare"),
        ],
        tools=[look],
        code_agents=[worker(version)],
        functions=functions,
    )


async def crashed(folder: Path) -> Run:
    held = Held()
    async with at_work(folder, gate=held) as harness:
        await harness.runs.recover()
        run = await harness.start("lead")
        await held.reached.wait()
        await harness.crash()
    return run


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"version": "8"}, "The run started with version '7' of the agent 'worker', but this server has '8'."),
        (
            {"functions": (BUILD, BARE)},
            "The agent 'lead' names the condition 'enough', which is not configured on this server.",
        ),
        ({"functions": (ENOUGH, BARE)}, "The agent 'lead' names the input builder 'build', which is not configured"),
        (
            {"functions": (ENOUGH, BUILD)},
            "The agent 'a' names the rewriter 'bare', which is not configured on this server.",
        ),
    ],
)
async def test_a_run_whose_code_or_function_is_gone_is_parked_until_it_is_back(
    tmp_path: Path, lacks: dict[str, object], said: str
) -> None:
    run = await crashed(tmp_path)
    async with _lacking(tmp_path, **{"functions": (ENOUGH, BUILD, BARE), **lacks}) as harness:  # type: ignore[arg-type]
        record = await harness.store.runs.find(run.run_id)
        assert record is not None
        await harness.try_again(record)
        row = (await harness.runs.get(ME, run.run_id)).run
    assert (row.state, row.parked_reason[: len(said)]) == (execution_pb2.EXECUTION_STATE_RUNNING, said)
    async with at_work(tmp_path) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "w of ['a']: A."


def _lacking(
    folder: Path, *, version: str = "7", functions: Sequence[Function]
) -> AbstractAsyncContextManager[RunHarness]:
    """A harness that has other agents, as a catalog whose definitions name what is not there does not start."""
    return open_harness(
        folder,
        models=Scripts(script(w=["never"])),
        tools=[look],
        code_agents=[worker(version)],
        functions=functions,
    )
