"""Linked agents as tools: what they are told and see, what they inherit, and how calls are told apart."""

from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import names
from tests.support.teams import call, calls, llm, open_team, script


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


@pytest.mark.parametrize("arguments", [{}, {"message": ""}, {"message": "  \n"}, {"message": 5}, {"text": "hi"}])
async def test_a_sub_agent_is_not_called_without_a_message(tmp_path: Path, arguments: dict[str, object]) -> None:
    turns = script(p=[calls({"name": "call_c", "arguments": arguments}), "Done."], c=["never"])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert [result.error.reason for result in results_of(log)] == [error_pb2.ERROR_REASON_BAD_ARGUMENTS]
    assert {event.agent for event in log} == {"p"}
    assert answer_of(log) == "Done."


async def test_each_linked_agent_is_one_tool_with_its_description_and_a_message(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    team = (llm("p", links=["c", "d"], tools=["look"]), llm("c"), llm("d"), llm("e"))
    async with open_team(tmp_path, script(p=["Done."]), *team, tools=[look], heard=heard) as harness:
        await harness.turn("p")
    offered = {spec.name: spec for spec in heard[0].tools}
    assert list(offered) == ["look", "call_c", "call_d"]
    assert offered["call_c"].description == "Does what c does."
    assert '"required": ["message"]' in offered["call_c"].input_schema_json


async def test_a_sub_agents_own_schema_is_what_its_caller_must_fill_in(tmp_path: Path) -> None:
    c = llm("c")
    c.input_schema_json = '{"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]}'
    heard: list[ModelRequest] = []
    turns = script(p=[calls(call("call_c", message="hi")), calls(call("call_c", topic="leaves")), "Done."], c=["Red."])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), c, heard=heard) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert [result.error.reason for result in results_of(log)] == [error_pb2.ERROR_REASON_BAD_ARGUMENTS, 0]
    assert text_of(having(log, "sub_agent_started")[0].sub_agent_started.input) == '{"topic": "leaves"}'
    assert next(spec for spec in heard[0].tools).input_schema_json == c.input_schema_json


async def test_two_agents_that_call_each_other_go_on_until_a_model_ends(tmp_path: Path) -> None:
    turns = script(
        a=[
            {"when": "four", "text": "enough"},
            calls(call("call_b", message="two")),
            "a is done",
        ],
        b=[calls(call("call_a", message="four")), "b is done"],
    )
    async with open_team(tmp_path, turns, llm("a", links=["b"]), llm("b", links=["a"])) as harness:
        log = await harness.turn("a", "one")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert [(one.depth, one.name, one.branch) for one in tree.agents] == [
        (0, "a", "a"),
        (1, "b", "a/b"),
        (2, "a", "a/b/a"),
    ]
    assert [list(one.run_path) for one in tree.agents] == [["a"], ["a", "b"], ["a", "b", "a"]]
    assert answer_of(log) == "a is done"


async def test_the_same_child_called_twice_is_two_invocations_on_one_branch(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="one"), call("call_c", message="two")), "Done."], c=["ok"])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    children = tree.agents[1:]
    assert [(one.name, one.branch, one.call_id) for one in children] == [
        ("c", "p/c", "call_0_0"),
        ("c", "p/c", "call_0_1"),
    ]
    assert len({one.invocation_id for one in children}) == 2


async def test_an_empty_model_is_the_callers_and_an_own_one_comes_first(tmp_path: Path) -> None:
    turns = script(
        p=[calls(call("call_c", message="x"), call("call_d", message="x")), "Done."],
        c=[calls(call("call_e", message="x")), "ok"],
        d=["ok"],
        e=["ok"],
    )
    team = (llm("p", links=["c", "d"], model="big"), llm("c", links=["e"]), llm("d", model="small"), llm("e"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("p")
    models = {event.agent: event.llm_started.model for event in having(log, "llm_started")}
    assert models == {"p": "big", "c": "big", "d": "small", "e": "big"}


async def test_a_child_has_its_callers_tools_only_where_it_inherits_them(tmp_path: Path) -> None:
    turns = script(
        p=[calls(call("call_c", message="x"), call("call_d", message="x")), "Done."],
        c=[calls(call("look", what="leaf")), "ok"],
        d=[calls(call("look", what="leaf")), "ok"],
    )
    team = (llm("p", links=["c", "d"], tools=["look"]), llm("c", inherit_tools=True), llm("d"))
    async with open_team(tmp_path, turns, *team, tools=[look]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    results = {result.agent: result for result in results_of(log) if result.call.name == "look"}
    assert text_of(results["c"]) == "leaf is red"
    assert results["d"].error.reason == error_pb2.ERROR_REASON_UNKNOWN_TOOL


async def test_a_providers_call_id_that_comes_twice_in_an_invocation_is_replaced(tmp_path: Path) -> None:
    """Two turns of one script that are one place apart in their lists: the second is again turn 0 of its list."""

    @agent(description="Asks two agents' models in one invocation.", tools=["look"])
    async def asker(ctx: Context, input: message_pb2.Message) -> str:
        for _ in range(2):
            response = await ctx.model(ModelRequest(messages=[input], tools=ctx.offers()))
            await ctx.tools([part.tool_call for part in response.message.parts])
        return "done"

    turns = script(asker=[calls(call("look", what="a"), call("look", what="b"))])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[asker]) as harness:
        log = await harness.turn("asker")
        await check_replay(harness, log)
    made = [event.tool_started.call for event in having(log, "tool_started")]
    assert sorted((one.call_id, one.provider_call_id) for one in made) == [
        ("1.0", "call_0_0"),
        ("1.1", "call_0_1"),
        ("call_0_0", ""),
        ("call_0_1", ""),
    ]
    deltas = {event.llm_tool_call_delta.call_id for event in having(log, "llm_tool_call_delta")}
    assert deltas == {one.call_id for one in made}


async def test_code_that_is_refused_a_child_may_go_on_and_replays(tmp_path: Path) -> None:
    @agent(description="Tries.", agents=["c"])
    async def trier(ctx: Context, input: message_pb2.Message) -> str:
        said = []
        for name in ("stranger", "c"):
            try:
                said.append(text_of(await ctx.dispatch(name, "hello")))
            except RunError as error:
                said.append(error_pb2.ErrorReason.Name(error.reason))
        return ", ".join(said)

    async with open_team(tmp_path, script(c=["c answers"]), llm("c"), code_agents=[trier]) as harness:
        log = await harness.turn("trier")
        await check_replay(harness, log)
    assert answer_of(log) == "ERROR_REASON_NOT_LINKED, c answers"


async def test_code_may_ask_no_model_that_the_configuration_lacks(tmp_path: Path) -> None:
    @agent(description="Asks.")
    async def asker(ctx: Context, input: message_pb2.Message) -> str:
        try:
            await ctx.model(ModelRequest(messages=[input]), model="unknown")
        except RunError as error:
            return error.message
        return "never"

    async with open_team(tmp_path, script(asker=["x"]), code_agents=[asker]) as harness:
        log = await harness.turn("asker")
        await check_replay(harness, log)
    assert names(log) == ["asker: run.started", "asker: llm.failed", "asker: run.completed"]
    assert answer_of(log) == "There is no model 'unknown' in the server's configuration."
    assert log[-1].run_completed.tree_usage.model_calls == 0


async def test_a_child_in_code_is_called_by_a_model_and_its_failure_has_no_stack(tmp_path: Path) -> None:
    @agent(description="Breaks.")
    async def broken(ctx: Context, input: message_pb2.Message) -> str:
        raise KeyError("secret-looking")

    turns = script(p=[calls(call("call_broken", message="go")), "Done."])
    async with open_team(tmp_path, turns, llm("p", links=["broken"]), code_agents=[broken]) as harness:
        log = await harness.turn("p")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert [one.kind for one in tree.agents] == [execution_pb2.AGENT_KIND_LLM, execution_pb2.AGENT_KIND_FUNCTION]
    assert results_of(log)[0].error.message == "The agent 'broken' failed: KeyError: 'secret-looking'"
    assert not any(word in str(log) for word in ("Traceback", "test_sub_agents.py"))


async def test_children_speak_between_the_start_and_the_end_of_their_call(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="x")), "Done."], c=[calls(call("look", what="leaf")), "ok"])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), llm("c", tools=["look"]), tools=[look]) as harness:
        log = await harness.turn("p")
    began = next(event.sequence for event in log if event.agent == "p" and event.HasField("tool_started"))
    ended = next(event.sequence for event in log if event.agent == "p" and event.HasField("tool_completed"))
    assert {began < event.sequence < ended for event in log if event.agent == "c"} == {True}
    assert {event.session_id for event in log} == {log[0].session_id}


@pytest.mark.parametrize("on_agent", [False, True])
async def test_an_agents_own_policy_on_failures_wins_over_the_runs(tmp_path: Path, on_agent: bool) -> None:
    p = llm("p", links=[agent_pb2.AgentLink(agent="c")])
    if on_agent:
        p.on_sub_agent_failure = policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE
    policy = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)
    turns = script(
        p=[calls(call("call_c", message="x")), "Done."], c=[{"text": "x", "error": {"reason": "UNAVAILABLE"}}]
    )
    async with open_team(tmp_path, turns, p, llm("c")) as harness:
        log = await harness.turn("p", policy=policy)
        await check_replay(harness, log)
    assert answer_of(log) == ("Done." if on_agent else "")


@pytest.mark.parametrize(
    "part",
    [
        message_pb2.Part(tool_call=message_pb2.ToolCall(name="look", call_id="c")),
        message_pb2.Part(tool_result=message_pb2.ToolResult(call=message_pb2.ToolCall(name="look", call_id="c"))),
    ],
    ids=lambda part: part.WhichOneof("content"),
)
async def test_code_tells_a_child_no_call_and_no_result(tmp_path: Path, part: message_pb2.Part) -> None:
    @agent(description="Tells what no user is told.", agents=["b"])
    async def lead(ctx: Context, input: message_pb2.Message) -> str:
        told = message_pb2.Message(parts=[message_pb2.Part(text="Go on."), part])
        try:
            await ctx.dispatch("b", told)
        except RunError as error:
            return f"{error_pb2.ErrorReason.Name(error.reason)}: {error.message}"
        return "It was told."

    async with open_team(tmp_path, script(b=["From b."]), llm("b"), code_agents=[lead]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    said = "The message to 'b' contains a tool call or a tool result; write it as text."
    assert answer_of(log) == f"ERROR_REASON_BAD_ARGUMENTS: {said}"
    assert having(log, "sub_agent_started") == []
