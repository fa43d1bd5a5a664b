"""Graphs: when nodes run, what they get, how values are merged and routed, and how graphs end and fail."""

import json
from pathlib import Path
from typing import Any

from bough.v1 import agent_pb2, execution_pb2, input_pb2
from bough_server import Context, RunError, Snapshot, Update, handler, node, router, tool
from bough_server.agents.function import agent
from bough_server.models.model import ModelRequest
from tests.support.composite_agents import sequence
from tests.support.graph_runs import echo, error_of, giving, run_of, visits
from tests.support.graphs import graph
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import call, calls, llm, open_team, script


async def test_the_first_value_at_end_ends_a_graph_unless_end_waits_for_all(tmp_path: Path) -> None:
    text = """
    graph:
      nodes: [{name: one, function: one}, {name: two, function: two}]
      edges: [[START, one, two, END], [one, END]]
      end_join: %s
    """
    functions = giving("one", {"a": 1}), giving("two", {"b": 2})
    first, both = [await run_of(tmp_path / join, text % join, *functions) for join in ("ANY", "ALL")]
    assert (answer_of(first), visits(first)) == ('{"a":1}', [("one", 0, ["START"])])
    assert (answer_of(both), visits(both)) == ('{"a":1,"b":2}', [("one", 0, ["START"]), ("two", 1, ["one"])])


async def test_a_dag_merges_what_all_its_ways_bring_and_refuses_a_key_in_two_of_them(tmp_path: Path) -> None:
    text = """
    input_schema: {type: object, properties: {q: {type: string}}, required: [q]}
    graph:
      mode: DAG
      nodes: [{name: one, function: one}, {name: two, function: join_all}]
      edges: [[START, one, two, END], [START, two]]
    """
    log = await run_of(tmp_path / "1", text, giving("one", {"a": 1}), said='{"q": "x"}')
    assert answer_of(log) == '{"q": "x", "a": 1}'
    log = await run_of(tmp_path / "2", text, giving("one", {"q": 1}), said='{"q": "x"}')
    assert error_of(log) == (
        "TYPE_MISMATCH",
        "two: 'two' got the key 'q' of both 'START' and 'one'. Give 'two' an `input`.",
    )


async def test_a_node_that_waits_for_all_runs_once_and_one_that_does_not_twice(tmp_path: Path) -> None:
    text = """
    graph:
      end_join: ALL
      nodes:
        - {name: a, function: echo}
        - {name: b, function: echo}
        - {name: b2, function: echo}
        - {name: c, function: echo}
        - {name: d, %s function: echo, input: [{value: 1}]}
      edges: [[START, a, b, b2, d, END], [a, c, d]]
    """
    twice, once = [await run_of(tmp_path / str(n), text % join) for n, join in enumerate(["", "join: ALL,"])]
    assert [each for each in visits(twice) if each[0] == "d"] == [("d", 2, ["c"]), ("d", 3, ["b2"])]
    assert [each for each in visits(once) if each[0] == "d"] == [("d", 3, ["c", "b2"])]


async def test_a_join_whose_branch_was_skipped_runs_with_what_came(tmp_path: Path) -> None:
    text = """
    graph:
      nodes:
        - {name: a, function: echo}
        - {name: b, function: echo}
        - {name: c, join: ALL, function: echo}
      edges: [[a, c, END], [b, c]]
      branches: [{source: START, path: "", cases: {left: a}, otherwise: b}]
    """
    log = await run_of(tmp_path, text, said="left")
    assert visits(log) == [("a", 0, ["START"]), ("c", 1, ["a"])]
    assert answer_of(log) == "left"


async def test_a_join_that_leads_to_itself_does_not_wait_for_itself(tmp_path: Path) -> None:
    @router(name="once")
    def once(output: Any, snapshot: Snapshot) -> str:
        return "END" if snapshot.visit == 1 else "n"

    text = """
    graph:
      max_supersteps: 9
      nodes:
        - {name: a, function: echo}
        - {name: n, function: echo, join: ALL, input: a}
        - {name: x, function: echo}
        - {name: y, function: y}
      edges: [[START, a, n], [START, x, y, a]]
      branches: [{source: n, function: once, targets: [n, END]}]
    """
    log = await run_of(tmp_path, text, once, giving("y", "second"))
    assert [each for each in visits(log) if each[0] == "n"] == [("n", 1, ["a"]), ("n", 3, ["n", "a"])]


async def test_cases_are_equal_as_json_is_and_a_router_changes_nothing_that_others_get(tmp_path: Path) -> None:
    @router(name="spoils")
    def spoil(output: Any, snapshot: Snapshot) -> str:
        output["a"] = "spoiled"
        return "b"

    text = """
    graph:
      nodes: [{name: s, function: s}, {name: b, function: echo}, {name: c}]
      edges: [[b, END], [c, END]]
      branches:
        - {source: START, path: "", otherwise: s, cases: {x: c}}
        - {source: s, function: spoils, targets: [b]}
        - {source: b, path: "", cases: [{value: {a: [1]}, target: END}]}
    """
    assert answer_of(await run_of(tmp_path, text, giving("s", {"a": [1.0]}), spoil)) == '{"a":[1.0]}'


async def test_two_branches_of_a_node_choose_independently_and_no_choice_is_no_route(tmp_path: Path) -> None:
    text = """
    graph:
      nodes: [{name: s, function: s}, {name: one, function: echo}, {name: two, function: echo}, {name: three}]
      end_join: ALL
      edges: [[START, s], [one, END], [two, END], [three, END]]
      branches:
        - {source: s, path: x, cases: [{value: 1, target: one}, {value: 2, target: two}]}
        - {source: s, path: y, cases: [{value: 2, target: two}, {value: 3, target: three}]}
      output: s
    """
    log = await run_of(tmp_path / "1", text, giving("s", {"x": [1, 2], "y": 2}))
    assert visits(log) == [("s", 0, ["START"]), ("one", 1, ["s"]), ("two", 1, ["s"])]
    log = await run_of(tmp_path / "2", text, giving("s", {"x": 1, "y": 1}))
    assert error_of(log) == (
        "NO_ROUTE",
        "s: No case of its branch fits 1 at y; they are 2, 3. Add the case, or `otherwise`.",
    )
    dead = "graph: {nodes: [{name: s}, {name: t}], edges: [[START, s], [t, END]], branches: [{source: START, path: '',"
    log = await run_of(tmp_path / "3", dead + " cases: {go: t}, otherwise: s}]}")
    assert error_of(log) == (
        "NO_ROUTE",
        "s ended, and nothing leads on to END: no edge or branch delivered a value.",
    )


CHANNEL = """
graph:
  channels: [{name: log, %s}]
  nodes:
    - {name: b, function: b, writes: [{channel: log}]}
    - {name: a, agent: slow, writes: [{channel: log}]}
    - {name: end, join: ALL, input: {log: channels.log}}
  edges: [[START, a, end, END], [START, b, end]]
sub_agents: [slow]
"""


async def test_writes_of_one_superstep_are_merged_in_the_order_of_the_nodes_or_refused(tmp_path: Path) -> None:
    @agent
    async def slow(ctx: Context, input: str) -> str:
        """Answers after the other one."""
        for _ in range(3):
            await ctx.now()
        return "a"

    team = {"code_agents": [slow]}
    appended = await run_of(tmp_path / "1", CHANNEL % "reducer: APPEND", giving("b", "b"), **team)
    ends = [event.node_completed.node for event in having(appended, "node_completed")]
    assert (answer_of(appended), ends) == ('{"log":["a","b"]}', ["b", "a", "end"])
    replaced = await run_of(tmp_path / "2", CHANNEL % "reducer: REPLACE", giving("b", "b"), **team)
    assert error_of(replaced) == (
        "CHANNEL_CONFLICT",
        "The nodes 'a', 'b' replaced the value of the channel 'log' in one superstep. Give the channel another "
        "reducer, or let them run one after another.",
    )


async def test_a_graph_in_a_node_has_channels_of_its_own_and_its_failure_names_the_way(tmp_path: Path) -> None:
    inner = graph(
        """
        name: inner
        graph:
          channels: [{name: log, reducer: APPEND}]
          nodes: [{name: deep, function: fail, before: seen}]
          edges: [[START, deep, END]]
        """
    )
    outer = """
    graph:
      channels: [{name: log, reducer: APPEND}]
      nodes: [{name: first, function: echo, writes: [{channel: log}]}, {name: outer, agent: inner}]
      edges: [[START, first, outer, END]]
    sub_agents: [inner]
    """
    seen: list[object] = []

    @handler(name="seen")
    def see(value: Any, snapshot: Snapshot) -> Any:
        seen.append(dict(snapshot.channels))
        return value

    log = await run_of(tmp_path, outer, see, definitions=[inner])
    assert error_of(log) == ("SUB_AGENT_FAILED", "outer/deep: The function 'fail' failed: ValueError: no")
    assert seen[0] == {"log": []}
    (child,) = having(log, "sub_agent_started")
    assert (child.sub_agent_started.node, child.sub_agent_started.trigger) == (
        "outer",
        execution_pb2.INVOCATION_TRIGGER_GRAPH_NODE,
    )


async def test_max_supersteps_names_what_would_have_run_next(tmp_path: Path) -> None:
    text = "graph: {max_supersteps: 1, nodes: [{name: a}, {name: b}], edges: [[START, a, b, END]]}"
    log = await run_of(tmp_path, text)
    assert error_of(log) == (
        "LIMIT_EXCEEDED",
        "1 supersteps ran without an end: max_supersteps is reached. Next were b.",
    )


async def test_a_wrong_value_of_an_unknown_type_is_refused_when_it_arrives(tmp_path: Path) -> None:
    @node
    def add(value: int) -> int:
        return value + 1

    text = "graph: {nodes: [{name: any, function: any}, {name: add, function: add}], edges: [[START, any, add, END]]}"
    log = await run_of(tmp_path / "1", text, giving("any", 1), add)
    assert answer_of(log) == "2"
    log = await run_of(tmp_path / "2", text, giving("any", "x"), add)
    assert error_of(log) == ("TYPE_MISMATCH", "add: any -> add: 'x' is not of type 'integer'.")


async def test_what_another_agent_answers_after_a_transfer_is_checked_when_it_arrives(tmp_path: Path) -> None:
    @node
    def shout(value: str) -> str:
        return value.upper()

    text = """
    graph: {nodes: [{name: n, agent: first}, {name: shout, function: shout}], edges: [[START, n, shout, END]]}
    sub_agents: [first]
    """
    second = llm("second")
    second.output_schema_json = '{"type": "object"}'
    link = agent_pb2.AgentLink(agent="second", link_mode=agent_pb2.LINK_MODE_TRANSFER)
    first = llm("first")
    first.sub_agents.append(link)
    turns = script(first=[calls(call("transfer_to_agent", agent_name="second"))], second=['{"k": 1}'])
    log = await run_of(tmp_path, text, shout, turns=turns, definitions=[first, second])
    assert error_of(log) == ("TYPE_MISMATCH", "shout: n -> shout: {'k': 1} is not of type 'string'.")


async def test_a_failure_is_handled_beside_a_sibling_and_leaves_it_running(tmp_path: Path) -> None:
    text = """
    graph:
      on_failure: FAIL_FAST
      nodes:
        - {name: bad, function: fail, error_target: caught}
        - {name: caught, function: echo}
        - {name: good, agent: a}
        - {name: end, join: ALL, input: {good: good, caught: caught}}
      edges: [[START, bad, end, END], [START, good, end], [caught, end]]
    sub_agents: [a]
    """
    log = await run_of(tmp_path, text, turns=script(a=["fine"]), definitions=[llm("a")])
    caught = {
        "node": "bad",
        "reason": "NODE_FAILED",
        "message": "The function 'fail' failed: ValueError: no",
        "retryable": False,
        "details": None,
    }
    assert json.loads(answer_of(log)) == {"good": "fine", "caught": caught}


async def test_mapped_items_that_ask_are_answered_one_by_one_and_run_once(tmp_path: Path) -> None:
    asked: list[str] = []

    @node(name="ask")
    async def ask(ctx: Context, value: str) -> str:
        asked.append(value)
        return f"{value}: {await ctx.ask(f'What of {value}?')}"

    text = """
    graph:
      mode: DAG
      nodes: [{name: items, function: ask, map: true, input: [{value: [x, y, z]}]}]
      edges: [[START, items, END]]
    """
    async with open_team(tmp_path, script(), graph(text), functions=[ask]) as harness:
        run = await harness.start("lead")
        for name in ("y", "z", "x"):
            open_requests = (await harness.until_interrupted(run))[-1].run_interrupted.requests
            request = next(each for each in open_requests if f"of {name}?" in each.prompt)
            answer = input_pb2.InputAnswer(input_id=request.input_id, value_json=json.dumps(name.upper()))
            await harness.resume(run, answer)
        log = [event async for event in harness.follow(run)]
        await check_replay(harness, log)
    assert json.loads(answer_of(log)) == ["x: X", "y: Y", "z: Z"]
    ends = [event.node_completed for event in having(log, "node_completed")]
    assert [end.item if end.HasField("item") else "all" for end in ends] == [1, 2, 0, "all"]


async def test_agents_in_nodes_remember_the_conversation_unless_their_scope_is_none(tmp_path: Path) -> None:
    text = "{graph: {nodes: [{name: n, agent: %s}], edges: [[START, n, END]]}, sub_agents: [%s]}"
    heard: list[ModelRequest] = []
    turns = script(a=["I see."])
    for scope, expected in (("", ["My name is Ada.", "I see.", "Who am I?"]), ("NONE", ["Who am I?"])):
        link = f"{{agent: a, history: {{scope: {scope}}}}}" if scope else "a"
        async with open_team(
            tmp_path / f"t{scope}", turns, graph(text % ("a", link)), llm("a"), heard=heard
        ) as harness:
            run = await harness.start("lead", "My name is Ada.")
            assert [event async for event in harness.follow(run)]
            heard.clear()
            await harness.turn("lead", "Who am I?", session_id=run.session_id)
        told = ["".join(part.text for part in message.parts) for message in heard[0].messages]
        assert [text for text in told if not text.startswith("For context")] == expected


async def test_an_agent_that_is_visited_again_with_the_graph_s_input_hears_it_again(tmp_path: Path) -> None:
    @router(name="twice")
    def twice(output: Any, snapshot: Snapshot) -> str:
        return "END" if snapshot.visit == 1 else "n"

    heard: list[ModelRequest] = []
    text = """
    graph:
      max_supersteps: 9
      nodes: [{name: n, agent: a, input: START}]
      edges: [[START, n]]
      branches: [{source: n, function: twice, targets: [n, END]}]
    sub_agents: [a]
    """
    await run_of(tmp_path, text, twice, turns=script(a=["one", "two"]), definitions=[llm("a")], heard=heard)
    told = [[part.text for message in request.messages for part in message.parts] for request in heard]
    assert told == [["Go."], ["Go.", "one", "Go."]]


@handler
def remember(value: Any, snapshot: Snapshot) -> Update:
    said = [{"role": "ROLE_USER", "parts": [{"text": value}]}]
    return Update([*snapshot.channels["talk"], *said], {"talk": said})


@handler
def keep(value: Any, snapshot: Snapshot) -> Update:
    return Update(value, {"talk": [{"role": "ROLE_ASSISTANT", "parts": [{"text": value}]}]})


@router
def thrice(output: Any, snapshot: Snapshot) -> str:
    return "END" if snapshot.visit == 2 else "think"


async def test_a_history_by_handlers_has_each_message_once(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    text = """
    graph:
      max_supersteps: 9
      channels: [{name: talk, schema: {type: array}, reducer: EXTEND}]
      nodes: [{name: think, model: {}, before: remember, after: keep}]
      edges: [[START, think]]
      branches: [{source: think, function: thrice, targets: [think, END]}]
    """
    turns = script(
        lead=[{"when": when, "text": text} for when, text in (("Go", "one"), ("one", "two"), ("two", "three"))]
    )
    log = await run_of(tmp_path, text, remember, keep, thrice, turns=turns, heard=heard)
    told = [["".join(part.text for part in message.parts) for message in request.messages] for request in heard]
    assert told == [["Go."], ["Go.", "one", "one"], ["Go.", "one", "one", "two", "two"]]
    assert answer_of(log) == "three"
    assert not having(log, "sub_agent_started")


async def test_a_function_with_a_context_calls_only_the_tools_that_it_names(tmp_path: Path) -> None:
    @tool
    def look(what: str) -> str:
        """Looks."""
        return f"{what} is red"

    @node(tools=["look"])
    async def use(ctx: Context, value: str) -> list[str]:
        ctx.state["seen"] = value
        offered = [spec.name for spec in ctx.offers()]
        try:
            await ctx.call_tool("set_state", key="k", value=1)
        except RunError as error:
            return [str(await ctx.call_tool("look", what=value)), error.reason_name, *offered]
        return []

    @node(tools=["look"])
    async def use_beside(ctx: Context, value: str) -> list[list[str]]:
        return await ctx.map(use.function, [value])

    text = """
    graph:
      nodes: [{name: n, function: %s}, {name: t, tool: set_state, input: {key: START, value: n}}]
      edges: [[START, n, END], [n, t]]
    """
    for name in ("use", "use_beside"):
        log = await run_of(tmp_path / name, text % name, use, use_beside, tools=[look], said="leaf")
        used = json.loads(answer_of(log))
        assert (used if name == "use" else used[0]) == ["leaf is red", "UNKNOWN_TOOL", "look"]


async def test_an_exit_in_a_node_ends_the_graph_and_what_is_above_it(tmp_path: Path) -> None:
    text = """
    graph:
      nodes: [{name: a, agent: quitter}, {name: b, function: echo}, {name: never}]
      edges: [[START, a, never, END], [START, b, never]]
    sub_agents: [quitter]
    """
    turns = script(quitter=[calls(call("exit", final_answer="Enough."))], after=["never"])
    team = [sequence("top", "lead", "after"), llm("quitter", tools=["exit"]), llm("after")]
    async with open_team(tmp_path, turns, graph(text), *team, functions=[echo]) as harness:
        log = await harness.turn("top")
        await check_replay(harness, log)
    assert answer_of(log) == "Enough."
    assert {event.agent for event in having(log, "sub_agent_started")} == {"lead", "quitter"}


async def test_the_answer_of_an_agent_that_reaches_end_unchanged_is_its_own(tmp_path: Path) -> None:
    text = "{graph: {nodes: [{name: n, agent: a}], edges: [[START, n, END]]}, sub_agents: [a]}"
    log = await run_of(tmp_path, text, turns=script(a=["mine"]), definitions=[llm("a")])
    answer = log[-1].run_completed.final_answer
    assert (answer.author, answer.parts[0].text) == ("a", "mine")


async def test_a_model_node_is_asked_again_for_an_answer_that_does_not_fit(tmp_path: Path) -> None:
    text = """
    graph:
      nodes:
        - name: judge
          model: {prompt: "Judge {{input.draft}} of {{state.who?}}.", instruction: Be strict.}
          input: {draft: START}
          output_schema: {type: object, properties: {ok: {type: boolean}}, required: [ok]}
      edges: [[START, judge, END]]
    """
    heard: list[ModelRequest] = []
    log = await run_of(tmp_path, text, turns=script(lead=["no", '{"ok": true}']), heard=heard, said="It")
    assert (answer_of(log), len(heard)) == ('{"ok":true}', 2)
    assert [part.text for part in heard[0].messages[0].parts] == ["Judge It of ."]
    assert [event.step_index for event in having(log, "step_completed")] == [0, 1]


async def test_an_ask_node_that_expires_gives_its_default(tmp_path: Path) -> None:
    text = """
    graph:
      mode: DAG
      nodes:
        - name: sure
          ask: {prompt: "Sure of {{input}}?", expires: 1ms, default: false}
          output_schema: {type: boolean}
      edges: [[START, sure, END]]
    """
    assert answer_of(await run_of(tmp_path, text)) == "false"


async def test_the_tree_has_the_agents_of_nodes_and_the_calls_are_the_graph_s(tmp_path: Path) -> None:
    @tool
    def look(what: str) -> str:
        """Looks."""
        return f"{what} is red"

    text = """
    graph:
      nodes: [{name: seek, tool: look, input: {what: START}}, {name: tell, agent: a, input: seek}]
      edges: [[START, seek, tell, END]]
    sub_agents: [a]
    """
    async with open_team(tmp_path, script(a=["Red."]), graph(text), llm("a"), tools=[look]) as harness:
        tree = await harness.tree(await harness.turn("lead", "leaf"))
    assert [(one.name, one.node, one.depth) for one in tree.agents] == [("lead", "", 0), ("a", "tell", 1)]
    assert [(one.name, one.agent, one.call_id, one.step_id) for one in tree.tools] == [("look", "lead", "n0.0/e0", "")]
    assert tree.anomalies == []
