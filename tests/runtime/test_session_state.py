"""The values of a session in its runs: what code, tools and models write, when others see it, what is recorded."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, invocation_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.log.session_state import MAX_STATE_BYTES
from bough_server.log.session_state_fold import StateFold
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.tools.tool import ToolContext, tool
from tests.support.composite_agents import parallel, sequence
from tests.support.databases import in_each_database
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import call, calls, llm, open_team, script

pytestmark = in_each_database


Message = message_pb2.Message


async def state_of(harness: RunHarness, log: Sequence[event_pb2.AgentEvent]) -> dict[str, object]:
    """What the session has at the end of a run; its log says the same, and is re-executed."""
    await check_replay(harness, log)
    fold = StateFold()
    for event in log:
        fold.apply(event)
    state_json = (await harness.store.sessions.read_position(ME, log[0].session_id)).state_json
    values: dict[str, object] = json.loads(state_json or "{}")
    assert values == {name: json.loads(text) for name, text in fold.values.items()}
    return values


def written(log: Sequence[event_pb2.AgentEvent]) -> list[tuple[str, dict[str, str]]]:
    """What code wrote, by the keys of its records."""
    return [
        (
            event.effect_key,
            {change.key: change.value_json for change in event.session_state_changed.state_changes},
        )
        for event in having(log, "session_state_changed")
    ]


@tool
async def add(amount: int, ctx: ToolContext) -> str:
    """Adds to the number that is kept."""
    ctx.state["n"] = ctx.state.get("n", 0) + amount
    return f"{ctx.state['n']}"


async def test_what_code_writes_is_recorded_with_its_next_effect_or_at_its_end(tmp_path: Path) -> None:
    @agent(description="Writes.")
    async def p(ctx: Context, input: Message) -> str:
        ctx.state["a"], ctx.state["b"] = 1, {"c": [2.5, None]}
        ctx.state["a"] = 2
        seen = dict(ctx.state)
        await ctx.now()
        ctx.state["é" if input.parts[0].text == "never" else "last"] = "x"
        del ctx.state["b"]
        return json.dumps([seen, dict(ctx.state), len(ctx.state), "b" in ctx.state])

    async with open_team(tmp_path, script(), code_agents=[p]) as harness:
        log = await harness.turn("p")
        state = await state_of(harness, log)
    assert json.loads(answer_of(log)) == [{"a": 2, "b": {"c": [2.5, None]}}, {"a": 2, "last": "x"}, 2, False]
    assert written(log) == [("e1", {"a": "2", "b": '{"c":[2.5,null]}'}), ("e2", {"last": '"x"', "b": ""})]
    kinds = [event.WhichOneof("payload") for event in log]
    assert kinds == [
        "run_started",
        "session_state_changed",
        "value_recorded",
        "session_state_changed",
        "run_completed",
    ]
    assert state == {"a": 2, "last": "x"}


async def test_a_change_of_a_value_that_was_read_changes_nothing(tmp_path: Path) -> None:
    @agent(description="Changes what it read.")
    async def p(ctx: Context, input: Message) -> str:
        mine = [1]
        ctx.state["list"] = mine
        mine.append(2)
        ctx.state["list"].append(3)
        await ctx.now()
        ctx.state["list"].append(4)
        return json.dumps(ctx.state["list"])

    async with open_team(tmp_path, script(), code_agents=[p]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"list": [1]}
    assert answer_of(log) == "[1]"


@pytest.mark.parametrize(
    ("name", "value"),
    [("1a", 1), ("", 1), ("a", {1}), ("a", float("nan")), ("a", "\ud800"), ("a", "x" * MAX_STATE_BYTES)],
)
async def test_what_no_state_can_hold_is_refused_where_it_is_written(tmp_path: Path, name: str, value: object) -> None:
    refused: list[RunError] = []

    @agent(description="Writes what it cannot.")
    async def p(ctx: Context, input: Message) -> str:
        try:
            ctx.state[name] = value
        except RunError as error:
            refused.append(error)
        with pytest.raises(KeyError):
            ctx.state["a"]
        with pytest.raises(KeyError):
            del ctx.state["a"]
        return "went on"

    async with open_team(tmp_path, script(), code_agents=[p]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {}
    assert {error.reason for error in refused} == {error_pb2.ERROR_REASON_BAD_ARGUMENTS}
    assert (answer_of(log), having(log, "session_state_changed")) == ("went on", [])


async def test_what_an_agent_writes_right_before_it_fails_is_dropped(tmp_path: Path) -> None:
    @agent(description="Fails.")
    async def p(ctx: Context, input: Message) -> str:
        ctx.state["kept"] = 1
        await ctx.now()
        ctx.state["dropped"] = 2
        raise ValueError("no luck")

    async with open_team(tmp_path, script(), code_agents=[p]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"kept": 1}


async def test_lanes_do_not_see_each_other_and_the_later_one_wins(tmp_path: Path) -> None:
    @agent(description="Writes in lanes.")
    async def p(ctx: Context, input: Message) -> str:
        ctx.state["n"] = 0
        first = asyncio.Event()

        async def lane(own: Context, number: int, *, waits: bool) -> list[object]:
            own.state["n"] += number
            own.state[f"lane{number}"] = True
            await own.now()
            if waits:
                await own.step("wait", first.wait)
            else:
                first.set()
            return sorted(own.state)

        seen = await ctx.gather(lambda own: lane(own, 1, waits=True), lambda own: lane(own, 2, waits=False))
        return json.dumps([seen, ctx.state["n"], sorted(ctx.state)])

    async with open_team(tmp_path, script(), code_agents=[p]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"n": 2, "lane1": True, "lane2": True}
        tree = await harness.tree(log)
    seen, n, names = json.loads(answer_of(log))
    assert seen == [["lane1", "n"], ["lane2", "n"]]
    assert (n, names) == (2, ["lane1", "lane2", "n"])
    said = "The value 'n' of session state was set by several parallel paths; the last in order wins."
    kind = invocation_pb2.ANOMALY_KIND_STATE_CONFLICT
    assert list(tree.anomalies) == [invocation_pb2.Anomaly(kind=kind, message=said)]


async def test_parallel_agents_do_not_see_each_others_writes_and_the_next_agent_sees_all(tmp_path: Path) -> None:
    @agent(description="Adds its letter.", name="a")
    async def a(ctx: Context, input: Message) -> str:
        ctx.state["seen"] = [*ctx.state.get("seen", []), "a"]
        return "a"

    @agent(description="Adds its letter.", name="b")
    async def b(ctx: Context, input: Message) -> str:
        ctx.state["seen"] = [*ctx.state.get("seen", []), "b"]
        return json.dumps(ctx.state["seen"])

    team = [parallel("both", "a", "b"), sequence("p", "a", "both", "b")]
    async with open_team(tmp_path, script(), *team, code_agents=[a, b]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"seen": ["a", "b", "b"]}
    assert answer_of(log) == '["a", "b", "b"]'


@pytest.mark.parametrize("at_once", [True, False])
async def test_calls_of_a_step_see_each_other_only_where_they_run_one_by_one(tmp_path: Path, at_once: bool) -> None:
    turns = [calls(call("add", amount=1), call("add", amount=10)), calls(call("add", amount=100)), "Done."]
    lead = llm("p", tools=["add"], parallel_tools=at_once)
    async with open_team(tmp_path, script(p=turns), lead, tools=[add]) as harness:
        log = await harness.turn("p")
        state = await state_of(harness, log)
        tree = await harness.tree(log)
    assert [text_of(result) for result in results_of(log)] == (["1", "10", "110"] if at_once else ["1", "11", "111"])
    assert state == {"n": 110 if at_once else 111}
    assert len(tree.anomalies) == at_once


async def test_a_tool_that_fails_writes_nothing(tmp_path: Path) -> None:
    @tool
    async def lose(ctx: ToolContext) -> str:
        """Writes, and fails."""
        ctx.state["n"] = 9
        raise ValueError("no luck")

    turns = [calls(call("add", amount=1)), calls(call("lose")), "Done."]
    async with open_team(tmp_path, script(p=turns), llm("p", tools=["add", "lose"]), tools=[add, lose]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"n": 1}


async def test_a_tool_that_was_lost_with_its_server_counts_once(tmp_path: Path) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def add_slowly(ctx: ToolContext) -> str:
        """Adds, and is still going."""
        ctx.state["n"] = ctx.state.get("n", 0) + 1
        began.set()
        await go_on.wait()
        return "added"

    turns = script(p=[calls(call("add", amount=1)), calls(call("add_slowly")), "Done."])
    team = llm("p", tools=["add", "add_slowly"])
    async with open_team(tmp_path, turns, team, tools=[add, add_slowly]) as harness:
        run = await harness.start("p")
        await began.wait()
        await harness.crash()
    go_on.set()
    async with open_team(tmp_path, turns, team, tools=[add, add_slowly]) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        assert await state_of(harness, log) == {"n": 2}
    assert [event.attempt for event in having(log, "tool_started")] == [1, 1, 2]


async def test_what_a_plain_function_writes_in_its_thread_is_kept(tmp_path: Path) -> None:
    @tool
    def note(text: str, ctx: ToolContext) -> str:
        """Keeps a note."""
        ctx.state["notes"] = [*ctx.state.get("notes", []), text]
        return "kept"

    turns = script(p=[calls(call("note", text="a")), calls(call("note", text="b")), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=["note"]), tools=[note]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"notes": ["a", "b"]}


async def test_a_model_reads_and_writes_values_by_tools(tmp_path: Path) -> None:
    turns = [
        calls(call("set_state", key="color", value={"name": "red"}), call("set_state", key="gone", value=1)),
        calls(call("get_state", key="color"), call("get_state"), call("set_state", key="gone", value=None)),
        calls(call("get_state", key="gone"), call("set_state", key="no name", value=1)),
        "Done.",
    ]
    async with open_team(tmp_path, script(p=turns), llm("p", tools=["get_state", "set_state"])) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"color": {"name": "red"}}
    results = results_of(log)
    ordered = sorted(results, key=lambda result: result.call.call_id)
    assert [text_of(result) for result in ordered[:5]] == [
        "Kept.",
        "Kept.",
        '{"name": "red"}',
        '{"color":{"name": "red"},"gone":1}',
        "Kept.",
    ]
    assert [result.error.reason for result in ordered[5:]] == [error_pb2.ERROR_REASON_BAD_ARGUMENTS] * 2
    assert "There is no value 'gone'. There are: color." in ordered[5].error.message


async def test_what_a_model_keeps_stays_the_text_that_it_wrote(tmp_path: Path) -> None:
    order = '{"price": 1.50, "id": 12345678901234567890.5}'
    kept = {"name": "set_state", "arguments_json": f'{{"value": {order}, "key": "order"}}'}
    gone = {"name": "set_state", "arguments_json": '{"key": "gone", "value": null }'}
    turns = [calls(kept, gone), calls(call("get_state", key="order"), call("get_state")), "Done."]
    async with open_team(tmp_path, script(p=turns), llm("p", tools=["get_state", "set_state"])) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
        state_json = (await harness.store.sessions.read_position(ME, log[0].session_id)).state_json
    assert state_json == f'{{"order":{order}}}'
    assert [text_of(result) for result in results_of(log)[2:]] == [order, state_json]


async def test_an_answer_is_kept_under_the_output_key_as_text_or_as_the_json_that_it_is(tmp_path: Path) -> None:
    @agent(description="Says what is kept.")
    async def after(ctx: Context, input: Message) -> str:
        return json.dumps(dict(ctx.state))

    plain, shaped, lead = llm("plain"), llm("shaped"), sequence("p", "plain", "shaped", "after")
    plain.output_key, shaped.output_key, lead.output_key = "draft", "plan", "all"
    shaped.output_schema_json = '{"type":"object"}'
    turns = script(plain=["A text."], shaped=['{"steps": [1, 2]}'])
    async with open_team(tmp_path, turns, plain, shaped, lead, code_agents=[after]) as harness:
        log = await harness.turn("p")
        state = await state_of(harness, log)
    kept = {"draft": "A text.", "plan": {"steps": [1, 2]}}
    assert json.loads(answer_of(log)) == kept
    assert state == {**kept, "all": json.dumps(kept)}


async def test_an_answer_that_is_json_is_kept_as_the_text_that_it_is(tmp_path: Path) -> None:
    shaped = llm("p")
    shaped.output_key, shaped.output_schema_json = "order", '{"type":"object"}'
    said = '{"price": 1.50, "id": 12345678901234567890.5}'
    async with open_team(tmp_path, script(p=[said]), shaped) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
        assert (await harness.store.sessions.read_position(ME, log[0].session_id)).state_json == f'{{"order":{said}}}'


async def test_the_next_run_of_the_session_goes_on_with_what_is_kept(tmp_path: Path) -> None:
    turns = [calls(call("add", amount=1)), "Done."]
    async with open_team(tmp_path, script(p=turns), llm("p", tools=["add"]), tools=[add]) as harness:
        first = await harness.turn("p")
        second = await harness.turn("p", session_id=first[0].session_id)
        assert second[0].run_started.state_json == '{"n":1}'
        assert await state_of(harness, second) == {"n": 2}
        assert await state_of(harness, (third := await harness.turn("p"))) == {"n": 1}
    assert third[0].session_id != first[0].session_id


async def test_a_child_whose_time_is_up_leaves_what_it_had_written_in_its_lanes(tmp_path: Path) -> None:
    clock = HeldClock()
    stuck = asyncio.Event()

    @agent(description="Writes in lanes that never end.")
    async def slow(ctx: Context, input: Message) -> str:
        async def lane(own: Context, number: int) -> None:
            own.state["last"] = number
            own.state[f"lane{number}"] = True
            await own.step("wait", stuck.wait)
            own.state["never"] = True

        await ctx.gather(lambda own: lane(own, 1), lambda own: lane(own, 2))
        return "never"

    link = agent_pb2.AgentLink(agent="slow")
    link.limits.wall_duration.FromSeconds(5)

    @agent(description="Calls it.", agents=[link])
    async def p(ctx: Context, input: Message) -> str:
        with pytest.raises(RunError):
            await ctx.dispatch("slow", "go")
        return json.dumps(dict(ctx.state))

    async with open_team(tmp_path, script(), code_agents=[p, slow], clock=clock) as harness:
        run = await harness.start("p")
        assert await clock.next_sleep() == 5
        written_so_far = 0
        async for event in harness.follow(run):
            written_so_far += event.HasField("session_state_changed")
            if written_so_far == 2:
                break
        clock.advance(5)
        log = await harness.log(run)
        state = await state_of(harness, log)
    assert json.loads(answer_of(log)) == state
    assert state == {"last": 2, "lane1": True, "lane2": True}


async def test_an_abort_leaves_what_siblings_had_written(tmp_path: Path) -> None:
    @agent(description="Fails when its sibling has written.")
    async def failing(ctx: Context, input: Message) -> str:
        raise ValueError("no luck")

    abort = agent_pb2.AgentLink(agent="failing", on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)
    strict = llm("strict", links=[abort], tools=["add"], parallel_tools=False)

    @agent(description="Goes on.", agents=["strict"])
    async def p(ctx: Context, input: Message) -> str:
        with pytest.raises(RunError):
            await ctx.dispatch("strict", "go")
        return json.dumps(dict(ctx.state))

    turns = script(strict=[calls(call("add", amount=1), call("call_failing", message="go"))])
    async with open_team(tmp_path, turns, strict, tools=[add], code_agents=[p, failing]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"n": 1}
    assert answer_of(log) == '{"n": 1}'


async def test_calls_that_code_runs_out_of_order_count_in_the_order_of_the_answer(tmp_path: Path) -> None:
    @agent(description="Runs the second call first.", tools=["add"])
    async def p(ctx: Context, input: Message) -> str:
        heard = await ctx.model(ModelRequest(messages=ctx.history(), tools=ctx.offers()))
        first, second = [part.tool_call for part in heard.message.parts if part.HasField("tool_call")]
        await ctx.tools([second])
        if input.parts[0].text == "between":
            ctx.state["between"] = True
        await ctx.tools([first])
        return str(ctx.state["n"])

    turns = script(p=[calls(call("add", amount=1), call("add", amount=10))] * 2)
    async with open_team(tmp_path, turns, tools=[add], code_agents=[p]) as harness:
        log = await harness.turn("p")
        assert await state_of(harness, log) == {"n": 10}
        between = await harness.turn("p", "between")
        assert await state_of(harness, between) == {"n": 11, "between": True}
    assert (answer_of(log), answer_of(between)) == ("10", "11")
