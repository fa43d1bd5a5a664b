"""Tools that an agent's code calls itself: effects like a model's calls, but of no step and in no history."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bough import approve, refuse, tool_outcome
from bough.v1 import agent_pb2, error_pb2, execution_pb2, input_pb2, message_pb2, policy_pb2
from bough_server import Context, ModelRequest, RunError, ToolContext, agent, text_of, tool
from bough_server.agents.function import FunctionAgent
from bough_server.identity import Principal
from bough_server.log.session_state import json_of
from bough_server.log.session_state_fold import StateFold
from tests.support.fork_agents import edited, place, run_of
from tests.support.log_readings import answer_of, check_replay, having, results_of
from tests.support.payment_agents import waiting, whole
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, llm, open_team, script


@tool
def look(what: str) -> str:
    """Looks something up."""
    if what == "nothing":
        raise ValueError("there is nothing")
    return f"{what} is red"


@tool
def weigh(what: str) -> dict[str, object]:
    """Weighs something."""
    return {"what": what, "grams": 3}


@tool
async def note(name: str, ctx: ToolContext) -> None:
    """Notes a name."""
    ctx.state["names"] = [*ctx.state.get("names", []), name]


@tool
def raw() -> message_pb2.Part:
    """Says that it is JSON."""
    return message_pb2.Part(data_json="{")


@tool
async def sit() -> str:
    """Sits."""
    await asyncio.Event().wait()
    return "never"


@tool(approval=True)
def pay(amount: int) -> str:
    """Pays."""
    return f"paid {amount}"


@tool(execution="client")
def scan(page: int) -> str:
    """Scans a page in the client."""
    raise AssertionError("the client scans")


TOOLS = [look, weigh, note, raw, sit, pay, scan]


async def reasons(ctx: Context, *made: Callable[[Context], object]) -> str:
    """Makes calls that fail, and returns their reasons."""
    found = []
    for one in made:
        with pytest.raises(RunError) as refused:
            await one(ctx)  # type: ignore[misc]
        found.append(error_pb2.ErrorReason.Name(refused.value.reason).removeprefix("ERROR_REASON_"))
    return ", ".join(found)


async def test_a_call_returns_the_tools_json_else_its_text(tmp_path: Path) -> None:
    @agent(tools=["look", "weigh", "note", "raw"])
    async def p(ctx: Context, input: str) -> str:
        """Calls."""
        made = [await ctx.call_tool("weigh", what="a leaf"), await ctx.call_tool("look", what="a leaf")]
        return json.dumps([*made, await ctx.call_tool("note", name="Anne"), await ctx.call_tool("raw")])

    async with open_team(tmp_path, script(), tools=TOOLS, code_agents=[p]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert json.loads(answer_of(log)) == [{"what": "a leaf", "grams": 3}, "a leaf is red", "", "{"]


async def test_code_knows_whose_run_it_is_and_of_a_fork_who_forked_it(tmp_path: Path) -> None:
    anne = Principal(tenant_id=ME.tenant_id, user_id="anne")

    @tool
    def who(name: str, ctx: ToolContext) -> str:
        """Says for whom it works."""
        return f"{name} is {ctx.tenant_id}/{ctx.user_id}"

    @agent(tools=["who"])
    async def p(ctx: Context, input: str) -> str:
        """Asks the tool."""
        return str(await ctx.call_tool("who", name=f"{ctx.tenant_id}/{ctx.user_id}"))

    async with open_team(tmp_path, script(), tools=[who], code_agents=[p]) as harness:
        log = await harness.turn("p")
        fork = await harness.log(await harness.fork(run_of(log), 1, principal=anne))
        for each in (log, fork):
            await check_replay(harness, each)
    assert [answer_of(each) for each in (log, fork)] == ["local/local is local/local", "local/anne is local/anne"]


async def test_a_call_belongs_to_no_step_and_no_history_shows_it(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []

    @agent(tools=["look"])
    async def p(ctx: Context, input: str) -> str:
        """Calls, and asks its model."""
        await ctx.call_tool("look", what="leaf")
        response = await ctx.model(ModelRequest(messages=ctx.history(), tools=ctx.offers()))
        await ctx.call_tool("look", what="bark")
        await ctx.tools([part.tool_call for part in response.message.parts if part.HasField("tool_call")])
        return str(ctx.step_index)

    turns = script(p=[calls(call("look", what="root"))])
    async with open_team(tmp_path, turns, tools=TOOLS, code_agents=[p], heard=heard) as harness:
        log = await harness.turn("p")
        tree = await harness.tree(log)
        stored = await harness.messages(log[0].session_id)
        await check_replay(harness, log)
    started = having(log, "tool_started")
    assert [(event.effect_key, event.tool_started.call.call_id, event.step_id) for event in started] == [
        ("e0", "e0", ""),
        ("e1", "e1", ""),
        ("s0.t0", "call_0_0", having(log, "llm_started")[0].step_id),
    ]
    assert [text_of(message) for message in heard[0].messages] == [text_of(stored[0].message)]
    (step,) = having(log, "step_completed")
    assert [result.call.call_id for result in step.step_completed.step.tool_results] == ["call_0_0"]
    assert [(one.call_id, one.arguments_json, one.HasField("step_index")) for one in tree.tools] == [
        ("e0", '{"what": "leaf"}', False),
        ("e1", '{"what": "bark"}', False),
        ("call_0_0", '{"what": "root"}', True),
    ]
    assert tree.tree_usage.tool_calls == 3
    assert len(stored) == 4
    assert tree.anomalies == []


async def test_a_failed_or_refused_call_raises_with_the_reason_of_its_result(tmp_path: Path) -> None:
    @agent(
        tools=["look", "exit", agent_pb2.ToolLink(name="weigh", max_calls_per_run=1)],
        agents=["c"],
    )
    async def p(ctx: Context, input: str) -> str:
        """Calls what fails."""
        await ctx.call_tool("weigh", what="a")
        return await reasons(
            ctx,
            lambda ctx: ctx.call_tool("look", what="nothing"),
            lambda ctx: ctx.call_tool("look", which="leaf"),
            lambda ctx: ctx.call_tool("wash"),
            lambda ctx: ctx.call_tool("call_c", message="go"),
            lambda ctx: ctx.call_tool("exit", final_answer="now"),
            lambda ctx: ctx.call_tool("weigh", what="b"),
            lambda ctx: ctx.call_tool("look", what=object()),
            lambda ctx: ctx.call_tool("look", what=float("nan")),
            lambda ctx: ctx.call_tool("look", what="x" * 512 * 1024),
        )

    async with open_team(tmp_path, script(), llm("c"), tools=TOOLS, code_agents=[p]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == (
        "TOOL_FAILED, BAD_ARGUMENTS, UNKNOWN_TOOL, BAD_ARGUMENTS, BAD_ARGUMENTS, LIMIT_EXCEEDED, "
        "BAD_ARGUMENTS, BAD_ARGUMENTS, BAD_ARGUMENTS"
    )
    failed = [result for result in results_of(log) if result.HasField("error")]
    assert [result.call.call_id for result in failed] == ["e1", "e2", "e3", "e4", "e5", "e6"]
    assert "ctx.dispatch('c', ...)" in failed[3].error.message


async def test_calls_count_against_the_limits_of_the_run_and_end_at_the_timeout_of_the_link(tmp_path: Path) -> None:
    slow = agent_pb2.ToolLink(name="sit")
    slow.timeout.FromMilliseconds(20)

    @agent(tools=["look", slow])
    async def p(ctx: Context, input: str) -> str:
        """Calls once too often."""
        return await reasons(ctx, lambda ctx: ctx.call_tool("sit"), lambda ctx: ctx.call_tool("look", what="leaf"))

    async with open_team(tmp_path, script(), tools=TOOLS, code_agents=[p]) as harness:
        run = await harness.start("p", policy=policy_pb2.RunPolicy(limits=policy_pb2.Limits(tool_calls=1)))
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "TOOL_TIMEOUT, LIMIT_EXCEEDED"


@agent(tools=["pay", "scan"])
async def clerk(ctx: Context, input: str) -> str:
    """Pays, and scans."""
    try:
        paid = await ctx.call_tool("pay", amount=7)
    except RunError as error:
        paid = error_pb2.ErrorReason.Name(error.reason)
    return f"{paid}, {await ctx.call_tool('scan', page=1)}"


@pytest.mark.parametrize(
    ("answer", "came_of_it"),
    [
        (lambda request: approve(request, note="fine"), "paid 7"),
        (lambda request: approve(request, arguments_json='{"amount": 8}'), "paid 8"),
        (lambda request: refuse(request, note="no"), "ERROR_REASON_NOT_APPROVED"),
    ],
)
async def test_a_call_waits_for_its_approval_and_for_the_client_as_a_models_call_does(
    tmp_path: Path, answer: Callable[[input_pb2.InputRequest], input_pb2.InputAnswer], came_of_it: str
) -> None:
    async with open_team(tmp_path, script(), tools=TOOLS, code_agents=[clerk]) as harness:
        run = await harness.start("clerk")
        await harness.resume(run, answer((await waiting(harness, run))["pay"]))
        await harness.resume(run, tool_outcome((await waiting(harness, run, 2))["scan"], "page 1 is red"))
        log = await whole(harness, run)
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert answer_of(log) == f"{came_of_it}, page 1 is red"
    asked, scanning = having(log, "input_requested")
    request = asked.input_requested.request
    assert (asked.effect_key, asked.step_id, request.call_id, request.call.call_id) == ("e0.ok", "", "e0", "e0")
    assert (scanning.effect_key, scanning.step_id, scanning.input_requested.request.call_id) == ("e1", "", "e1")
    assert [one.state for one in tree.tools] == [
        execution_pb2.EXECUTION_STATE_FAILED if "NOT" in came_of_it else execution_pb2.EXECUTION_STATE_SUCCEEDED,
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
    ]


async def test_calls_of_lanes_have_ids_of_their_own_and_wait_at_once(tmp_path: Path) -> None:
    async def paid(ctx: Context, amount: int) -> str:
        said: str = await ctx.call_tool("pay", amount=amount)
        return said

    @agent(tools=["pay"])
    async def p(ctx: Context, input: str) -> str:
        """Pays twice at once."""
        return ", ".join(await ctx.map(paid, [7, 8]))

    async with open_team(tmp_path, script(), tools=TOOLS, code_agents=[p]) as harness:
        run = await harness.start("p")
        asked = [
            event.input_requested.request for event in having(await harness.until_interrupted(run), "input_requested")
        ]
        await harness.resume(run, *map(approve, asked))
        log = await harness.log(run)
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert answer_of(log) == "paid 7, paid 8"
    assert sorted(request.call_id for request in asked) == ["e0.0/e0", "e0.1/e0"]
    assert sorted(one.call_id for one in tree.tools) == ["e0.0/e0", "e0.1/e0"]
    assert tree.anomalies == []


async def test_what_a_tool_writes_to_the_state_is_seen_from_its_end_on(tmp_path: Path) -> None:
    @agent(tools=["note", "get_state", "set_state"])
    async def p(ctx: Context, input: str) -> str:
        """Notes names."""
        ctx.state["names"] = ["Bert"]
        await ctx.call_tool("note", name="Anne")
        await ctx.call_tool("set_state", key="last", value="Anne")
        return json.dumps([ctx.state["names"], await ctx.call_tool("get_state", key="last")])

    async with open_team(tmp_path, script(), tools=TOOLS, code_agents=[p]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert json.loads(answer_of(log)) == [["Bert", "Anne"], "Anne"]
    fold = StateFold()
    for event in log:
        fold.apply(event)
    assert json.loads(json_of(fold.values)) == {"last": "Anne", "names": ["Bert", "Anne"]}


def looker() -> FunctionAgent:
    @agent(tools=["look"])
    async def p(ctx: Context, input: str) -> str:
        """Looks three times."""
        found = [await ctx.call_tool("look", what=what) for what in ("leaf", "root")]
        try:
            found.append(await ctx.call_tool("look", which="bark"))
        except RunError as error:
            found.append(error.message)
        return ", ".join(found)

    return p


@pytest.mark.parametrize(
    ("call_id", "answer"),
    [("e0", "blue, root is red, "), ("e1", "leaf is red, blue, "), ("e2", "leaf is red, root is red, blue")],
)
async def test_a_fork_may_edit_the_result_of_a_call_by_code(tmp_path: Path, call_id: str, answer: str) -> None:
    async with open_team(tmp_path, script(), tools=TOOLS, code_agents=[looker()]) as harness:
        origin = await harness.turn("p")
        last = place(origin, "tool_failed")
        fork = await harness.fork(run_of(origin), last, tool_results=[edited("blue", call_id)])
        log = await harness.log(fork)
        await check_replay(harness, log)
    assert answer_of(log).startswith(answer)
    assert names(log)[-1] == "p: run.completed"
