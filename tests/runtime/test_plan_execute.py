"""Plans: who is told what, what is recorded and kept, who answers, and how they end without an answer."""

import json
from pathlib import Path

import pytest

from bough import reply
from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, fork_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.log.session_state import MAX_STATE_BYTES
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from tests.runtime.test_flows import EXIT, FAILS, ends, keys_of_children
from tests.runtime.test_supervisors import shown_to
from tests.runtime.test_transfers import to, transfer
from tests.support.composite_agents import plan_execute, sequence, supervisor
from tests.support.fork_agents import run_of
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.question_agents import open_requests
from tests.support.teams import call, calls, llm, open_team, script

ROLES = ("planner", "executor", "replanner")
CONTINUE = policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE
BLIND = agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_NONE)


def plan(*steps: str) -> dict[str, object]:
    return calls(call("plan", steps=list(steps)))


def respond(answer: str) -> dict[str, object]:
    return calls(call("respond", answer=answer))


def after(done: int, turn: dict[str, object]) -> dict[str, object]:
    """A turn of a replanner that is told that so many steps are done, the last of them the `done`-th."""
    return {**turn, "when": f"{done}. s{done}\n   Result: r{done}"}


def doing(step: str, turn: dict[str, object]) -> dict[str, object]:
    """A turn of an executor that is told to do a step."""
    return {**turn, "when": f"no other: {step}"}


TEAM = (plan_execute("lead"), llm("planner"), llm("executor"), llm("replanner"))
EXECUTOR = [doing("s1", {"text": "r1"}), doing("s2", {"text": "r2"})]
SCRIPT = script(
    planner=[plan("s1", "s2")],
    executor=EXECUTOR,
    # Both turns fit when two steps are done: the first of them answers.
    replanner=[after(2, respond("All done.")), after(1, plan("s2"))],
)


def items(log: list[event_pb2.AgentEvent], payload: str) -> list[tuple[str, list[str]]]:
    """The plans of a log, each with the effect that it is recorded at."""
    return [(event.effect_key, [item.text for item in getattr(event, payload).items]) for event in having(log, payload)]


def state_of(log: list[event_pb2.AgentEvent]) -> dict[str, object]:
    """What a run wrote to the session's state."""
    changes = [
        change for event in having(log, "session_state_changed") for change in event.session_state_changed.state_changes
    ]
    return {change.key: json.loads(change.value_json) for change in changes}


def offered(heard: list[ModelRequest]) -> list[tuple[str, list[str], str]]:
    return [(request.agent, [tool.name for tool in request.tools], request.tool_choice) for request in heard]


async def test_a_plan_is_done_step_by_step_until_the_replanner_responds(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, SCRIPT, *TEAM, heard=heard) as harness:
        log = await harness.turn("lead", "Paint it.")
        await check_replay(harness, log)
        assert {reason for _, reason in await ends(harness, log)} == {"ANSWERED"}
    assert keys_of_children(log) == ["p0.c0", "p0.c1", "p0.c2", "p1.c1", "p1.c2"]
    begun = having(log, "sub_agent_started")
    assert {event.sub_agent_started.trigger for event in begun} == {execution_pb2.INVOCATION_TRIGGER_PLAN}
    assert items(log, "plan_made") == [("p0", ["s1", "s2"])]
    assert items(log, "plan_revised") == [("p1", ["s2"])]
    assert state_of(log) == {
        "plan": [],
        "executed_steps": [{"step": "s1", "result": "r1"}, {"step": "s2", "result": "r2"}],
    }
    assert (answer_of(log), log[-1].run_completed.final_answer.author) == ("All done.", "replanner")
    assert offered(heard)[:3] == [
        ("planner", ["plan"], "required"),
        ("executor", [], "auto"),
        ("replanner", ["plan", "respond"], "required"),
    ]


async def test_a_plan_is_an_ordinary_call_and_its_arguments_are_the_planners_output(tmp_path: Path) -> None:
    async with open_team(tmp_path, SCRIPT, *TEAM) as harness:
        log = await harness.turn("lead")
    (planned, *_) = results_of(log)
    assert (planned.call.name, text_of(planned)) == ("plan", "Planned.")
    (completed, *_) = having(log, "sub_agent_completed")
    assert completed.sub_agent_completed.output.parts == [message_pb2.Part(data_json='{"steps": ["s1", "s2"]}')]
    assert completed.sub_agent_completed.output.kind == message_pb2.MESSAGE_KIND_UNSPECIFIED, "the call has said it"


async def test_each_is_told_the_objective_and_how_far_the_plan_has_come(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    links = [agent_pb2.AgentLink(agent=name, history=BLIND) for name in ROLES]
    team = (plan_execute("lead", *links), *TEAM[1:])
    async with open_team(tmp_path, SCRIPT, *team, heard=heard) as harness:
        log = await harness.turn("lead", "Paint it.")
        await check_replay(harness, log)
    assert shown_to(heard, "planner") == [["USER: Paint it."]]
    assert shown_to(heard, "executor") == [
        [
            "USER: Objective: Paint it.\n\nThe plan:\n1. s1\n2. s2\n\nDone so far:\nNothing.\n\n"
            "Do the first step of the plan now, and no other: s1"
        ],
        [
            "USER: Objective: Paint it.\n\nThe plan:\n1. s2\n\nDone so far:\n1. s1\n   Result: r1\n\n"
            "Do the first step of the plan now, and no other: s2"
        ],
    ]
    replan = (
        "If the objective is reached, call `respond` with the whole answer. "
        "Else call `plan` with the steps that are left."
    )
    assert shown_to(heard, "replanner") == [
        ["USER: Objective: Paint it.\n\nDone so far:\n1. s1\n   Result: r1\n\nLeft of the plan:\n1. s2"],
        [
            "USER: Objective: Paint it.\n\nDone so far:\n1. s1\n   Result: r1\n2. s2\n   Result: r2\n\n"
            "Left of the plan:\nNothing."
        ],
    ]
    instructions = {request.agent: request.instruction for request in heard}
    assert instructions == {
        "planner": "You are planner.",
        "executor": "You are executor.",
        "replanner": f"You are replanner.\n\n{replan}",
    }


async def test_the_planner_plans_again_where_there_is_no_replanner(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(planner=[after(1, respond("Done.")), plan("s1")], executor=[{"text": "r1"}])
    team = (plan_execute("lead", roles=["planner", "executor"]), llm("planner"), llm("executor"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert [tools for agent, tools, _ in offered(heard) if agent == "planner"] == [["plan"], ["plan", "respond"]]
    assert (answer_of(log), log[-1].run_completed.final_answer.author) == ("Done.", "planner")


async def test_a_plan_that_is_never_done_ends_at_its_limit_with_the_work_so_far(tmp_path: Path) -> None:
    turns = script(planner=[plan("s1")], executor=[{"text": "r1"}], replanner=[plan("s1", "s2")])
    team = (plan_execute("lead", rounds=2), *TEAM[1:])
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
        assert (await ends(harness, log))[0] == ("lead", "LIMIT")
    assert len(keys_of_children(log)) == 5
    assert [key for key, _ in items(log, "plan_revised")] == ["p1", "p2"]
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert error.message == (
        "The agent 'lead' executed 2 steps without an answer: max_iterations is reached. 2 more are planned."
    )
    work = {"plan": ["s1", "s2"], "executed_steps": [{"step": "s1", "result": "r1"}] * 2}
    assert (json.loads(error.details_json), state_of(log)) == (work, work)


async def test_the_work_so_far_reaches_the_root_through_what_the_plan_is_in(tmp_path: Path) -> None:
    turns = script(planner=[plan("s1")], executor=[{"text": "r1"}], replanner=[plan("s2")])
    team = (sequence("outer", "inner"), sequence("inner", "lead"), plan_execute("lead", rounds=1), *TEAM[1:])
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("outer")
        await check_replay(harness, log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert json.loads(error.details_json) == {"plan": ["s2"], "executed_steps": [{"step": "s1", "result": "r1"}]}


async def test_ten_steps_are_the_default(tmp_path: Path) -> None:
    turns = script(planner=[plan("s1")], executor=[{"text": "r1"}], replanner=[plan("s1")])
    links = [agent_pb2.AgentLink(agent=name, history=BLIND) for name in ROLES]
    async with open_team(tmp_path, turns, plan_execute("lead", *links), *TEAM[1:]) as harness:
        log = await harness.turn("lead")
    assert [event.agent for event in having(log, "sub_agent_started")].count("executor") == 10


async def test_large_results_are_cut_where_they_are_told_on(tmp_path: Path) -> None:
    turns = script(planner=[plan("s1")], executor=[{"text": "a" * 200_000}], replanner=[plan("s1")])
    links = [agent_pb2.AgentLink(agent=name, history=BLIND) for name in ROLES]
    async with open_team(tmp_path, turns, plan_execute("lead", *links), *TEAM[1:]) as harness:
        log = await harness.turn("lead", "long " * 50_000)
        await check_replay(harness, log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert [one["step"] for one in json.loads(error.details_json)["executed_steps"]] == ["s1"] * 10
    assert len(text_of(having(log, "sub_agent_started")[-1].sub_agent_started.input)) < 100 * 1024


async def test_a_model_that_answers_in_words_is_asked_for_the_call_again(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(planner=["I would paint it.", "", plan("s1")], executor=["r1"], replanner=[respond("Done.")])
    async with open_team(tmp_path, turns, *TEAM, heard=heard) as harness:
        log = await harness.turn("lead", "u")
        await check_replay(harness, log)
    asked = "USER: Answer with a call of `plan`, not in words."
    assert shown_to(heard, "planner")[2] == ["USER: u", "ASSISTANT: I would paint it.", asked, asked]
    assert answer_of(log) == "Done."


@pytest.mark.parametrize(("role", "tools"), [("planner", "`plan`"), ("replanner", "`plan` or `respond`")])
async def test_a_model_that_goes_on_in_words_fails(tmp_path: Path, role: str, tools: str) -> None:
    turns = {"planner": [plan("s1")], "executor": ["r1"], "replanner": [respond("Done.")], role: ["Words."] * 9}
    async with open_team(tmp_path, script(**turns), *TEAM) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    (failed,) = having(log, "sub_agent_failed")
    error = failed.sub_agent_failed.error
    assert error.reason == error_pb2.ERROR_REASON_INVALID_OUTPUT
    assert error.message == f"The model of '{role}' answered 3 times without calling {tools}."
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED


async def test_a_plan_without_steps_is_refused_and_the_model_may_try_again(tmp_path: Path) -> None:
    turns = script(planner=[plan(), plan(" "), plan("s1")], executor=["r1"], replanner=[respond("Done.")])
    async with open_team(tmp_path, turns, *TEAM) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    refused = [result.error.reason for result in results_of(log) if result.HasField("error")]
    assert refused == [error_pb2.ERROR_REASON_BAD_ARGUMENTS] * 2
    assert items(log, "plan_made") == [("p0", ["s1"])]


async def test_a_supervisor_plans_when_its_members_have_come_back(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(
        planner=[calls(transfer("m")), plan("s1")], m=["Facts."], executor=["r1"], replanner=[respond("Ok.")]
    )
    team = (TEAM[0], supervisor("planner", "m"), llm("m"), *TEAM[2:])
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert answer_of(log) == "Ok."
    assert [one for one in offered(heard) if one[0] in ("planner", "m")] == [
        ("planner", ["transfer_to_agent", "plan"], "required"),
        ("m", [], "auto"),
        ("planner", ["transfer_to_agent", "plan"], "required"),
    ]


async def test_who_plans_cannot_hand_its_place_over(tmp_path: Path) -> None:
    turns = script(planner=[calls(transfer("m"))], m=["Words."])
    team = (TEAM[0], llm("planner", links=[to("m")]), llm("m"), *TEAM[2:])
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_INVALID_OUTPUT
    assert error.message == ("'m' answered in place of an agent that had to plan. A planner must not transfer.")


async def test_a_step_that_fails_is_told_to_the_replanner_where_its_link_says_continue(tmp_path: Path) -> None:
    links = ["planner", agent_pb2.AgentLink(agent="executor", on_failure=CONTINUE), "replanner"]
    turns = script(planner=[plan("s1")], executor=[FAILS], replanner=[respond("It cannot be done.")])
    async with open_team(tmp_path, turns, plan_execute("lead", *links), *TEAM[1:]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    why = "failed: The model 'default' failed: It fails by its script."
    assert state_of(log)["executed_steps"] == [{"step": "s1", "result": why}]
    assert answer_of(log) == "It cannot be done."


@pytest.mark.parametrize("role", ROLES)
async def test_a_child_that_fails_fails_the_plan(tmp_path: Path, role: str) -> None:
    on_failure = policy_pb2.SUB_AGENT_FAILURE_POLICY_UNSPECIFIED if role == "executor" else CONTINUE
    links = [agent_pb2.AgentLink(agent=name, on_failure=on_failure if name == role else None) for name in ROLES]
    turns = {"planner": [plan("s1")], "executor": ["r1"], "replanner": [respond("Done.")], role: [FAILS]}
    async with open_team(tmp_path, script(**turns), plan_execute("lead", *links), *TEAM[1:]) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert having(log, "sub_agent_failed")[0].agent == role


@pytest.mark.parametrize("role", ROLES)
async def test_the_exit_of_any_child_ends_the_plan_and_what_is_above_it(tmp_path: Path, role: str) -> None:
    turns = {"planner": [plan("s1")], "executor": ["r1"], "replanner": [respond("Done.")], role: [EXIT]}
    team = (sequence("q", "lead", "never"), TEAM[0], llm("never"), *(llm(name, tools=["exit"]) for name in ROLES))
    async with open_team(tmp_path, script(**turns), *team) as harness:
        log = await harness.turn("q")
        await check_replay(harness, log)
        assert (await ends(harness, log))[:2] == [("q", "EXITED"), ("lead", "EXITED")]
    assert answer_of(log) == "It is over."


@pytest.mark.parametrize("has_schema", [False, True])
async def test_a_final_answer_tool_or_a_schema_of_who_plans_stands_back(tmp_path: Path, has_schema: bool) -> None:
    heard: list[ModelRequest] = []
    planner = llm("planner", final_answer_tool=not has_schema)
    planner.output_schema_json = '{"type": "object"}' if has_schema else ""
    async with open_team(tmp_path, SCRIPT, TEAM[0], planner, *TEAM[2:], heard=heard) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert offered(heard)[0] == ("planner", ["plan"], "required")
    assert (heard[0].output_schema_json, answer_of(log)) == ("", "All done.")


async def test_an_input_builder_is_given_the_plan_and_what_was_done(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    built = agent_pb2.InputBuilder(template="{{step}} of\n{{plan}}\nafter\n{{executed_steps}}")
    links = [
        agent_pb2.AgentLink(agent="planner"),
        agent_pb2.AgentLink(agent="executor", input=built, history=BLIND),
        agent_pb2.AgentLink(agent="replanner"),
    ]
    turns = script(
        planner=[plan("s1", "s2")],
        executor=[{"when": "s1 of", "text": "r1"}, {"when": "s2 of", "text": "r2"}],
        replanner=[after(2, respond("All done.")), after(1, plan("s2"))],
    )
    async with open_team(tmp_path, turns, plan_execute("lead", *links), *TEAM[1:], heard=heard) as harness:
        log = await harness.turn("lead")
        await check_replay(harness, log)
    assert shown_to(heard, "executor") == [
        ["USER: s1 of\n1. s1\n2. s2\nafter\n"],
        ["USER: s2 of\n1. s2\nafter\n1. s1\n   Result: r1"],
    ]


async def test_a_plan_waits_for_what_a_step_asks_over_a_restart(tmp_path: Path) -> None:
    @agent
    async def executor(ctx: Context, input: message_pb2.Message) -> str:
        """Asks a person."""
        return str(await ctx.ask("Which red?"))

    turns = script(planner=[plan("s1")], replanner=[{**respond("Painted."), "when": "Result: dark"}])
    team = (plan_execute("lead"), llm("planner"), llm("replanner"))
    async with open_team(tmp_path, turns, *team, code_agents=[executor]) as harness:
        run = await harness.start("lead")
        asked = open_requests(await harness.until_interrupted(run))["Which red?"]
    async with open_team(tmp_path, turns, *team, code_agents=[executor]) as harness:
        await harness.resume(run, reply(asked, "dark"))
        log = await harness.log(run)
        await check_replay(harness, log)
    assert list(asked.agent_path) == ["lead", "executor"]
    assert (answer_of(log), len(having(log, "plan_made"))) == ("Painted.", 1)


@pytest.mark.parametrize("steps", [["s2"], []])
async def test_a_fork_goes_on_with_an_edited_plan(tmp_path: Path, steps: list[str]) -> None:
    replanner = [{**respond("Only s2."), "when": "1. s2\n   Result"}, after(2, respond("All.")), after(1, plan("s2"))]
    turns = script(planner=[plan("s1", "s2")], executor=EXECUTOR, replanner=replanner)
    async with open_team(tmp_path, turns, *TEAM) as harness:
        origin = await harness.turn("lead")
        (planned, *_) = having(origin, "tool_completed")
        instead = message_pb2.ToolOutcome(parts=[message_pb2.Part(data_json=json.dumps({"steps": steps}))])
        edit = fork_pb2.EditedResult(
            call_id=planned.tool_completed.result.call.call_id, invocation_id=planned.invocation_id, outcome=instead
        )
        fork = await harness.fork(run_of(origin), len(origin) - 1, tool_results=[edit])
        log = await harness.log(fork)
        await check_replay(harness, log)
    assert items(log, "plan_made") == ([("p0", ["s2"])] if steps else [])
    assert (answer_of(origin), answer_of(log)) == ("All.", "Only s2." if steps else "")
    assert (log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS) is not bool(steps)


@pytest.mark.parametrize("room", [16 * 1024, 60, 30, 29])
@pytest.mark.parametrize("result", ["r" * 60_000, "\x01" * 60_000], ids=["letters", "controls"])
async def test_a_plan_goes_on_however_little_room_the_state_has_left(tmp_path: Path, room: int, result: str) -> None:
    @agent(description="Leaves so many bytes of the state.")
    async def fill(ctx: Context, input: message_pb2.Message) -> str:
        ctx.state["big"] = "x" * (MAX_STATE_BYTES - len('{"big":""}') - room)
        return "Full."

    replans = [{**respond("All done."), "when": "\n2. s1\n"}, plan("s1", "s2")]
    turns = script(planner=[plan("s1", "s2")], executor=[{"text": result}], replanner=replans)
    async with open_team(tmp_path, turns, sequence("p", "fill", "lead"), *TEAM, code_agents=[fill]) as harness:
        log = await harness.turn("p", "Paint it.")
        await check_replay(harness, log)
    assert answer_of(log) == "All done."
    kept = state_of(log)
    if room < len(',"plan":[],"executed_steps":[]'):
        assert kept.keys() == {"big"}
    elif room == 30:
        assert (kept["plan"], kept["executed_steps"]) == ([], [])
    elif room > 60:
        assert kept["plan"] == ["s2"]
        first, second = kept["executed_steps"]  # type: ignore[attr-defined]
        assert first["result"][:500] == second["result"][:500] == result[:500]


async def test_each_sees_the_conversation_and_its_own_words_and_nothing_of_the_others(tmp_path: Path) -> None:
    """Over two runs with two steps each, by default: no order to call a tool that an agent does not have among it."""
    heard: list[ModelRequest] = []
    turns = script(
        planner=[
            after(2, respond("All done.")),
            after(1, plan("s2")),
            {**plan("s1", "s2"), "when": "Paint it"},
        ],
        executor=EXECUTOR,
    )
    team = (plan_execute("lead", roles=["planner", "executor"]), llm("planner"), llm("executor"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        first = await harness.turn("lead", "Paint it.")
        log = await harness.turn("lead", "Paint it again.", session_id=first[0].session_id)
        await check_replay(harness, log)
    progress = "USER: Objective: Paint it.\n\nDone so far:\n1. s1\n   Result: r1"
    planner = [
        "USER: Paint it.",
        "ASSISTANT: calls plan",
        "TOOL: Planned.",
        f"{progress}\n\nLeft of the plan:\n1. s2",
        "ASSISTANT: calls plan",
        "TOOL: Planned.",
        f"{progress}\n2. s2\n   Result: r2\n\nLeft of the plan:\nNothing.",
    ]
    assert shown_to(heard, "planner")[:4] == [
        planner[:1],
        planner[:4],
        planner,
        [*planner, "ASSISTANT: calls respond", "TOOL: All done.", "ASSISTANT: All done.", "USER: Paint it again."],
    ]
    orders = [
        "USER: Objective: Paint it.\n\nThe plan:\n1. s1\n2. s2\n\nDone so far:\nNothing.\n\n"
        "Do the first step of the plan now, and no other: s1",
        "ASSISTANT: r1",
        "USER: Objective: Paint it.\n\nThe plan:\n1. s2\n\nDone so far:\n1. s1\n   Result: r1\n\n"
        "Do the first step of the plan now, and no other: s2",
    ]
    assert shown_to(heard, "executor")[:3] == [
        ["USER: Paint it.", orders[0]],
        ["USER: Paint it.", *orders],
        [
            "USER: Paint it.",
            *orders,
            "ASSISTANT: r2",
            "USER: For context: [planner] said: All done..",
            "USER: Paint it again.",
            orders[0].replace("Paint it.", "Paint it again."),
        ],
    ]
    named = {request.agent: "\n".join(map(text_of, request.messages)) for request in heard}
    assert "call `" not in named["planner"] + named["executor"]
    assert [request.instruction for request in heard if request.agent == "executor"] == ["You are executor."] * 4
