"""The golden sequences S1 to S8 and S10: whole logs of small teams, each re-executed from its log alone."""

import asyncio
from pathlib import Path

from bough.v1 import agent_pb2, error_pb2, event_pb2, follow_pb2, message_pb2, policy_pb2, usage_pb2
from bough_server.log import events
from bough_server.log.views import Selection
from tests.support.log_readings import check_replay, text_of
from tests.support.run_harness import ME, names
from tests.support.teams import llm, open_team

PASSTHROUGH = policy_pb2.RunPolicy(deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()))
ABORT = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)

ONE_CHILD = """
agents:
  p:
    - calls: [{name: call_c, arguments: {message: Say it.}}]
      usage: {input_tokens: 10, output_tokens: 4}
    - text: All done.
      usage: {input_tokens: 20, output_tokens: 2}
  c:
    - chunks: ["One ", "two ", "three."]
      usage: {input_tokens: 5, output_tokens: 3}
"""

CALL = ["p: llm.started", "p: llm.tool_call.delta", "p: llm.completed"]
ANSWER = [
    "p: llm.started",
    "p: llm.output_text.delta",
    "p: llm.output_text.delta",
    "p: llm.completed",
    "p: step.completed",
    "p: run.completed",
]


def summary(log: list[event_pb2.AgentEvent]) -> list[event_pb2.AgentEvent]:
    selection = Selection(follow_pb2.EVENT_VIEW_SUMMARY, ())
    return [shown for event in log if (shown := selection.apply(event)) is not None]


def partials(log: list[event_pb2.AgentEvent]) -> list[str]:
    return [event.sub_agent_partial.text for event in summary(log) if event.HasField("sub_agent_partial")]


async def test_s1_one_child_with_joined_deltas(tmp_path: Path) -> None:
    async with open_team(tmp_path, ONE_CHILD, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p", "Go.")
        stored = await harness.messages(log[0].session_id)
        entries = await harness.store.usage.list_for_run(log[0].run_id)
        await check_replay(harness, log)
    assert names(summary(log)) == [
        "p: run.started",
        *CALL,
        "p: tool.started",
        "c: sub_agent.started",
        "c: sub_agent.partial",
        "c: sub_agent.partial",
        "c: sub_agent.completed",
        "p: tool.completed",
        "p: step.completed",
        *ANSWER,
    ]
    assert partials(log) == ["One ", "two three."], "the first piece does not wait for others"
    ended = next(event for event in log if event.HasField("tool_completed"))
    assert text_of(ended.tool_completed.result) == "One two three."
    assert [(one.message.kind, one.message.author, text_of(one.message)) for one in stored] == [
        (message_pb2.MESSAGE_KIND_USER, "user", "Go."),
        (message_pb2.MESSAGE_KIND_SUB_AGENT_USER, "p", "Say it."),
        (message_pb2.MESSAGE_KIND_SUB_AGENT_ASSISTANT, "c", "One two three."),
        (message_pb2.MESSAGE_KIND_ASSISTANT, "p", "All done."),
    ]
    assert [(entry.agent, entry.usage.input_tokens) for entry in entries] == [("p", 10), ("c", 5), ("p", 20)]
    assert log[-1].run_completed.tree_usage == usage_pb2.Usage(
        input_tokens=35,
        output_tokens=9,
        model_calls=3,
        tool_calls=1,
        cost_nanos=35_000 + 18_000,
        currency_code="USD",
    )


async def test_s2_passthrough_records_every_delta_and_the_same_text(tmp_path: Path) -> None:
    async with open_team(tmp_path, ONE_CHILD, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p", policy=PASSTHROUGH)
        await check_replay(harness, log)
    assert partials(log) == ["One ", "two ", "three."]


FAILING_CHILD = """
agents:
  p:
    - calls: [{name: call_c, arguments: {message: Say it.}}]
    - The child failed.
  c:
    - text: Half a
      usage: {input_tokens: 7, output_tokens: 1}
      error: {reason: UNAVAILABLE, after_chunks: 1}
"""


async def test_s3_a_failed_child_is_a_failed_result_and_the_caller_goes_on(tmp_path: Path) -> None:
    async with open_team(tmp_path, FAILING_CHILD, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert names(log) == [
        "p: run.started",
        *CALL,
        "p: tool.started",
        "c: sub_agent.started",
        "c: llm.started",
        "c: llm.output_text.delta",
        "c: llm.failed",
        "c: step.failed",
        "c: sub_agent.failed",
        "p: tool.failed",
        "p: step.completed",
        *ANSWER,
    ]
    failed = next(event for event in log if event.HasField("tool_failed")).tool_failed.result
    assert failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert failed.error.agent == "c"


async def test_s4_a_failed_child_aborts_its_caller_and_nothing_follows(tmp_path: Path) -> None:
    async with open_team(tmp_path, FAILING_CHILD, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p", policy=ABORT)
        await check_replay(harness, log)
    assert names(log)[-5:] == [
        "c: step.failed",
        "c: sub_agent.failed",
        "p: tool.failed",
        "p: step.failed",
        "p: run.failed",
    ]
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED


async def test_the_policy_of_a_link_wins_over_the_agents_and_the_runs(tmp_path: Path) -> None:
    carry_on = agent_pb2.AgentLink(agent="c", on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE)
    async with open_team(tmp_path, FAILING_CHILD, llm("p", links=[carry_on]), llm("c")) as harness:
        log = await harness.turn("p", policy=ABORT)
    assert events.name_of(log[-1]) == "agent.run.completed"


async def test_s5_an_agent_that_is_not_linked_is_refused_without_a_call(tmp_path: Path) -> None:
    async with open_team(tmp_path, ONE_CHILD, llm("p"), llm("c")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert names(log) == ["p: run.started", *CALL, "p: tool.failed", "p: step.completed", *ANSWER]
    failed = next(event for event in log if event.HasField("tool_failed")).tool_failed.result
    assert failed.error.reason == error_pb2.ERROR_REASON_NOT_LINKED
    assert log[-1].run_completed.tree_usage.model_calls == 2
    assert log[-1].run_completed.tree_usage.tool_calls == 0


TWO_CHILDREN = """
agents:
  p:
    - calls:
        - {name: call_c, arguments: {message: c}}
        - {name: call_d, arguments: {message: d}}
    - Both done.
  c: [The slow one.]
  d: [The fast one.]
"""


async def test_s6_two_children_run_at_once_and_results_stay_in_call_order(tmp_path: Path) -> None:
    d_is_done = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "c":
            await d_is_done.wait()

    team = (llm("p", links=["c", "d"]), llm("c"), llm("d"))
    async with open_team(tmp_path, TWO_CHILDREN, *team, gate=gate) as harness:
        run = await harness.start("p")
        log = []
        async for event in harness.follow(run):
            log.append(event)
            if event.agent == "p" and event.HasField("tool_completed"):
                d_is_done.set()
        await check_replay(harness, log)
    shown = [name for name in names(summary(log)) if ": tool." in name or ": sub_agent." in name]
    assert shown == [
        "p: tool.started",
        "c: sub_agent.started",
        "p: tool.started",
        "d: sub_agent.started",
        *["d: sub_agent.partial"] * 2,
        "d: sub_agent.completed",
        "p: tool.completed",
        *["c: sub_agent.partial"] * 2,
        "c: sub_agent.completed",
        "p: tool.completed",
    ]
    step = next(event for event in log if event.agent == "p" and event.HasField("step_completed")).step_completed.step
    assert [result.call.name for result in step.tool_results] == ["call_c", "call_d"]
    assert len({event.sub_agent_started.call_id for event in log if event.HasField("sub_agent_started")}) == 2


THREE_DEEP = """
agents:
  a:
    - calls: [{name: call_b, arguments: {message: b}}]
      usage: {input_tokens: 1, output_tokens: 1}
    - text: a
      usage: {input_tokens: 1, output_tokens: 1}
  b:
    - calls: [{name: call_c, arguments: {message: c}}]
      usage: {input_tokens: 10, output_tokens: 1}
    - text: b
      usage: {input_tokens: 10, output_tokens: 1}
  c:
    - text: c
      usage: {input_tokens: 100, output_tokens: 1}
"""


async def test_s7_ends_come_from_the_leaf_up_and_usage_adds_up(tmp_path: Path) -> None:
    async with open_team(tmp_path, THREE_DEEP, llm("a", links=["b"]), llm("b", links=["c"]), llm("c")) as harness:
        log = await harness.turn("a")
        await check_replay(harness, log)
    ends = [name for name in names(log) if "sub_agent.completed" in name or "run.completed" in name]
    assert ends == ["c: sub_agent.completed", "b: sub_agent.completed", "a: run.completed"]
    assert {(event.agent, event.depth) for event in log} == {("a", 0), ("b", 1), ("c", 2)}
    assert log[-1].run_completed.tree_usage.input_tokens == 122
    assert log[-1].run_completed.usage.input_tokens == 2
    assert {event.branch for event in log} == {"a", "a/b", "a/b/c"}


async def test_s8_a_cancelled_run_ends_every_open_thing_once_leaf_first(tmp_path: Path) -> None:
    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "c" and chunk == 1:
            await asyncio.Event().wait()

    async with open_team(tmp_path, ONE_CHILD, llm("p", links=["c"]), llm("c"), gate=gate) as harness:
        run = await harness.start("p")
        log = []
        async for event in harness.follow(run):
            log.append(event)
            if event.HasField("llm_output_text_delta"):
                await harness.runs.cancel(ME, run.run_id)
        entries = await harness.store.usage.list_for_run(run.run_id)
        await check_replay(harness, log)
    assert names(log) == [
        "p: run.started",
        *CALL,
        "p: tool.started",
        "c: sub_agent.started",
        "c: llm.started",
        "c: llm.output_text.delta",
        "p: control.cancel_requested",
        "c: llm.failed",
        "c: step.failed",
        "c: sub_agent.failed",
        "p: tool.failed",
        "p: step.failed",
        "p: run.cancelled",
    ]
    errors = [
        log[-6].llm_failed.error,
        log[-5].step_failed.error,
        log[-4].sub_agent_failed.error,
        log[-3].tool_failed.result.error,
        log[-2].step_failed.error,
        log[-1].run_cancelled.error,
    ]
    assert {error.reason for error in errors} == {error_pb2.ERROR_REASON_CANCELLED}
    called = [event for event in log if event.HasField("llm_completed") or event.HasField("llm_failed")]
    assert [(entry.agent, entry.sequence) for entry in entries] == [(event.agent, event.sequence) for event in called]


RETRIED = """
agents:
  p:
    - calls: [{name: call_c, arguments: {message: Say it.}}]
    - All done.
  c:
    - chunks: ["One ", "two ", "three."]
      usage: {input_tokens: 5, output_tokens: 3}
      error: {reason: TRANSPORT, after_chunks: 2, times: 1}
"""


async def test_s10_a_retried_attempt_voids_the_deltas_of_the_one_before(tmp_path: Path) -> None:
    async with open_team(tmp_path, RETRIED, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert [name for name in names(log) if name.startswith("c: llm.")] == [
        "c: llm.started",
        *["c: llm.output_text.delta"] * 2,
        "c: llm.retrying",
        *["c: llm.output_text.delta"] * 2,
        "c: llm.completed",
    ]
    shown = [event for event in summary(log) if event.HasField("sub_agent_partial")]
    assert [(event.attempt, event.sub_agent_partial.text) for event in shown] == [
        (1, "One "),
        (1, "two "),
        (2, "One "),
        (2, "two three."),
    ]
    ended = next(event for event in log if event.HasField("sub_agent_completed"))
    assert text_of(ended.sub_agent_completed.output) == "One two three."


async def test_a_child_that_aborts_its_caller_ends_its_siblings_first(tmp_path: Path) -> None:
    script = TWO_CHILDREN.replace("d: [The fast one.]", "d: [{text: x, error: {reason: UNAVAILABLE}}]")
    waiting = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "c":
            waiting.set()
            await asyncio.Event().wait()
        if agent == "d":
            await waiting.wait()

    team = (llm("p", links=["c", "d"]), llm("c"), llm("d"))
    async with open_team(tmp_path, script, *team, gate=gate) as harness:
        log = await harness.turn("p", policy=ABORT)
        await check_replay(harness, log)
    assert names(log)[-11:] == [
        "d: llm.failed",
        "p: control.cancel_requested",
        "c: llm.failed",
        "c: step.failed",
        "c: sub_agent.failed",
        "p: tool.failed",
        "d: step.failed",
        "d: sub_agent.failed",
        "p: tool.failed",
        "p: step.failed",
        "p: run.failed",
    ]
