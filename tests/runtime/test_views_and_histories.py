"""What is recorded of streams, what views show of it, and what agents see over the turns of a session."""

from pathlib import Path

import pytest

from bough.v1 import agent_pb2, event_pb2, follow_pb2, message_pb2, policy_pb2
from bough_server.log.views import Selection
from bough_server.models.model import ModelRequest
from bough_server.runs.admission import RunDefaults
from bough_server.tools.tool import tool
from tests.support.log_readings import check_replay, having, masked, text_of
from tests.support.teams import call, calls, llm, open_team, script

ONE_BY_ONE = policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())
JOINED = policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas(max_chars=10_000))
JOINED.aggregated.max_interval.FromSeconds(10)

WORDS = ["One ", "two ", "three ", "four."]
SPEECH = script(p=[calls(call("call_c", message="Count.")), "Done."], c=[{"chunks": WORDS}])


@pytest.mark.parametrize(
    ("request_says", "agent_says", "server_says", "pieces"),
    [
        (None, None, JOINED, 2),
        (None, None, ONE_BY_ONE, 4),
        (None, ONE_BY_ONE, JOINED, 4),
        (None, JOINED, ONE_BY_ONE, 2),
        (JOINED, ONE_BY_ONE, ONE_BY_ONE, 2),
        (ONE_BY_ONE, JOINED, JOINED, 4),
    ],
)
async def test_the_request_says_how_deltas_are_recorded_else_the_agent_else_the_server(
    tmp_path: Path,
    request_says: policy_pb2.DeltaPolicy | None,
    agent_says: policy_pb2.DeltaPolicy | None,
    server_says: policy_pb2.DeltaPolicy,
    pieces: int,
) -> None:
    c = llm("c")
    if agent_says is not None:
        c.deltas.CopyFrom(agent_says)
    defaults = RunDefaults(deltas=server_says)
    async with open_team(tmp_path, SPEECH, llm("p", links=["c"]), c, defaults=defaults) as harness:
        log = await harness.turn("p", policy=policy_pb2.RunPolicy(deltas=request_says))
        await check_replay(harness, log)
    said = [event.llm_output_text_delta.text for event in having(log, "llm_output_text_delta") if event.agent == "c"]
    assert len(said) == pieces
    assert "".join(said) == "".join(WORDS)


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


TEAM = script(
    p=[
        calls(call("call_c", message="Look."), call("look", what="leaf"), text="I ask."),
        calls(call("call_d", message="Write.")),
        "Done.",
    ],
    c=[{"calls": [call("look", what="tree")], "reasoning": "Hm."}, "It is red."],
    d=[{"text": "never", "error": {"reason": "UNAVAILABLE", "after_chunks": 1}}],
)
LINKED = (llm("p", links=["c", "d"], tools=["look"], parallel_tools=False), llm("c", tools=["look"]), llm("d"))


async def test_a_script_followed_in_two_views_has_one_log_and_one_tree(tmp_path: Path) -> None:
    policy = policy_pb2.RunPolicy(deltas=JOINED)
    logs, trees, shown = [], [], []
    async with open_team(tmp_path, TEAM, *LINKED, tools=[look]) as harness:
        for view in (follow_pb2.EVENT_VIEW_FULL, follow_pb2.EVENT_VIEW_SUMMARY):
            selection = Selection(view, ())
            run = await harness.start("p", policy=policy)
            shown.append([one async for event in harness.follow(run) if (one := selection.apply(event)) is not None])
            log = await harness.log(run)
            await check_replay(harness, log)
            logs.append(masked(log))
            trees.append(masked([await harness.tree(log, include_steps=True)]))
    assert logs[0] == logs[1]
    assert trees[0] == trees[1]
    assert len(shown[0]) == len(logs[0]) > len(shown[1])
    inner = {event.WhichOneof("payload") for event in shown[1] if event.depth}
    assert inner == {"sub_agent_started", "sub_agent_partial", "sub_agent_completed", "sub_agent_failed"}


async def test_a_childs_answer_is_the_text_of_its_partials_and_the_result_of_its_call(tmp_path: Path) -> None:
    selection = Selection(follow_pb2.EVENT_VIEW_SUMMARY, ())
    async with open_team(tmp_path, SPEECH, llm("p", links=["c"]), llm("c")) as harness:
        log = await harness.turn("p", policy=policy_pb2.RunPolicy(deltas=ONE_BY_ONE))
    partials = [one.sub_agent_partial.text for event in log if (one := selection.apply(event)) is not None]
    output = having(log, "sub_agent_completed")[0].sub_agent_completed.output
    result = having(log, "tool_completed")[0].tool_completed.result
    assert "".join(partials) == text_of(output) == text_of(result) == "".join(WORDS)


async def test_events_carry_where_they_belong_and_one_payload(tmp_path: Path) -> None:
    async with open_team(tmp_path, TEAM, *LINKED, tools=[look]) as harness:
        log = await harness.turn("p")
    for event in log:
        assert event.run_id == log[0].run_id
        assert event.session_id == log[0].session_id
        assert bool(event.parent_invocation_id) is (event.depth > 0)
        in_step = (event.WhichOneof("payload") or "").split("_")[0] in ("llm", "tool", "step")
        assert bool(event.step_id) is in_step
        again = event_pb2.AgentEvent.FromString(event.SerializeToString())
        assert again == event
    assert len({event.trace_id for event in log if event.trace_id}) == 1


def shown(request: ModelRequest) -> list[tuple[str, str]]:
    """What a model was shown: roles and texts, calls and results by their names."""
    seen = []
    for message in request.messages:
        parts = []
        for part in message.parts:
            if part.HasField("tool_call"):
                parts.append(f"<{part.tool_call.name}>")
            elif part.HasField("tool_result"):
                parts.append(f"={text_of(part.tool_result)}")
            else:
                parts.append(part.text)
        seen.append((message_pb2.Role.Name(message.role).removeprefix("ROLE_").lower(), "".join(parts)))
    return seen


TWO_TURNS = script(
    p=[
        {"when": "first", "calls": [call("call_c", message="c, look.")], "text": "I ask."},
        {"when": "first", "text": "First answer."},
        {"when": "second", "calls": [call("call_c", message="c, again.")]},
        {"when": "second", "text": "Second answer."},
    ],
    c=[
        {"when": "look", "calls": [call("look", what="leaf")]},
        {"when": "look", "text": "Leaf found."},
        {"when": "again", "text": "Again found."},
    ],
)


async def two_turns(folder: Path, scope: message_pb2.HistoryScope.ValueType) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the models were asked over two turns of one session, where c sees this much, and p the whole session."""
    heard: list[ModelRequest] = []
    link = agent_pb2.AgentLink(agent="c", history=agent_pb2.HistoryPolicy(scope=scope))
    team = (llm("p", links=[link]), llm("c", tools=["look"]))
    team[0].history.scope = message_pb2.HISTORY_SCOPE_SESSION
    async with open_team(folder, TWO_TURNS, *team, tools=[look], heard=heard) as harness:
        first = await harness.turn("p", "first question")
        second = await harness.turn("p", "second question", session_id=first[0].session_id)
        await check_replay(harness, first)
        await check_replay(harness, second)
    return [(request.agent, shown(request)) for request in heard]


async def test_a_child_sees_the_session_its_caller_and_itself_and_never_the_open_call(tmp_path: Path) -> None:
    asked = await two_turns(tmp_path, message_pb2.HISTORY_SCOPE_SESSION)
    assert asked[1] == (
        "c",
        [("user", "first question"), ("user", "For context: [p] said: I ask.."), ("user", "c, look.")],
    )
    assert asked[5] == (
        "c",
        [
            ("user", "first question"),
            ("user", "For context: [p] said: I ask.."),
            ("user", "c, look."),
            ("assistant", "<look>"),
            ("tool", "=leaf is red"),
            ("assistant", "Leaf found."),
            ("user", "For context: [p] said: First answer.."),
            ("user", "second question"),
            ("user", "c, again."),
        ],
    )


async def test_a_childs_messages_never_read_as_the_main_users_on_the_next_turn(tmp_path: Path) -> None:
    asked = await two_turns(tmp_path, message_pb2.HISTORY_SCOPE_SESSION)
    agent, messages = asked[4]
    assert agent == "p"
    assert [text for role, text in messages if role == "user" and not text.startswith("For context: ")] == [
        "first question",
        "second question",
    ]
    assert ("user", "For context: [c] said: Leaf found..") in messages
    assert ("assistant", "First answer.") in messages
    assert all("<call_c>" not in text for _, text in messages)


async def test_a_child_of_scope_none_sees_its_own_input_and_steps_only(tmp_path: Path) -> None:
    asked = await two_turns(tmp_path, message_pb2.HISTORY_SCOPE_NONE)
    assert asked[1] == ("c", [("user", "c, look.")])
    assert asked[2] == ("c", [("user", "c, look."), ("assistant", "<look>"), ("tool", "=leaf is red")])
    assert asked[5] == ("c", [("user", "c, again.")])


async def test_a_child_of_scope_branch_does_not_see_its_siblings(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    branch = agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_BRANCH)
    turns = script(
        p=[calls(call("call_d", message="d first.")), calls(call("call_c", message="c now.")), "Done."],
        c=["c answers"],
        d=["d answers"],
    )
    team = (llm("p", links=["d", agent_pb2.AgentLink(agent="c", history=branch)]), llm("c"), llm("d"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        first = await harness.turn("p", "a question")
        log = await harness.turn("p", "another", session_id=first[0].session_id)
        await check_replay(harness, log)
    asked = [shown(request) for request in heard if request.agent == "c"]
    assert asked[0] == [("user", "a question"), ("user", "c now.")]
    assert asked[1] == [
        ("user", "a question"),
        ("user", "c now."),
        ("assistant", "c answers"),
        ("user", "For context: [p] said: Done.."),
        ("user", "another"),
        ("user", "c now."),
    ]


async def test_parallel_children_see_nothing_of_each_other_and_the_next_step_sees_both(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(
        p=[calls(call("call_c", message="for c"), call("call_d", message="for d")), "Done."], c=["from c"], d=["from d"]
    )
    async with open_team(tmp_path, turns, llm("p", links=["c", "d"]), llm("c"), llm("d"), heard=heard) as harness:
        await harness.turn("p", "go")
    asked = {request.agent: shown(request) for request in heard}
    assert asked["c"] == [("user", "go"), ("user", "for c")]
    assert asked["d"] == [("user", "go"), ("user", "for d")]
    assert asked["p"] == [
        ("user", "go"),
        ("assistant", "<call_c><call_d>"),
        ("tool", "=from c"),
        ("tool", "=from d"),
    ]
