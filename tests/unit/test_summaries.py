"""What a model is asked that summarizes, whose summary is whose, and how a request is counted."""

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2, message_pb2
from bough_server.history.overflow import summary_of, summary_request
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.history.visible import policy_of, summaries
from bough_server.models.model import ModelRequest
from bough_server.models.tokens import FILE_TOKENS, count_request_tokens, request_tokens
from tests.support.visible import view

SESSION = message_pb2.HISTORY_SCOPE_SESSION
BRANCH = message_pb2.HISTORY_SCOPE_BRANCH
CALLS = message_pb2.HISTORY_SCOPE_CALLS
NONE = message_pb2.HISTORY_SCOPE_NONE
PICTURE = message_pb2.Part(blob=message_pb2.Blob(uri="file:///oak.png", media_type="image/png", filename="oak.png"))


def message(text: str, **fields: object) -> message_pb2.Message:
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=text)], **fields)  # type: ignore[arg-type]


def asked(request: ModelRequest) -> str:
    [one] = request.messages
    return one.parts[0].text


def test_a_summary_is_asked_for_in_words_alone_with_files_named() -> None:
    call = message_pb2.ToolCall(call_id="1", name="look", arguments_json='{"what":"oak"}')
    result = message_pb2.ToolResult(call=call, parts=[message_pb2.Part(text="a tree"), PICTURE])
    request = summary_request(
        [
            message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="What is this?"), PICTURE]),
            message_pb2.Message(
                role=message_pb2.ROLE_ASSISTANT, author="lead", parts=[message_pb2.Part(tool_call=call)]
            ),
            message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=result)]),
            message("For context: [c] said: It is old."),
            message_pb2.Message(parts=[message_pb2.Part(reasoning=message_pb2.Reasoning(text="Hm."))]),
        ],
        room=4000,
        words=40,
    )
    assert not request.tools
    assert asked(request) == (
        "The conversation:\n\n"
        "[user] What is this? (a file: image/png oak.png)\n\n"
        '[lead] called tool: `look` with arguments: {"what":"oak"}.\n\n'
        "[tool] `look` gave: a tree (a file: image/png oak.png)\n\n"
        "For context: [c] said: It is old.\n\n"
        "Summarize it in at most 40 words."
    )


@given(st.lists(st.text(min_size=1, max_size=400), min_size=1, max_size=30), st.integers(200, 3000))
def test_what_is_to_be_summarized_is_cut_to_its_room(texts: list[str], room: int) -> None:
    frame = len(asked(summary_request([], room=room, words=9)).encode())
    assert len(asked(summary_request(list(map(message, texts)), room=room, words=9)).encode()) - frame <= room


def test_where_there_are_too_many_messages_the_oldest_go_but_for_the_summary_before() -> None:
    before = message("For context: a summary of the conversation so far: Cedar.")
    text = asked(summary_request([before, *(message(f"{n} {'x' * 150}") for n in range(20))], room=800, words=9))
    assert "Cedar." in text
    assert "[user] 19 " in text
    assert "[user] 5 " not in text


def test_a_summary_is_cut_and_may_be_nothing() -> None:
    assert summary_of(message("  All is red. "), most=100) == "All is red."
    assert len(summary_of(message("x" * 500), most=100)) <= 100
    assert summary_of(message_pb2.Message(parts=[message_pb2.Part(data_json="{}")]), most=100) == ""


def summary(
    agent: str, chain: str, *, to_position: int = 4, saw: message_pb2.HistoryScope.ValueType = SESSION
) -> HistoryEntry:
    made = message("It was so.", kind=message_pb2.MESSAGE_KIND_SUMMARY, author=agent)
    made.summary_range.to_position, made.summary_range.scope = to_position, saw
    return HistoryEntry(made, agent, chain, 5)


@pytest.mark.parametrize(
    ("made", "scope", "is_seen"),
    [
        (summary("a", "la"), SESSION, True),
        (summary("a", "elsewhere"), SESSION, True),
        (summary("b", "la"), SESSION, False),
        (summary("a", "la"), BRANCH, False),
        (summary("a", "la", saw=BRANCH), BRANCH, True),
        (summary("a", "elsewhere", saw=BRANCH), BRANCH, False),
        (summary("a", "la", saw=BRANCH), SESSION, False),
        (summary("a", "la", saw=CALLS), CALLS, True),
        (summary("a", "elsewhere", saw=CALLS), CALLS, False),
        (summary("a", "elsewhere", saw=SESSION), CALLS, True),
        (summary("a", "la", saw=BRANCH), CALLS, False),
        (summary("a", "la", saw=CALLS), SESSION, False),
        (summary("a", "la", saw=CALLS), BRANCH, False),
        (summary("a", "la"), NONE, False),
        (summary("a", "la", to_position=0), SESSION, False),
    ],
)
def test_a_summary_is_for_the_same_agent_that_sees_as_much(
    made: HistoryEntry, scope: message_pb2.HistoryScope.ValueType, is_seen: bool
) -> None:
    reader = Transcript(agent="a", chain="la", above=Transcript(agent="lead", chain="l"))
    assert bool(list(summaries(reader, [made], scope=scope))) is is_seen
    assert view(reader, [made], scope=scope) == [], "in its own place it is never shown"


def test_the_policy_of_a_link_comes_before_that_of_a_definition() -> None:
    window = agent_pb2.SlidingWindow(max_tokens=9)
    definition = agent_pb2.AgentDefinition(history=agent_pb2.HistoryPolicy(scope=BRANCH, sliding_window=window))
    plain = agent_pb2.HistoryPolicy(scope=BRANCH, sliding_window=window)
    assert policy_of(agent_pb2.AgentDefinition()) == agent_pb2.HistoryPolicy(scope=SESSION)
    assert policy_of(definition) == policy_of(definition, agent_pb2.AgentLink()) == plain
    summarize = agent_pb2.Summarization(max_tokens=7)
    link = agent_pb2.AgentLink(history=agent_pb2.HistoryPolicy(summarize=summarize))
    assert policy_of(definition, link) == agent_pb2.HistoryPolicy(scope=BRANCH, summarize=summarize)
    link = agent_pb2.AgentLink(history=agent_pb2.HistoryPolicy(scope=NONE))
    assert policy_of(definition, link) == agent_pb2.HistoryPolicy(scope=NONE, sliding_window=window)


TOOL = agent_pb2.AgentLink(agent="b", link_mode=agent_pb2.LINK_MODE_TOOL)
TRANSFER = agent_pb2.AgentLink(agent="b", link_mode=agent_pb2.LINK_MODE_TRANSFER)
USUAL = agent_pb2.AgentLink(agent="b")


@pytest.mark.parametrize(
    ("kind", "links", "scope"),
    [
        ({"llm": agent_pb2.LlmAgent()}, [], SESSION),
        ({"llm": agent_pb2.LlmAgent()}, [USUAL], CALLS),
        ({"llm": agent_pb2.LlmAgent()}, [TRANSFER, TOOL], CALLS),
        ({"llm": agent_pb2.LlmAgent()}, [TRANSFER], SESSION),
        ({"supervisor": agent_pb2.SupervisorAgent()}, [USUAL], SESSION),
        ({"supervisor": agent_pb2.SupervisorAgent()}, [USUAL, TOOL], CALLS),
        ({"sequence": agent_pb2.SequenceAgent()}, [USUAL], SESSION),
        ({"function": agent_pb2.FunctionAgent()}, [USUAL], SESSION),
        ({}, [USUAL], SESSION),
    ],
)
def test_where_no_scope_is_said_it_is_calls_for_a_model_that_calls_agents(
    kind: dict[str, Message], links: list[agent_pb2.AgentLink], scope: message_pb2.HistoryScope.ValueType
) -> None:
    definition = agent_pb2.AgentDefinition(name="a", sub_agents=links, **kind)  # type: ignore[arg-type]
    planning = agent_pb2.AgentDefinition(plan_execute=agent_pb2.PlanExecuteAgent())
    assert policy_of(definition).scope == policy_of(definition, USUAL, definition).scope == scope
    assert policy_of(definition, USUAL, planning).scope == BRANCH
    said = agent_pb2.AgentLink(history=agent_pb2.HistoryPolicy(scope=NONE))
    assert policy_of(definition, said, planning).scope == NONE


def test_a_file_takes_tokens_wherever_it_is() -> None:
    result = message_pb2.ToolResult(parts=[PICTURE])
    inside = message_pb2.Message(parts=[message_pb2.Part(tool_result=result)])
    both = ModelRequest(messages=[message_pb2.Message(parts=[PICTURE]), inside])
    assert request_tokens(both) == 2 * FILE_TOKENS + request_tokens(ModelRequest(messages=[message_pb2.Message()] * 2))


class Counting:
    """A model's tokenizer that says what it is told to say."""

    def __init__(self, said: int | Exception | None) -> None:
        self._said = said

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """That."""
        if isinstance(self._said, Exception):
            raise self._said
        return self._said


@pytest.mark.parametrize(("said", "tokens"), [(7, 7), (0, 0), (None, 6), (ValueError("no"), 6), (OSError("gone"), 6)])
async def test_a_model_counts_and_where_it_cannot_an_estimate_does(said: int | Exception | None, tokens: int) -> None:
    request = ModelRequest(messages=[message("12345678")])
    assert await count_request_tokens(Counting(said), request) == tokens  # type: ignore[arg-type]
