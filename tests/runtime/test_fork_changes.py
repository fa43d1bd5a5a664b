"""What a fork changes takes effect from where it begins, and what fits nothing is refused by its field."""

from pathlib import Path

import pytest

from bough.v1 import error_pb2, fork_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.errors import InvalidRequest
from bough_server.runtime.agent import Context
from tests.support.fork_agents import World, edited, open_forked, place, run_of
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.open_runs import open_runs
from tests.support.teams import call, calls, llm, open_team, script


@pytest.fixture
def world() -> World:
    return World()


async def test_a_fork_asks_another_model_with_another_instruction_only_from_there_on(
    tmp_path: Path, world: World
) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        world.heard.clear()
        fork = await harness.fork(
            run_of(origin),
            place(origin, "step_completed", -2),
            agents={"p": fork_pb2.AgentOverride(model="other", instruction="Say it in verse.")},
        )
        log = await harness.log(fork)
        await check_replay(harness, log)
        catalog = harness.store.catalog
        (named,) = having(log, "run_forked")[0].run_forked.definition_refs
        definition = await catalog.get(named.revision)
    assert [event.llm_started.model for event in having(log, "llm_started") if event.agent == "p"] == [
        "default",
        "other",
    ]
    assert [request.instruction for request in world.heard] == ["Say it in verse."]
    assert definition is not None
    assert (definition.name, definition.llm.model, definition.llm.instruction) == ("p", "other", "Say it in verse.")


async def test_a_fork_after_the_first_event_may_be_told_something_else(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p", "hello")
        world.heard.clear()
        said = message_pb2.Message(parts=[message_pb2.Part(text="good evening")])
        fork = await harness.fork(run_of(origin), 1, input=said)
        log = await harness.log(fork)
        tree = await harness.tree(log)
        stored = await harness.messages(fork.session_id)
        await check_replay(harness, log)
        with pytest.raises(InvalidRequest) as refused:
            await harness.fork(run_of(origin), 2, input=said)
    assert [text_of(message) for message in world.heard[0].messages] == ["good evening"]
    assert text_of(tree.user_content) == "good evening"
    assert text_of(stored[0].message) == "good evening"
    assert (stored[0].message.role, stored[0].message.author) == (message_pb2.ROLE_USER, "user")
    assert [violation.field for violation in refused.value.violations] == ["changes.input"]


@pytest.mark.parametrize("parts", [[message_pb2.Part(text="x" * 256 * 1024)], [message_pb2.Part(data_json="{")]])
async def test_what_a_fork_is_told_instead_is_held_to_the_rules_of_an_input(
    tmp_path: Path, world: World, parts: list[message_pb2.Part]
) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        with pytest.raises(InvalidRequest) as refused:
            await harness.fork(run_of(origin), 1, input=message_pb2.Message(parts=parts))
    assert [violation.field.startswith("changes.input") for violation in refused.value.violations] == [True]


async def test_an_edited_result_moves_the_fork_to_just_before_it(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        end = next(event for event in having(origin, "tool_completed") if event.depth == 0)
        world.heard.clear()
        fork = await harness.fork(
            run_of(origin),
            len(origin) - 1,
            tool_results=[
                edited("leaf is blue", end.tool_completed.result.call.call_id, invocation_id=end.invocation_id)
            ],
        )
        log = await harness.log(fork)
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert fork.forked_from.sequence == end.sequence - 1
    assert [event.WhichOneof("payload") for event in log[end.sequence - 1 : end.sequence + 1]] == [
        "run_forked",
        "tool_completed",
    ]
    assert answer_of(log) == "Done."
    told = [text_of(part.tool_result) for message in world.heard[-1].messages for part in message.parts]
    assert "leaf is blue" in told
    assert "leaf is red" not in told
    assert world.looked["leaf"] == 1
    assert next(one.result_json for one in tree.tools if one.agent == "p") == '"leaf is blue"'


async def test_two_results_of_one_step_may_be_edited_at_once(tmp_path: Path) -> None:
    world = World()
    turns = script(p=[calls(call("look", what="leaf"), call("look", what="root")), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=["look"]), tools=world.tools(), heard=world.heard) as harness:
        origin = await harness.turn("p")
        ends = having(origin, "tool_completed")
        edits = [
            edited("blue", ends[0].tool_completed.result.call.call_id),
            fork_pb2.EditedResult(
                call_id=ends[1].tool_completed.result.call.call_id,
                outcome=message_pb2.ToolOutcome(failure=message_pb2.ToolFailure(message="Gone.")),
            ),
        ]
        for order in (edits, edits[::-1]):
            log = await harness.log(await harness.fork(run_of(origin), len(origin) - 1, tool_results=order))
            check_laws(log)
            await check_replay(harness, log)
            results = having(log, "step_completed")[0].step_completed.step.tool_results
            assert [text_of(result) or result.error.message for result in results] == [
                "blue" if ends[0].tool_completed.result.call.call_id == result.call.call_id else "Gone."
                for result in results
            ]
            assert len(having(log, "tool_failed")) == 1
    assert world.looked == {"leaf": 1, "root": 1}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"agents": {"absent": fork_pb2.AgentOverride(model="other")}}, 'changes.agents["absent"]'),
        ({"agents": {"p": fork_pb2.AgentOverride(model="unknown")}}, 'changes.agents["p"].model'),
        ({"agents": {"absent": fork_pb2.AgentOverride(instruction="x")}}, 'changes.agents["absent"]'),
        ({"agents": {"p": fork_pb2.AgentOverride(instruction="{{input}}")}}, 'changes.agents["p"].instruction'),
        ({"tool_results": [edited("x", "nothing")]}, "changes.tool_results[0].call_id"),
        ({"tool_results": [edited("x", "call_0_0")]}, "changes.tool_results[0].call_id"),
        ({"tool_results": [edited("x", "call_0_1")]}, "changes.tool_results[0].call_id"),
    ],
)
async def test_changes_that_fit_nothing_are_refused_by_their_fields(
    tmp_path: Path, world: World, change: dict[str, object], field: str
) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        with pytest.raises(InvalidRequest) as refused:
            await harness.fork(run_of(origin), len(origin) - 1, **change)  # type: ignore[arg-type]
        assert await open_runs(harness.store) == []
    assert [violation.field for violation in refused.value.violations] == [field]


async def test_edited_results_that_are_none_are_refused_by_their_fields(tmp_path: Path, world: World) -> None:
    nested = message_pb2.Part(tool_call=message_pb2.ToolCall(call_id="x"))
    outcomes = [
        message_pb2.ToolOutcome(),
        message_pb2.ToolOutcome(parts=[nested]),
        message_pb2.ToolOutcome(failure=message_pb2.ToolFailure(message="Gone.", details_json="{")),
        message_pb2.ToolOutcome(parts=[message_pb2.Part(text="x" * 600 * 1024)]),
    ]
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        end = next(event for event in having(origin, "tool_completed") if event.depth == 0)
        call_id = end.tool_completed.result.call.call_id
        for outcome in outcomes:
            change = fork_pb2.EditedResult(call_id=call_id, invocation_id=end.invocation_id, outcome=outcome)
            with pytest.raises(InvalidRequest) as refused:
                await harness.fork(run_of(origin), len(origin) - 1, tool_results=[change])
            assert [violation.field for violation in refused.value.violations] == ["changes.tool_results[0].outcome"]


async def test_a_call_is_edited_once(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        end = next(event for event in having(origin, "tool_completed") if event.depth == 0)
        change = edited("x", end.tool_completed.result.call.call_id, invocation_id=end.invocation_id)
        with pytest.raises(InvalidRequest, match="edited twice"):
            await harness.fork(run_of(origin), len(origin) - 1, tool_results=[change, change])


async def test_what_an_edited_result_says_of_its_call_is_the_servers(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        end = next(event for event in having(origin, "tool_completed") if event.depth == 0)
        before = end.tool_completed.result
        change = edited("blue", before.call.call_id, invocation_id=end.invocation_id)
        change.outcome.failure.message, change.outcome.failure.retryable = "Half of it is gone.", True
        change.outcome.failure.details_json = '{"lost": 1}'
        log = await harness.log(await harness.fork(run_of(origin), len(origin) - 1, tool_results=[change]))
        check_laws(log)
    result = log[end.sequence].tool_failed.result
    assert result == message_pb2.ToolResult(
        call=before.call,
        parts=[message_pb2.Part(text="blue")],
        agent="p",
        invocation_id=end.invocation_id,
        start_time=before.start_time,
        error=error_pb2.AgentError(
            reason=error_pb2.ERROR_REASON_TOOL_FAILED,
            message="Half of it is gone.",
            agent="p",
            invocation_id=end.invocation_id,
            retryable=True,
            details_json='{"lost": 1}',
        ),
    )


async def test_the_same_call_of_two_invocations_needs_the_invocations_name(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        ends = [
            event for event in having(origin, "tool_completed") if not event.tool_completed.result.child_invocation_id
        ]
        by_id = {event.tool_completed.result.call.call_id: event for event in ends}
        assert len(by_id) == 1, "both agents' models give their first call the same id"
        (call_id,) = by_id
        with pytest.raises(InvalidRequest, match="set invocation_id too"):
            await harness.fork(run_of(origin), len(origin) - 1, tool_results=[edited("x", call_id)])
        for end in ends:
            change = edited("x", call_id, invocation_id=end.invocation_id)
            log = await harness.log(await harness.fork(run_of(origin), len(origin) - 1, tool_results=[change]))
            assert answer_of(log) == "Done."
            assert log[end.sequence].tool_completed.result.invocation_id == end.invocation_id


async def test_a_fork_of_code_that_is_told_otherwise_replays_with_what_it_was_told(tmp_path: Path) -> None:
    @agent(description="Says what it is told.")
    async def echo(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.now()
        return text_of(input)

    async with open_team(tmp_path, script(), code_agents=[echo]) as harness:
        origin = await harness.turn("echo", "one")
        said = message_pb2.Message(parts=[message_pb2.Part(text="two")])
        log = await harness.log(await harness.fork(run_of(origin), 1, input=said))
        await check_replay(harness, log)
    assert answer_of(log) == "two"
