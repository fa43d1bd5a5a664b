"""What children are told by templates and functions: of every kind of caller, and what becomes of errors."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.functions import Snapshot, input_builder
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.composite_agents import loop, parallel, plan_execute, sequence, supervisor, swarm
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.teams import call, calls, llm, open_team, script

BLIND = agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_NONE)


def link(name: str, template: str = "", *, function: str = "", **fields: object) -> agent_pb2.AgentLink:
    """A link whose input is built."""
    builder = agent_pb2.InputBuilder(function=function) if function else agent_pb2.InputBuilder(template=template)
    return agent_pb2.AgentLink(agent=name, input=builder, **fields)  # type: ignore[arg-type]


def told(log: Sequence[event_pb2.AgentEvent]) -> list[tuple[str, str]]:
    """Whom was told what, in the order of the starts."""
    return [(event.agent, text_of(event.sub_agent_started.input)) for event in having(log, "sub_agent_started")]


def failed_result(log: Sequence[event_pb2.AgentEvent]) -> tuple[str, str]:
    error = next(iter(having(log, "tool_failed"))).tool_failed.result.error
    return error.message, error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


async def test_a_child_of_a_sequence_is_told_what_its_template_makes_and_that_is_stored(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    team = sequence(
        "s", "a", link("b", "Check: {{user}} / {{input}} / {{state.draft}} / {{state.score?}}", history=BLIND)
    )
    writer = llm("a")
    writer.output_key = "draft"
    async with open_team(tmp_path, script(a=["From a."], b=["Fine."]), team, writer, llm("b"), heard=heard) as harness:
        log = await harness.turn("s", "Go.")
        await check_replay(harness, log)
        stored = await harness.messages(log[0].session_id)
    assert told(log) == [("a", "Go."), ("b", "Check: Go. / Go. / From a. / ")]
    begun = next(event for event in having(log, "sub_agent_started") if event.agent == "b").sub_agent_started.input
    assert (begun.kind, begun.role, begun.author) == (
        message_pb2.MESSAGE_KIND_SUB_AGENT_USER,
        message_pb2.ROLE_USER,
        "s",
    )
    assert [text_of(one) for one in heard[-1].messages] == ["Check: Go. / Go. / From a. / "]
    assert "Check: Go. / Go. / From a. / " in [text_of(one.message) for one in stored]


async def test_a_history_in_a_template_is_what_the_caller_sees(tmp_path: Path) -> None:
    team = sequence("s", "a", link("b", "{{history}}", history=BLIND))
    async with open_team(tmp_path, script(a=["From a."], b=["Fine."]), team, llm("a"), llm("b")) as harness:
        log = await harness.turn("s", "Go.")
        await check_replay(harness, log)
    assert told(log)[-1] == ("b", "[user] said: Go..\n[a] said: From a..")


async def test_a_call_of_a_model_is_the_message_of_its_builder(tmp_path: Path) -> None:
    seen: list[Snapshot] = []

    @input_builder
    def build(snapshot: Snapshot) -> str:
        seen.append(snapshot)
        assert [text_of(one) for one in snapshot.history] == ["Go.", "Both."]
        return f"{snapshot.agent}: {text_of(snapshot.message or message_pb2.Message())}"

    lead = llm("lead", links=[link("a", function="build"), link("b", "<{{message}}>")])
    turns = script(
        lead=[calls(call("call_a", message="one"), call("call_b", message="two"), text="Both."), "Done."],
        a=["A."],
        b=["B."],
    )
    async with open_team(tmp_path, turns, lead, llm("a"), llm("b"), functions=[build]) as harness:
        log = await harness.turn("lead", "Go.")
        assert len(seen) == 1
        await check_replay(harness, log)
        assert len(seen) == 1, "what is recorded is not made again"
    assert sorted(told(log)) == [("a", "lead: one"), ("b", "<two>")]
    only = seen[0]
    assert (dict(only.arguments), text_of(only.input), text_of(only.user)) == ({"message": "one"}, "Go.", "Go.")
    assert (only.iteration, only.plan, only.step) == (None, "", "")


async def test_arguments_of_a_schema_of_the_childs_own_reach_its_builder(tmp_path: Path) -> None:
    child = llm("a")
    child.input_schema_json = '{"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]}'
    build = input_builder(name="build")(lambda snapshot: f"About {snapshot.arguments['topic']}.")
    turns = script(lead=[calls(call("call_a", subject="x")), calls(call("call_a", topic="trees")), "Done."], a=["A."])
    async with open_team(
        tmp_path, turns, llm("lead", links=[link("a", function="build")]), child, functions=[build]
    ) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert failed_result(log)[1] == "BAD_ARGUMENTS"
    assert told(log) == [("a", "About trees.")]


async def test_a_transfer_is_told_what_its_template_makes(tmp_path: Path) -> None:
    over = link("a", "{{message}}|{{input}}", link_mode=agent_pb2.LINK_MODE_TRANSFER)
    turns = script(lead=[calls(call("transfer_to_agent", agent_name="a", message="Help."))], a=["Helped."])
    async with open_team(tmp_path, turns, llm("lead", links=[over]), llm("a")) as harness:
        log = await harness.turn("lead", "Go.")
        await check_replay(harness, log)
    assert told(log) == [("a", "Help.|Go.")]
    assert answer_of(log) == "Helped."


async def test_a_member_of_a_supervisor_is_told_what_its_template_makes(tmp_path: Path) -> None:
    lead = supervisor("lead", link("a", "{{message}}|{{user}}"))
    turns = script(lead=[calls(call("transfer_to_agent", agent_name="a")), "Done."], a=["Helped."])
    async with open_team(tmp_path, turns, lead, llm("a")) as harness:
        log = await harness.turn("lead", "Go.")
        await check_replay(harness, log)
    assert told(log) == [("a", "|Go.")]


async def test_a_member_of_a_swarm_is_told_what_its_template_makes(tmp_path: Path) -> None:
    team = [swarm("s", link("a", "Begin: {{input}}"), link("b", "{{message}}|{{user}}")), llm("a"), llm("b")]
    turns = script(a=[calls(call("transfer_to_agent", agent_name="b", message="Help."))], b=["Helped."])
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("s", "Go.")
        await check_replay(harness, log)
    assert told(log) == [("a", "Begin: Go."), ("b", "Help.|Go.")]


async def test_what_code_says_is_the_message_of_a_builder(tmp_path: Path) -> None:
    @agent(agents=[link("a", "{{message}} of {{state.who}}")])
    async def lead(ctx: Context, input: message_pb2.Message) -> message_pb2.Message:
        """Leads."""
        ctx.state["who"] = "Ada"
        return await ctx.dispatch("a", "The tree")

    async with open_team(tmp_path, script(a=["Found."]), llm("a"), code_agents=[lead]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert told(log) == [("a", "The tree of Ada")]


async def test_lanes_are_told_what_was_before_the_fork(tmp_path: Path) -> None:
    first = llm("first")
    first.output_key = "topic"
    lanes = parallel("lanes", link("a", "a: {{state.topic}}"), link("b", "b: {{state.topic}}"))
    turns = script(first=["trees"], a=["A."], b=["B."])
    async with open_team(tmp_path, turns, sequence("s", "first", "lanes"), lanes, first, llm("a"), llm("b")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert sorted(told(log)[2:]) == [("a", "a: trees"), ("b", "b: trees")]


async def test_files_of_a_message_that_a_template_names_come_along(tmp_path: Path) -> None:
    picture = message_pb2.Part(blob=message_pb2.Blob(media_type="image/png", data=b"x", size_bytes=1))
    build = input_builder(name="build")(lambda _: message_pb2.Message(parts=[message_pb2.Part(text="See."), picture]))
    team = [sequence("s", link("t", function="build")), sequence("t", link("a", "{{input}} {{input}}", history=BLIND))]
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, script(a=["A."]), *team, llm("a"), functions=[build], heard=heard) as harness:
        await check_replay(harness, await harness.turn("s"))
    assert list(heard[0].messages[0].parts) == [message_pb2.Part(text="See. See."), picture]


async def test_a_value_that_is_missing_is_a_failed_result_that_the_model_sees(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(lead=[calls(call("call_a", message="go")), "I see."], a=["never"])
    team = [llm("lead", links=[link("a", "{{state.draft.title}}")]), llm("a")]
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert failed_result(log) == (
        "The `input` of the link to 'a' names {{state.draft.title}}, and the session's state has no value "
        "'draft.title'. Write {{state.draft.title?}} if it may be missing.",
        "BAD_ARGUMENTS",
    )
    assert told(log) == []
    assert answer_of(log) == "I see."


async def test_a_builder_that_raises_fails_a_sequence_and_the_replay_says_the_same(tmp_path: Path) -> None:
    @input_builder
    def broken(snapshot: Snapshot) -> str:
        return str(snapshot.state["nothing"])

    async with open_team(
        tmp_path, script(), sequence("s", link("a", function="broken")), llm("a"), functions=[broken]
    ) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.message == "The input builder 'broken' raised KeyError: 'nothing'."


@pytest.mark.parametrize("template", ["{{state.x?}}", "  "])
async def test_nothing_to_tell_is_an_error(tmp_path: Path, template: str) -> None:
    async with open_team(tmp_path, script(), sequence("s", link("a", template)), llm("a")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.message.startswith("The input for 'a' is empty")


async def test_an_instruction_says_what_the_state_holds_when_it_is_asked(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []

    @tool
    def look() -> str:
        """Looks."""
        return "red"

    lead = llm("lead", tools=["set_state"])
    lead.llm.instruction = 'You know {{state.fact?}}. Answer like {"a": {{1}}}.'
    turns = script(lead=[calls(call("set_state", key="fact", value={"x": 1})), "Done."])
    async with open_team(tmp_path, turns, lead, heard=heard) as harness:
        await check_replay(harness, await harness.turn("lead"))
    assert [request.instruction for request in heard] == [
        'You know . Answer like {"a": {{1}}}.',
        'You know {"x":1}. Answer like {"a": {{1}}}.',
    ]


async def test_an_instruction_of_a_supervisor_is_filled_in_too(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    first, lead = llm("first"), supervisor("lead", "a")
    first.output_key = "topic"
    lead.supervisor.llm.instruction = "About {{state.topic}}."
    team = [sequence("s", "first", "lead"), first, lead, llm("a")]
    async with open_team(tmp_path, script(first=["trees"], lead=["Done."]), *team, heard=heard) as harness:
        await check_replay(harness, await harness.turn("s"))
    assert heard[-1].instruction == "About trees."


async def test_a_loop_tells_its_child_each_round_what_is_known_then(tmp_path: Path) -> None:
    writer = llm("a")
    writer.output_key = "draft"
    team = loop("l", link("a", "Improve: {{state.draft?}}", history=BLIND), rounds=2)
    async with open_team(tmp_path, script(a=["One."]), team, writer) as harness:
        log = await harness.turn("l")
        await check_replay(harness, log)
    assert told(log) == [("a", "Improve: "), ("a", "Improve: One.")]


async def test_an_instruction_that_names_a_missing_value_fails_its_agent_for_good(tmp_path: Path) -> None:
    lead, a = llm("lead", links=["a"]), llm("a")
    a.llm.instruction = "About {{state.topic}}."
    turns = script(lead=[calls(call("call_a", message="go")), "I see."], a=["never"])
    async with open_team(tmp_path, turns, lead, a) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert "The instruction of 'a' names {{state.topic}}" in failed_result(log)[0]
    assert next(iter(having(log, "llm_failed"))).llm_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert answer_of(log) == "I see."


async def test_a_plans_agents_are_told_what_is_planned_and_done(tmp_path: Path) -> None:
    seen: list[tuple[str, str, str]] = []

    @input_builder
    def note(snapshot: Snapshot) -> str:
        seen.append((snapshot.plan, snapshot.step, snapshot.executed_steps))
        assert snapshot.message is not None
        return "Plan again."

    lead = plan_execute(
        "lead",
        link("planner", "Plan {{input}}.{{plan}}{{message}}"),
        link("executor", "Do {{step}} for {{user}}: {{plan}}; done: {{executed_steps}}", history=BLIND),
        link("replanner", function="note"),
        rounds=2,
    )
    turns = script(
        planner=[calls(call("plan", steps=["s1", "s2"]))],
        executor=["r1"],
        replanner=[calls(call("plan", steps=["s3"]))],
    )
    team = [lead, llm("planner"), llm("executor"), llm("replanner")]
    async with open_team(tmp_path, turns, *team, functions=[note]) as harness:
        log = await harness.turn("lead", "Go")
        await check_replay(harness, log)
    assert told(log)[:3] == [
        ("planner", "Plan Go."),
        ("executor", "Do s1 for Go: 1. s1\n2. s2; done: "),
        ("replanner", "Plan again."),
    ]
    assert told(log)[3] == ("executor", "Do s3 for Go: 1. s3; done: 1. s1\n   Result: r1")
    assert seen[0] == ("1. s2", "s1", "1. s1\n   Result: r1")
    assert [step for _, step, _ in seen] == ["s1", "s3"]
