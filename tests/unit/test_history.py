"""What an agent is shown: scopes, cuts, and other agents' messages as context."""

import pytest

from bough.v1 import error_pb2, message_pb2
from bough_server.history.rewrite import as_context, result_without_files
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.ids import agent_chain
from tests.support.visible import build

SESSION = message_pb2.HISTORY_SCOPE_SESSION
BRANCH = message_pb2.HISTORY_SCOPE_BRANCH
NONE = message_pb2.HISTORY_SCOPE_NONE
CALLS = message_pb2.HISTORY_SCOPE_CALLS


def user(text: str, *, invocation: str = "i0") -> message_pb2.Message:
    return message_pb2.Message(
        role=message_pb2.ROLE_USER,
        kind=message_pb2.MESSAGE_KIND_USER,
        author="user",
        invocation_id=invocation,
        parts=[message_pb2.Part(text=text)],
    )


def told(caller: str, text: str, *, invocation: str) -> message_pb2.Message:
    return message_pb2.Message(
        role=message_pb2.ROLE_USER,
        kind=message_pb2.MESSAGE_KIND_SUB_AGENT_USER,
        author=caller,
        invocation_id=invocation,
        parts=[message_pb2.Part(text=text)],
    )


def said(author: str, text: str = "", *calls: tuple[str, str, str], invocation: str = "i0") -> message_pb2.Message:
    message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, author=author, invocation_id=invocation)
    if text:
        message.parts.add(text=text)
    for call_id, name, arguments in calls:
        message.parts.add(tool_call=message_pb2.ToolCall(call_id=call_id, name=name, arguments_json=arguments))
    return message


def result(
    author: str, call_id: str, name: str, text: str, *, child: str = "", invocation: str = "i0"
) -> message_pb2.Message:
    answer = message_pb2.ToolResult(
        call=message_pb2.ToolCall(call_id=call_id, name=name),
        parts=[message_pb2.Part(text=text)],
        child_invocation_id=child,
    )
    return message_pb2.Message(
        role=message_pb2.ROLE_TOOL,
        author=author,
        invocation_id=invocation,
        parts=[message_pb2.Part(tool_result=answer)],
    )


def texts(messages: list[message_pb2.Message]) -> list[str]:
    return ["".join(part.text for part in message.parts) for message in messages]


def test_a_tool_call_of_another_agent_and_its_result_are_two_user_messages() -> None:
    call = said("MyAgent", "", ("c", "tool1", "arguments1"))
    answer = result("MyAgent", "c", "tool1", "tool result 1")
    shown = [*as_context(call), *as_context(answer)]
    assert texts(shown) == [
        "For context: [MyAgent] called tool: `tool1` with arguments: arguments1.",
        "For context: [MyAgent] `tool1` tool returned result: tool result 1.",
    ]
    assert {message.role for message in shown} == {message_pb2.ROLE_USER}


def test_text_and_two_calls_of_another_agent_are_one_user_message() -> None:
    message = said("A", "hi", ("1", "x", "{}"), ("2", "y", "{}"))
    assert texts(as_context(message)) == [
        "For context: [A] said: hi. [A] called tool: `x` with arguments: {}. [A] called tool: `y` with arguments: {}."
    ]


def test_reasoning_is_dropped_and_files_stay() -> None:
    blob = message_pb2.Blob(uri="file:///picture.png", media_type="image/png")
    message = message_pb2.Message(
        author="A",
        parts=[
            message_pb2.Part(reasoning=message_pb2.Reasoning(text="secret thought")),
            message_pb2.Part(blob=blob),
        ],
    )
    assert as_context(message) == [
        message_pb2.Message(role=message_pb2.ROLE_USER, author="A", parts=[message_pb2.Part(blob=blob)])
    ]


def test_an_empty_message_of_another_agent_is_left_out() -> None:
    assert as_context(said("A", "  ")) == []


def test_a_child_never_sees_the_open_call_that_made_it_run() -> None:
    parent = Transcript(agent="lead", chain="l")
    parent.add_message(user("write"))
    parent.add_message(said("lead", "I ask.", ("c1", "call_writer", '{"message":"go"}')))
    child = Transcript(agent="writer", chain="lw", above=parent)
    child.add_message(told("lead", "go", invocation="i1"))
    assert texts(build(child, [], scope=SESSION)) == ["write", "For context: [lead] said: I ask..", "go"]
    assert not any(part.HasField("tool_call") for m in build(child, [], scope=SESSION) for part in m.parts)


def test_children_of_one_step_do_not_see_each_other_and_later_ones_see_both() -> None:
    parent = Transcript(agent="lead", chain="l")
    parent.add_message(user("go"))
    parent.add_message(said("lead", "", ("c1", "call_a", "{}"), ("c2", "call_b", "{}")))
    first = Transcript(agent="a", chain="la", above=parent)
    first.add_message(told("lead", "for a", invocation="ia"))
    first.add_message(said("a", "a answers", invocation="ia"))
    second = Transcript(agent="b", chain="lb", above=parent)
    second.add_message(told("lead", "for b", invocation="ib"))
    assert texts(build(second, [], scope=SESSION)) == ["go", "for b"]
    second.add_message(said("b", "b answers", invocation="ib"))
    parent.join(first, by_call=True)
    parent.add_message(result("lead", "c1", "call_a", "a answers", child="ia"))
    parent.join(second, by_call=True)
    parent.add_message(result("lead", "c2", "call_b", "b answers", child="ib"))
    third = Transcript(agent="c", chain="lc", above=parent)
    third.add_message(told("lead", "for c", invocation="ic"))
    assert texts(build(third, [], scope=SESSION)) == [
        "go",
        "For context: [lead] said: for a.",
        "For context: [a] said: a answers.",
        "For context: [lead] said: for b.",
        "For context: [b] said: b answers.",
        "for c",
    ]


def test_the_caller_sees_its_calls_and_their_results_in_native_roles_and_nothing_twice() -> None:
    parent = Transcript(agent="lead", chain="l")
    parent.add_message(user("go"))
    call = said("lead", "", ("c1", "call_a", "{}"))
    parent.add_message(call)
    child = Transcript(agent="a", chain="la", above=parent)
    child.add_message(told("lead", "for a", invocation="ia"))
    parent.join(child, by_call=True)
    answer = result("lead", "c1", "call_a", "a answers", child="ia")
    parent.add_message(answer)
    assert build(parent, [], scope=SESSION) == [user("go"), call, answer]


def test_results_follow_their_calls_in_call_order_whatever_came_between() -> None:
    own = Transcript(agent="lead", chain="l")
    call = said("lead", "", ("c1", "x", "{}"), ("c2", "y", "{}"))
    first, second = result("lead", "c1", "x", "1"), result("lead", "c2", "y", "2")
    session = [
        HistoryEntry(call, "lead", "l"),
        HistoryEntry(user("later"), "lead", "l"),
        HistoryEntry(second, "lead", "l"),
        HistoryEntry(first, "lead", "l"),
    ]
    assert build(own, session, scope=SESSION) == [call, first, second, user("later")]


def test_a_dangling_call_of_the_session_is_left_out() -> None:
    own = Transcript(agent="lead", chain="l")
    session = [HistoryEntry(said("lead", "", ("c1", "x", "{}")), "lead", "l"), HistoryEntry(user("next"), "lead", "l")]
    assert build(own, session, scope=SESSION) == [user("next")]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (SESSION, ["old", "For context: [other] said: noise.", "For context: [lead] said: mine.", "now", "go"]),
        (BRANCH, ["old", "For context: [lead] said: mine.", "now", "go"]),
        (NONE, ["go"]),
    ],
)
def test_a_scope_bounds_what_is_seen_of_session_and_ancestors(
    scope: message_pb2.HistoryScope.ValueType, expected: list[str]
) -> None:
    session = [
        HistoryEntry(user("old"), "lead", "l"),
        HistoryEntry(said("other", "noise", invocation="x"), "other", "lo"),
        HistoryEntry(said("lead", "mine"), "lead", "l"),
    ]
    parent = Transcript(agent="lead", chain="l")
    parent.add_message(user("now"))
    child = Transcript(agent="a", chain="la", above=parent)
    child.add_message(told("lead", "go", invocation="ia"))
    assert texts(build(child, session, scope=scope)) == expected


def test_what_a_sub_agent_was_told_never_reads_as_the_main_users() -> None:
    session = [
        HistoryEntry(user("first"), "lead", "l"),
        HistoryEntry(told("lead", "do it", invocation="ia"), "a", "la"),
        HistoryEntry(said("a", "done", invocation="ia"), "a", "la"),
        HistoryEntry(said("lead", "answer"), "lead", "l"),
    ]
    lead = Transcript(agent="lead", chain="l")
    lead.add_message(user("second"))
    shown = build(lead, session, scope=SESSION)
    assert texts(shown) == [
        "first",
        "For context: [lead] said: do it.",
        "For context: [a] said: done.",
        "answer",
        "second",
    ]
    assert shown[3].role == message_pb2.ROLE_ASSISTANT


def test_a_sub_agent_reads_its_own_earlier_turn_in_native_roles() -> None:
    session = [
        HistoryEntry(told("lead", "do it", invocation="ia"), "a", "la"),
        HistoryEntry(said("a", "done", invocation="ia"), "a", "la"),
    ]
    again = Transcript(agent="a", chain="la")
    assert [message.role for message in build(again, session, scope=SESSION)] == [
        message_pb2.ROLE_USER,
        message_pb2.ROLE_ASSISTANT,
    ]


def test_a_very_long_result_is_shown_with_head_and_tail() -> None:
    own = Transcript(agent="lead", chain="l")
    own.add_message(said("lead", "", ("c1", "x", "{}")))
    own.add_message(result("lead", "c1", "x", "a" * 100_000 + "the end"))
    shown = build(own, [], scope=SESSION)[1].parts[0].tool_result
    assert shown.truncated
    assert len(shown.parts[0].text) < 65_536
    assert shown.parts[0].text.endswith("the end")


@pytest.mark.parametrize("scope", [SESSION, BRANCH, NONE])
def test_a_lane_has_what_its_invocation_said_before_the_fork_as_its_own(
    scope: message_pb2.HistoryScope.ValueType,
) -> None:
    """Its calls of linked agents with their results as well; what another lane says it does not see."""
    lead = Transcript(agent="lead", chain="l")
    lead.add_message(user("the caller's question", invocation="i1"))
    own = Transcript(agent="a", chain="la", above=lead)
    own.add_message(told("lead", "the task", invocation="i2"))
    own.add_message(said("a", "", ("c1", "call_b", "{}"), invocation="i2"))
    child = Transcript(agent="b", chain="lab", above=own)
    child.add_message(said("b", "what b said", invocation="i3"))
    own.join(child, by_call=True)
    own.add_message(result("a", "c1", "call_b", "what b said", child="i3", invocation="i2"))
    lane, other = own.lane(), own.lane()
    other.add_message(said("a", "in the other lane", invocation="i2"))
    inner = lane.lane()
    inner.add_message(said("a", "in this lane", invocation="i2"))
    shown = build(inner, [], scope=scope)
    above = [] if scope == NONE else ["the caller's question"]
    assert texts(shown) == [*above, "the task", "", "", "in this lane"]
    assert shown[-3:-1] == [entry.message for entry in own.entries if isinstance(entry, HistoryEntry)][1:3]


def test_a_tree_of_joined_children_two_thousand_deep_is_read_without_recursion() -> None:
    root = Transcript(agent="a", chain="0")
    deepest = root
    for depth in range(2_000):
        child = Transcript(agent=f"n{depth}", chain=str(depth), above=deepest)
        child.add_message(said(f"n{depth}", f"at {depth}", invocation=str(depth)))
        deepest.join(child, by_call=False)
        deepest = child
    assert len(build(root, [], scope=SESSION)) == 2_000


def test_a_failed_tool_s_content_is_read_with_its_error() -> None:
    result = message_pb2.ToolResult(
        call=message_pb2.ToolCall(call_id="1", name="look"),
        parts=[message_pb2.Part(text="Half of it.")],
        error=error_pb2.AgentError(message="It broke."),
    )
    assert result_without_files(result) == "Error: It broke.\nHalf of it."
    said = message_pb2.Message(role=message_pb2.ROLE_TOOL, author="a", parts=[message_pb2.Part(tool_result=result)])
    (shown,) = as_context(said)
    expected = "For context: [a] `look` tool returned result: Error: It broke.\nHalf of it.."
    assert [part.text for part in shown.parts] == [expected]


def called(caller: Transcript, name: str, *, call_id: str, invocation: str) -> Transcript:
    """A child that a model calls and that answers, joined to its caller's transcript."""
    caller.add_message(said(caller.agent, "", (call_id, f"call_{name}", "{}")))
    child = Transcript(agent=name, chain=agent_chain(caller.chain, name), above=caller)
    child.add_message(told(caller.agent, f"for {name}", invocation=invocation))
    child.add_message(said(name, f"from {name}", invocation=invocation))
    caller.join(child, by_call=True)
    caller.add_message(result(caller.agent, call_id, f"call_{name}", f"from {name}", child=invocation))
    return child


def test_with_calls_the_calls_of_a_run_stand_for_what_was_said_inside_but_on_the_readers_own_way() -> None:
    lead = Transcript(agent="lead", chain=agent_chain("", "lead"))
    lead.add_message(user("go"))
    called(lead, "a", call_id="c1", invocation="ia")
    called(lead, "b", call_id="c2", invocation="ib")
    again = Transcript(agent="a", chain=agent_chain(lead.chain, "a"), above=lead)
    again.add_message(told("lead", "for a, again", invocation="ia2"))
    assert texts(build(again, [], scope=CALLS)) == [
        "go",
        "for a",
        "from a",
        "For context: [lead] called tool: `call_b` with arguments: {}.",
        "For context: [lead] `call_b` tool returned result: from b.",
        "for a, again",
    ]


def test_with_calls_an_agent_that_calls_itself_does_not_see_the_inside_of_that() -> None:
    root = agent_chain("", "a")
    session = [
        HistoryEntry(user("old"), "a", root, 1),
        HistoryEntry(said("a", "", ("c1", "call_a", "{}")), "a", root, 1, is_call=True),
        HistoryEntry(told("a", "to itself", invocation="ia"), "a", agent_chain(root, "a"), 2),
        HistoryEntry(said("a", "deep", invocation="ia"), "a", agent_chain(root, "a"), 3),
        HistoryEntry(result("a", "c1", "call_a", "deep", child="ia"), "a", root, 3, is_call=True, inside=("ia",)),
        HistoryEntry(said("a", "done"), "a", root, 4),
    ]
    outer, inner = Transcript(agent="a", chain=root), Transcript(agent="a", chain=agent_chain(root, "a"))
    assert build(outer, session, scope=CALLS) == [session[at].message for at in (0, 1, 4, 5)]
    assert build(inner, session, scope=CALLS) == [session[at].message for at in (0, 2, 3, 5)]
    assert build(outer, session, scope=SESSION) == [session[at].message for at in (0, 2, 3, 5)]


def test_calls_that_no_message_holds_are_seen_with_calls_only() -> None:
    """Their reasoning as well, which would be left of the message."""
    asked = said("lead", "", ("c1", "call_a", "{}"))
    asked.parts.add(reasoning=message_pb2.Reasoning(text="Ask a."))
    chain = agent_chain("", "lead")
    answer = result("lead", "c1", "call_a", "from a", child="ia")
    session = [
        HistoryEntry(asked, "lead", chain, 1, is_call=True),
        HistoryEntry(answer, "lead", chain, 1, is_call=True, inside=("ia",)),
    ]
    lead = Transcript(agent="lead", chain=chain)
    assert build(lead, session, scope=CALLS) == [asked, answer]
    assert [build(lead, session, scope=scope) for scope in (SESSION, BRANCH, NONE)] == [[], [], []]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (SESSION, ["one", "For context: [b] said: from b."]),
        (CALLS, ["one", "For context: [b] said: from b."]),
        (BRANCH, ["one", "For context: [b] said: the answer."]),
        (NONE, []),
    ],
)
def test_an_answer_that_a_root_passed_on_is_seen_once(
    scope: message_pb2.HistoryScope.ValueType, expected: list[str]
) -> None:
    root = agent_chain("", "s")
    session = [
        HistoryEntry(user("one"), "s", root, 1),
        HistoryEntry(said("b", "from b", invocation="ib"), "b", agent_chain(root, "b"), 2),
        HistoryEntry(said("b", "the answer"), "s", root, 3, is_relay=True),
    ]
    reader = Transcript(agent="a", chain=agent_chain(root, "a"), above=Transcript(agent="s", chain=root))
    assert texts(build(reader, session, scope=scope)) == expected
