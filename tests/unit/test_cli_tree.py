"""The tree of a record as rows: who is below whom, what each used, what went wrong."""

from itertools import zip_longest

from google.protobuf import timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2, execution_pb2, fork_pb2, invocation_pb2, step_pb2, usage_pb2
from bough_server.cli.render.tree import narrowest_tree, tree_lines, trees_beside
from bough_server.tree.fold import fold
from tests.clients.run_events import desk


def agent(name: str, depth: int, **fields: object) -> invocation_pb2.AgentInvocation:
    known = {"state": execution_pb2.EXECUTION_STATE_SUCCEEDED, "step_count": 1, **fields}
    return invocation_pb2.AgentInvocation(invocation_id=f"id-{name}", name=name, depth=depth, **known)


def record(*agents: invocation_pb2.AgentInvocation, **fields: object) -> invocation_pb2.Invocation:
    known = {"state": execution_pb2.EXECUTION_STATE_SUCCEEDED, "complete": True, "agents_total": len(agents), **fields}
    return invocation_pb2.Invocation(agents=agents, **known)


def lines(invocation: invocation_pb2.Invocation, width: int = 80) -> list[str]:
    return [line.plain for line in tree_lines(invocation, width=width)]


def names(invocation: invocation_pb2.Invocation) -> list[str]:
    return [line.split("  succeeded")[0].rstrip() for line in lines(invocation)[1:-1]]


def test_a_folded_turn_is_a_tree() -> None:
    assert lines(fold(desk())) == [
        "agent                               state          time  steps  tools     tokens",
        "lead                                succeeded    27.0 s      2      1          -",
        "└─ researcher                       succeeded    12.0 s      2      1          -",
        "      · search",
        "succeeded · 2 agents · 4 model calls · 2 tool calls · 27.0 s",
    ]


def at(second: int) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=second)


def test_branches_are_drawn_to_their_last_child() -> None:
    tree = record(
        agent("a", 0), agent("b", 1), agent("c", 2), agent("d", 2), agent("e", 1), agent("f", 2), agent("g", 0)
    )
    assert names(tree) == ["a", "├─ b", "│  ├─ c", "│  └─ d", "└─ e", "   └─ f", "g"]


def test_composites_say_their_kind_and_how_they_ended_and_transfers_have_an_arrow() -> None:
    kinds = {name: getattr(execution_pb2, f"AGENT_KIND_{name.upper()}") for name in ("loop", "swarm", "plan_execute")}
    broke, spent = execution_pb2.END_REASON_BROKE_LOOP, execution_pb2.END_REASON_ITERATIONS_EXHAUSTED
    handed = {"trigger": execution_pb2.INVOCATION_TRIGGER_TRANSFER}
    tree = record(
        agent("all", 0, kind=kinds["plan_execute"]),
        agent("rounds", 1, kind=kinds["loop"], end_reason=broke),
        agent("critic", 2, kind=execution_pb2.AGENT_KIND_LLM, end_reason=broke),
        agent("more", 1, kind=kinds["loop"], end_reason=spent),
        agent("team", 1, kind=kinds["swarm"], end_reason=execution_pb2.END_REASON_ANSWERED),
        agent("a", 2, end_reason=execution_pb2.END_REASON_TRANSFERRED),
        agent("b", 2, end_reason=execution_pb2.END_REASON_EXITED, **handed),
        agent("c", 3, **handed),
    )
    assert names(tree) == [
        "all",
        "│  · plan_execute",
        "├─ rounds",
        "│  │  · loop, ended by a break",
        "│  └─ critic",
        "│        · broke the loop",
        "├─ more",
        "│     · loop, iterations used up",
        "└─ team",
        "   │  · swarm",
        "   ├─ a",
        "   │     · transferred",
        "   └→ b",
        "      │  · exited",
        "      └→ c",
    ]


def test_calls_that_wait_are_told_from_those_that_failed() -> None:
    tools = [
        invocation_pb2.ToolInvocation(name="refund", invocation_id="id-a", state=state)
        for state in (
            execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
            execution_pb2.EXECUTION_STATE_FAILED,
            execution_pb2.EXECUTION_STATE_SUCCEEDED,
        )
    ]
    tools.append(
        invocation_pb2.ToolInvocation(
            name="read", invocation_id="id-a", state=execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        )
    )
    assert lines(record(agent("a", 0), tools=tools))[2] == (
        "   · refund x3 (1 failed, 1 input_required), read (input_required)"
    )


def test_calls_that_were_cancelled_are_told_from_those_that_ended() -> None:
    tools = [
        invocation_pb2.ToolInvocation(name=name, invocation_id="id-a", state=state)
        for name, state in (
            ("pay", execution_pb2.EXECUTION_STATE_CANCELLED),
            ("look", execution_pb2.EXECUTION_STATE_SUCCEEDED),
            ("look", execution_pb2.EXECUTION_STATE_CANCELLED),
        )
    ]
    assert lines(record(agent("a", 0), tools=tools))[2] == "   · pay (cancelled), look x2 (1 cancelled)"


def test_a_fork_says_where_it_comes_from_and_what_it_inherited() -> None:
    origin = fork_pb2.ForkOrigin(run_id="r1", sequence=7)
    inherited = usage_pb2.Usage(model_calls=2, tool_calls=1, total_tokens=1_204)
    tree = record(agent("a", 0), forked_from=origin, inherited_usage=inherited)
    assert lines(tree)[-1] == "fork of run r1 after 7 · inherited 2 model calls · 1 tool call · 1,204 tokens"
    assert lines(record(agent("a", 0), forked_from=origin))[-1] == "fork of run r1 after 7"


def test_two_trees_stand_side_by_side_where_both_fit() -> None:
    left, right = record(agent("a", 0), agent("b", 1)), record(agent("a", 0))
    titled = ("origin r1", left), ("fork r2", right)
    wide = [line.plain for line in trees_beside(*titled, width=140)]
    assert [(line[:68].rstrip(), line[68:71], line[71:]) for line in wide] == [
        (one, " │ ", other)
        for one, other in zip_longest(["origin r1", *lines(left, 68)], ["fork r2", *lines(right, 68)], fillvalue="")
    ]
    narrow = [line.plain for line in trees_beside(*titled, width=100)]
    assert narrow == ["origin r1", *lines(left, 100), "", "fork r2", *lines(right, 100)]


@given(st.integers(40, 220))
def test_two_trees_are_no_wider_than_the_terminal_where_one_fits(width: int) -> None:
    tree = record(agent("a", 0), agent("n" * 59, 1))
    shown = trees_beside(("origin", tree), ("fork", tree), width=width)
    assert max(line.cell_len for line in shown) <= max(width, narrowest_tree(tree))


def test_notes_hang_below_their_agent() -> None:
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_TOOL_FAILED, message="No network.")
    tools = [
        invocation_pb2.ToolInvocation(
            name="search", invocation_id="id-a", state=execution_pb2.EXECUTION_STATE_SUCCEEDED
        ),
        invocation_pb2.ToolInvocation(name="search", invocation_id="id-a", state=execution_pb2.EXECUTION_STATE_FAILED),
        invocation_pb2.ToolInvocation(name="save", invocation_id="id-b", state=execution_pb2.EXECUTION_STATE_FAILED),
        invocation_pb2.ToolInvocation(name="call_b", invocation_id="id-a", child_invocation_id="id-b"),
    ]
    tree = record(
        agent("a", 0),
        agent("b", 1, state=execution_pb2.EXECUTION_STATE_FAILED, error=error),
        agent("c", 1),
        tools=tools,
    )
    below = [line for line in lines(tree) if "·" in line or "✗" in line]
    assert below[:-1] == ["│  · search x2 (1 failed)", "│     · save (failed)", "│     ✗ TOOL_FAILED: No network."]


def test_own_usage_stands_in_the_rows_and_the_trees_below() -> None:
    own = usage_pb2.Usage(
        input_tokens=1_000, output_tokens=204, tool_calls=3, cost_nanos=1_250_000, currency_code="USD"
    )
    whole = usage_pb2.Usage(total_tokens=5_000, model_calls=1, tool_calls=3, cost_nanos=9_000_000, currency_code="USD")
    start, end = timestamp_pb2.Timestamp(seconds=100), timestamp_pb2.Timestamp(seconds=102, nanos=500_000_000)
    lead = agent("lead", 0, usage=own, start_time=start, end_time=end)
    assert lines(record(lead, tree_usage=whole, start_time=start, end_time=end)) == [
        "agent                    state          time  steps  tools     tokens   cost USD",
        "lead                     succeeded     2.5 s      1      3      1,204     0.0013",
        "succeeded · 1 agent · 1 model call · 3 tool calls · 5,000 tokens",
        "cost 0.0090 USD · 2.5 s",
    ]


def test_a_run_that_goes_on_says_how_far_it_is() -> None:
    going = record(agent("lead", 0), state=execution_pb2.EXECUTION_STATE_RUNNING, complete=False, as_of_sequence=7)
    assert lines(going)[-1] == "running · 1 agent · 0 model calls · 0 tool calls · so far, to event 7"


def test_what_is_left_out_and_what_does_not_add_up_is_said() -> None:
    twice = invocation_pb2.Anomaly(kind=invocation_pb2.ANOMALY_KIND_NO_END, message="It has no end.")
    runs = invocation_pb2.Anomaly(kind=invocation_pb2.ANOMALY_KIND_SEVERAL_RUNS, message="The events name\ntwo runs.")
    tree = record(agent("lead", 0, anomalies=[twice]), anomalies=[runs], agents_total=12)
    assert lines(tree)[2:] == [
        "… and 11 more agents",
        "succeeded · 12 agents · 0 model calls · 0 tool calls",
        "! The events name two runs.",
        "! It has no end.",
    ]


def test_what_was_cancelled_says_why() -> None:
    cancelled = {"state": execution_pb2.EXECUTION_STATE_CANCELLED, "end_reason": execution_pb2.END_REASON_CANCELLED}
    tree = record(
        agent("lead", 0, kind=execution_pb2.AGENT_KIND_PARALLEL, end_reason=execution_pb2.END_REASON_FAILED),
        agent("a", 1, **cancelled, cancel_reason=execution_pb2.CANCEL_REASON_FAIL_FAST),
        agent("b", 1, **cancelled),
    )
    assert [line.split("  ")[0].rstrip() if "─" in line else line for line in lines(tree)[2:-1]] == [
        "│  · parallel",
        "├─ a",
        "│     · cancelled: fail_fast",
        "└─ b",
    ]


def test_models_that_stopped_before_they_were_done_are_told_by_agent() -> None:
    def step(name: str, reason: step_pb2.FinishReason.ValueType) -> step_pb2.AgentStep:
        return step_pb2.AgentStep(invocation_id=f"id-{name}", llm_response=step_pb2.LlmResponse(finish_reason=reason))

    steps = [
        step("a", step_pb2.FINISH_REASON_LENGTH),
        step("a", step_pb2.FINISH_REASON_TOOL_CALLS),
        step("a", step_pb2.FINISH_REASON_LENGTH),
        step("a", step_pb2.FINISH_REASON_CONTENT_FILTER),
        step("b", step_pb2.FINISH_REASON_STOP),
    ]
    shown = lines(record(agent("a", 0), agent("b", 1), steps=steps))
    assert [line for line in shown if "finish" in line] == ["│  · finish reason length x2, content_filter"]


def test_the_state_column_is_as_wide_as_its_longest_state() -> None:
    tree = record(agent("lead", 0, state=execution_pb2.EXECUTION_STATE_INPUT_REQUIRED), agent("b", 1))
    assert [line.rstrip() for line in lines(tree)[:3]] == [
        "agent                          state               time  steps  tools     tokens",
        "lead                           input_required         -      1      0          -",
        "└─ b                           succeeded              -      1      0          -",
    ]


def test_deep_agents_say_their_depth() -> None:
    tree = record(*(agent(f"a{depth}", depth) for depth in range(200)))
    assert names(tree)[199] == " " * 21 + "⋯199 └─ a199"


DEPTHS = st.lists(st.integers(0, 15), max_size=40)


@given(DEPTHS, st.text(max_size=60), st.integers(60, 120))
def test_every_agent_has_one_row_and_no_row_is_too_wide(depths: list[int], name: str, width: int) -> None:
    preorder: list[int] = []
    for depth in depths:
        preorder.append(min(depth, preorder[-1] + 1) if preorder else 0)
    tree = record(*(agent("agent", depth) for depth in preorder))
    rows = lines(tree, width)
    assert len(rows) == len(preorder) + 2
    assert max(len(row) for row in rows) <= max(width, 90)
