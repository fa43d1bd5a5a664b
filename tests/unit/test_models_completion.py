"""Streamed chat completions of servers that follow the API, and of those that nearly do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import step_pb2, usage_pb2
from bough_server.models.answer import ReportedError
from bough_server.models.model import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from bough_server.models.openai.chat import Completion, usage_of
from bough_server.models.provider_json import BadChunk

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "tool_calls", "function", "content", "index", "usage", "id", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def taken(*chunks: object) -> tuple[Completion, list[Delta]]:
    completion = Completion()
    deltas = [delta for chunk in chunks for delta in completion.apply(json.dumps(chunk).encode())]
    return completion, deltas


def saying(delta: object, *, finish: str | None = None, **rest: object) -> dict[str, object]:
    return {"id": "c1", "model": "m1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **rest}


def calling(index: int | None, call_id: str | None = None, name: str | None = None, arguments: str = "") -> object:
    call: dict[str, object] = {"function": {"name": name, "arguments": arguments}}
    if index is not None:
        call["index"] = index
    if call_id is not None:
        call["id"] = call_id
    return saying({"tool_calls": [call]})


def calls_of(completion: Completion) -> list[tuple[str, str, str]]:
    message = completion.response(provider="p", model="m").message
    return [
        (part.tool_call.provider_call_id, part.tool_call.name, part.tool_call.arguments_json)
        for part in message.parts
        if part.HasField("tool_call")
    ]


def test_pieces_of_parallel_calls_are_put_together_by_index() -> None:
    completion, deltas = taken(
        calling(0, "a", "f", "{"), calling(1, "b", "g"), calling(0, None, None, "}"), calling(1, None, None, "[]")
    )
    assert deltas == [
        ToolCallDelta(0, "{", "a", "f"),
        ToolCallDelta(1, "", "b", "g"),
        ToolCallDelta(0, "}"),
        ToolCallDelta(1, "[]"),
    ]
    assert calls_of(completion) == [("a", "f", "{}"), ("b", "g", "[]")]


@pytest.mark.parametrize("index", [None, 0])
def test_calls_of_servers_without_indexes_are_told_apart_by_id(index: int | None) -> None:
    completion, _ = taken(calling(index, "a", "f", "{}"), calling(index, "b", "f", "{"), calling(index, "", "", "}"))
    assert calls_of(completion) == [("a", "f", "{}"), ("b", "f", "{}")]


def test_indexes_with_gaps_become_places_without() -> None:
    completion, deltas = taken(calling(3, "a", "f"), calling(7, "b", "g"))
    assert [delta.index for delta in deltas if isinstance(delta, ToolCallDelta)] == [0, 1]
    assert calls_of(completion) == [("a", "f", ""), ("b", "g", "")]


def test_a_name_may_come_late_and_a_repeated_one_is_not_doubled() -> None:
    completion, deltas = taken(calling(0, "a"), calling(0, "a", "f", "{"), calling(0, "a", "f", "}"))
    assert deltas == [ToolCallDelta(0, "", "a"), ToolCallDelta(0, "{", name="f"), ToolCallDelta(0, "}")]
    assert calls_of(completion) == [("a", "f", "{}")]


def test_reasoning_is_read_from_either_field_and_not_twice() -> None:
    _, deltas = taken(
        saying({"reasoning_content": "a"}),
        saying({"reasoning": "b"}),
        saying({"reasoning_content": "c", "reasoning": "c"}),
    )
    assert deltas == [ReasoningDelta("a"), ReasoningDelta("b"), ReasoningDelta("c")]


def test_the_raw_answer_has_reasoning_calls_and_no_text_where_there_is_none() -> None:
    completion, _ = taken(saying({"reasoning": "hm"}), calling(0, "a", "f", "{}"), saying({}, finish="tool_calls"))
    assert json.loads(completion.response(provider="p", model="m").raw_json)["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "finish_reason": "tool_calls",
        }
    ]


def test_an_answer_is_whole_with_a_finish_reason_or_the_done_mark_alone() -> None:
    completion, _ = taken(saying({"content": "a"}))
    assert not completion.is_whole
    completion.apply(b"[DONE]")
    assert (completion.is_whole, completion.is_done) == (True, True)
    completion, _ = taken(saying({"content": "a"}), saying({}, finish="stop"))
    assert (completion.is_whole, completion.is_done) == (True, False)


def test_a_chunk_that_opens_without_an_id_does_not_hide_the_id() -> None:
    completion, _ = taken({"id": "", "model": "", "choices": []}, saying({"content": "a"}))
    response = completion.response(provider="p", model="asked")
    assert (response.response_id, response.model) == ("c1", "m1")


def test_the_model_that_was_asked_stands_in_for_one_that_is_not_named() -> None:
    completion, _ = taken({"choices": [{"deltas": {"content": "a"}}]})
    assert completion.response(provider="p", model="asked").model == "asked"


def test_other_choices_do_not_count() -> None:
    _, deltas = taken({"choices": [{"index": 1, "deltas": {"content": "no"}}]}, saying({"content": "yes"}))
    assert deltas == [TextDelta("yes")]


def test_the_latest_usage_counts() -> None:
    completion, _ = taken(
        saying({"content": "a"}, usage={"prompt_tokens": 3, "completion_tokens": 1}),
        saying({"content": "b"}, usage={"prompt_tokens": 3, "completion_tokens": 2}),
        saying({"content": "c"}, usage=None),
    )
    assert completion.usage == usage_pb2.Usage(input_tokens=3, output_tokens=2)


@pytest.mark.parametrize("said", [True, -1, 2**63, 1.5, "3", None, []])
def test_a_count_that_is_no_count_is_absent(said: object) -> None:
    assert usage_of({"prompt_tokens": said, "completion_tokens": 0}) == usage_pb2.Usage(output_tokens=0)


@pytest.mark.parametrize("data", [b"{", b"", b"[1]", b'"a"', b'{"choices": 3}', b'{"choices": [3]}', b"\xff"])
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    with pytest.raises(BadChunk):
        Completion().apply(data)


def test_an_error_in_the_stream_is_raised_with_what_was_said() -> None:
    with pytest.raises(ReportedError) as raised:
        taken(saying({"content": "a"}), {"error": {"message": "no"}})
    assert raised.value.value == {"message": "no"}


@given(st.lists(JSON, max_size=4))
def test_no_json_whatever_raises_anything_else(chunks: list[object]) -> None:
    completion = Completion()
    text = ""
    try:
        for chunk in chunks:
            deltas = completion.apply(json.dumps(chunk).encode())
            text += "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    except (BadChunk, ReportedError):
        return
    response = completion.response(provider="p", model="m")
    assert "".join(part.text for part in response.message.parts) == text


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", step_pb2.FINISH_REASON_STOP),
        ("tool_calls", step_pb2.FINISH_REASON_TOOL_CALLS),
        ("function_call", step_pb2.FINISH_REASON_TOOL_CALLS),
        ("length", step_pb2.FINISH_REASON_LENGTH),
        ("content_filter", step_pb2.FINISH_REASON_CONTENT_FILTER),
        ("insufficient_system_resource", step_pb2.FINISH_REASON_OTHER),
        (None, step_pb2.FINISH_REASON_UNSPECIFIED),
    ],
)
def test_why_the_model_stopped_is_one_vocabulary_and_the_providers_word_beside_it(
    word: str | None, reason: step_pb2.FinishReason.ValueType
) -> None:
    completion, _ = taken(saying({"content": "a"}, finish=word))
    response = completion.response(provider="p", model="m")
    assert (response.finish_reason, response.provider_finish_reason) == (reason, word or "")


def test_a_complete_answer_with_calls_stopped_for_them_whatever_the_word_and_one_that_was_cut_did_not() -> None:
    for word, reason in (("stop", step_pb2.FINISH_REASON_TOOL_CALLS), ("length", step_pb2.FINISH_REASON_LENGTH)):
        completion, _ = taken(calling(0, "a", "f", "{}"), saying({}, finish=word))
        response = completion.response(provider="p", model="m")
        assert (response.finish_reason, response.provider_finish_reason) == (reason, word)


def test_a_citation_names_the_part_that_has_the_text() -> None:
    url = {"url": "https://oak.example", "title": "Oaks", "start_index": 0, "end_index": 4}
    cited = {"annotations": [{"type": "url_citation", "url_citation": url}]}
    completion, _ = taken(saying({"reasoning": "hm"}), saying({"content": "Oaks grow."}), saying(cited))
    (citation,) = completion.response(provider="p", model="m").annotations.citations
    assert citation == step_pb2.CitationRef(
        label="Oaks", url="https://oak.example", part_index=1, start_offset=0, end_offset=4
    )


def test_a_citation_of_an_answer_without_text_names_no_part() -> None:
    url = {"url": "https://oak.example", "start_index": 0, "end_index": 4}
    completion, _ = taken(saying({"annotations": [{"type": "url_citation", "url_citation": url}]}))
    (citation,) = completion.response(provider="p", model="m").annotations.citations
    assert citation == step_pb2.CitationRef(url="https://oak.example", start_offset=0, end_offset=4)


@given(st.lists(st.tuples(st.text(max_size=6), st.sampled_from(["", "a", "b"])), min_size=1, max_size=5))
def test_a_chunk_of_plain_text_is_read_as_any_other(said: list[tuple[str, str]]) -> None:
    plain = [
        saying({"role": "assistant", "content": text}, created=7, service_tier=tier or None, system_fingerprint="f")
        for text, tier in said
    ]
    # `audio` is not read, but keeps its chunk from being a plain one.
    other = [
        saying({"content": text, "audio": 1}, created=7, service_tier=tier or None, system_fingerprint="f")
        for text, tier in said
    ]
    (one, deltas), (another, same) = taken(*plain), taken(*other)
    assert deltas == same
    assert one.response(provider="p", model="m") == another.response(provider="p", model="m")


@pytest.mark.parametrize(
    "rest",
    [
        {"usage": {"prompt_tokens": 3}},
        {"citations": ["https://example.org"]},
        {"prompt_filter_results": [{"content_filter_results": {"hate": {"filtered": True}}}]},
        {"x_provider": {"region": "eu"}},
        {"service_tier": {"name": "flex"}},
    ],
)
def test_nothing_beside_a_text_is_lost(rest: dict[str, object]) -> None:
    completion, deltas = taken(saying({"content": "hi"}, **rest))
    assert deltas == [TextDelta("hi")]
    response = completion.response(provider="p", model="m")
    assert response.usage.input_tokens == 3 or response.HasField("annotations")


def test_nothing_beside_a_text_in_its_delta_is_lost() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"signature": "s"}}
    _, deltas = taken(saying({"content": "hi", "reasoning_content": "hm", "tool_calls": [call]}))
    assert deltas == [ReasoningDelta("hm"), TextDelta("hi"), ToolCallDelta(0, "{}", "c", "f")]
    completion, deltas = taken(saying({"content": "hi"}, finish="stop"))
    assert (deltas, completion.is_whole) == ([TextDelta("hi")], True)
